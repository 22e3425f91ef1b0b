"""The tests of DistributedDataParallel that PyTorch's wheel ships, on two CPU ranks over gloo, with our hook.

Tests that want two GPUs run on CPU tensors: see `cpu_for_gpu`.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from tests.conformance import fixture
from tests.conformance.outcomes import Outcome, last_error
from tests.conformance.ranks import run_ranks

P = 2
SKIPPED = "skipped because: "
SECONDS = 300
ON_CPUS = f"PyTorch {torch.__version__}, DDP tests"
FOR_GPUS = f"{ON_CPUS} that want 2 GPUs, on CPU tensors"
QUICK = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_create_graph",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
)
# What a test asserts that no hook can satisfy.
EXPLAINED = {
    "test_ddp_comm_hook_logging": "asserts that DDP's log names no hook",
    "test_ddp_grad_div_uneven_inputs": "sets `divide_by_initial_world_size=False`, which PyTorch does not pass to "
    "hooks; it also fails with PyTorch's own `allreduce_hook`",
    "test_ddp_profiling_torch_profiler": "counts gloo's all-reduces; our hook makes none",
}


def outcomes(*, quick: bool) -> Iterator[Outcome]:
    """Run the tests, each on ranks of its own."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(P), INIT_METHOD="file://")
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed import distributed_test as theirs

    class Case(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def run_test(self, name: str, pipe: object) -> None:
            set_rng_seed()
            try:
                getattr(self, name)()
            except unittest.SkipTest as skipped:
                print(f"{SKIPPED}{skipped}")
                sys.exit(TEST_SKIPS["generic"].exit_code)

    for name in QUICK if quick else _names(theirs):
        yield _outcome(theirs, Case, name)


def _names(theirs: Any) -> list[str]:
    """Return the names of the tests that have to do with DDP."""
    found = []
    for name, method in vars(theirs.DistributedTest._DistTestBase).items():
        if name.startswith("test_"):
            source = inspect.getsource(inspect.unwrap(method))
            if re.search("ddp|DistributedDataParallel", source, re.IGNORECASE):
                found.append(name)
    return found


def _outcome(theirs: Any, cls: Any, name: str) -> Outcome:
    method = getattr(cls, name)
    if getattr(method, "__unittest_skip__", False):
        return Outcome(ON_CPUS, name, "not applicable", f"PyTorch skips it: {method.__unittest_skip_why__}")
    suite, gpus = ON_CPUS, False
    statuses, outputs = _run(theirs, cls, name, gpus=False, ours=True)
    if "GPU" in (said := _skipped(statuses, outputs)) or "CUDA" in said:
        suite, gpus = FOR_GPUS, True
        statuses, outputs = _run(theirs, cls, name, gpus=True, ours=True)
        said = _skipped(statuses, outputs)
    if said:
        return Outcome(suite, name, "not applicable", f"PyTorch skips it: {said}")
    if any(status != 0 for status in statuses):
        its = _run(theirs, cls, name, gpus=gpus, ours=False)
        if any(status != 0 for status in its[0]):
            return Outcome(suite, name, "not applicable", f"fails without our hook, too: {last_error(*its)}")
        if name in EXPLAINED:
            return Outcome(suite, name, "not applicable", EXPLAINED[name])
        return Outcome(suite, name, "failed", "\n".join(outputs))
    if "exchanged 0" in outputs[0]:
        return Outcome(suite, name, "not applicable", "passes, but exchanges no gradient by our hook")
    return Outcome(suite, name, "passed")


def _run(theirs: Any, cls: Any, name: str, *, gpus: bool, ours: bool) -> tuple[list[int | None], list[str]]:
    theirs.initialize_temp_directories()
    theirs.Barrier.init()
    file = os.path.join(os.environ["TEMP_DIR"], "store")

    def program(rank: int) -> None:
        torch.set_num_threads(1)
        if ours:
            fixture.install()
        if gpus:
            from tests.conformance.cpu_for_gpu import gpus_are_cpus
        try:
            with gpus_are_cpus(rank) if gpus else nullcontext():
                cls._run(rank, name, file, None)
        finally:
            print(f"exchanged {fixture.exchanged}")

    try:
        return run_ranks(P, program, SECONDS)
    finally:
        theirs.cleanup_temp_dir()


def _skipped(statuses: list[int | None], outputs: list[str]) -> str:
    """Return why PyTorch has skipped a test; an empty text if it has not."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if statuses[0] == skip.exit_code:
            said = re.search(f"{SKIPPED}(.*)", outputs[0])
            return said[1] if said else skip.message
    return ""
