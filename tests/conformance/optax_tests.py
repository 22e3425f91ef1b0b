"""The tests of AdamW in optax's wheel, run on `sparsecomm.jax.sparse_adamw` at density 1.0."""

from __future__ import annotations

import importlib
import os
import re
import sys
import unittest
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from tests.conformance.outcomes import Outcome, outcomes_of_ranks, report

SECONDS = 3000
SUITE = f"optax {version('optax')}, its tests of `adamw`"
MODULES = (
    "optax._src.alias_test",
    "optax._src.sharding_test",
    "optax.contrib._common_test",
    "optax._src.float64_test",  # the last: it turns float64 on
)
# One test of each kind that takes at most a second.
QUICK = ("accept_extra_args", "explicit_dtype", "preserve_dtype", "inject_hyperparams")
# Documented differences, by a pattern of the failure.
EXPLAINED = {
    "explicit_dtype.*bfloat16.*None": "moments of bfloat16 parameters are in float32",
    "complex.*InvalidInputError.*complex": "refused with an error: complex parameters",
}


def outcomes(*, quick: bool) -> Iterator[Outcome]:
    """Run the tests on one rank, and unless ``quick`` also on two ranks with the same gradients."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # for the tests of sharding
    for P in (1,) if quick else (1, 2):
        for outcome in outcomes_of_ranks(f"{SUITE}, P = {P}", P, lambda rank, P=P: _program(rank, P, quick), SECONDS):
            text = f"{outcome.case} {outcome.reason}"
            why = [why for pattern, why in EXPLAINED.items() if re.search(pattern, text, re.DOTALL)]
            known = outcome.result == "failed" and why
            yield Outcome(outcome.suite, outcome.case, "not applicable", why[0]) if known else outcome


def _program(rank: int, P: int, quick: bool) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=P)
    _switch()
    sys.argv = sys.argv[:1]
    from absl import flags

    flags.FLAGS(sys.argv)
    for module in MODULES[:1] if quick else MODULES:
        for suite in unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module)):
            for test in suite:  # type: ignore[union-attr]
                method = test._testMethodName
                name = f"{method} {getattr(test, '_test_params_reprs', {}).get(method, '')}".strip()
                chosen = not quick or any(word in method for word in QUICK)
                if not chosen or not _is_of_adamw(name):
                    continue
                if "test_optimization" in method or (P > 1 and "target=" in name):
                    report(name, "not applicable", "not run: takes thousands of steps")
                else:
                    _run(test, name)
    dist.destroy_process_group()


def _is_of_adamw(name: str) -> bool:
    return "opt_name='adamw'" in name or re.search(r"(?<!n)adamw\b", name.partition(" ")[0]) is not None


def _run(test: Any, name: str) -> None:
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        report(name, "not applicable", result.skipped[0][1])
    elif problems := result.failures + result.errors:
        report(name, "failed", problems[0][1])
    else:
        report(name, "passed")


def _switch() -> None:
    """Replace `optax.adamw` before the tests are imported."""
    import jax
    import optax
    import torch.distributed as dist
    from optax._src import alias

    from sparsecomm.jax import sparse_adamw

    def adamw(
        learning_rate: Any,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        eps_root: float = 0.0,
        mu_dtype: Any = None,
        weight_decay: float = 1e-4,
        mask: Any = None,
        *,
        nesterov: bool = False,
    ) -> Any:
        for name, on in (("eps_root", eps_root), ("mu_dtype", mu_dtype), ("nesterov", nesterov)):
            if not isinstance(on, jax.Array) and on not in (None, False, 0.0):  # arrays: injected defaults, traced
                raise unittest.SkipTest(f"sparse_adamw has no {name}")
        return sparse_adamw(
            learning_rate, b1, b2, eps, weight_decay, mask, density=1.0, wire="packed", comm=dist.group.WORLD
        )

    optax.adamw = alias.adamw = adamw
