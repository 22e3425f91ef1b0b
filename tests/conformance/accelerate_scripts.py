"""The scripts in `accelerate.test_utils.scripts`, on two CPU ranks over gloo, with the hook on every model in DDP."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import accelerate.test_utils  # noqa: F401  once, before ranks are forked
from accelerate.utils import DistributedType

from tests.conformance import fixture
from tests.conformance.outcomes import Ended, Outcome, outcome_of_runs, run_ranks

P = 2
SECONDS = 200
SUITE = f"Accelerate {version('accelerate')}, `test_utils.scripts`"
QUICK = ("test_sync", "test_ddp_comm_hook")
OTHERS = ("test_script", "test_distributed_data_loop", "test_ops", "test_cli")
DOWNLOADS = "downloads a model and a data set from huggingface.co"
DEEPSPEED = "needs DeepSpeed, and has no model in DDP"
NOT_APPLICABLE = {
    "test_merge_weights": "requires GPUs, and has no model in DDP: FSDP",
    "test_notebook": "has no model: it starts processes",
    "external_deps.test_checkpointing": DOWNLOADS,
    "external_deps.test_metrics": DOWNLOADS,
    "external_deps.test_performance": DOWNLOADS,
    "external_deps.test_peak_memory_usage": DOWNLOADS,
    "external_deps.test_pippy": "has no gradients: pipelined inference",
    "external_deps.test_zero3_integration": DEEPSPEED,
    "external_deps.test_ds_multiple_model": DEEPSPEED,
    "external_deps.test_ds_alst_ulysses_sp": DEEPSPEED,
}


def outcomes(*, quick: bool) -> Iterator[Outcome]:
    """Run each script on ranks of its own."""
    for name in QUICK if quick else (*QUICK, *OTHERS):
        yield outcome_of(name)
    for name, reason in () if quick else NOT_APPLICABLE.items():
        yield Outcome(SUITE, name, "not applicable", reason)


def outcome_of(name: str, suite: str = SUITE) -> Outcome:
    def run(with_hook: bool) -> Ended:
        return run_ranks(P, lambda rank: run_script(name, with_hook), SECONDS)

    return outcome_of_runs(suite, name, run)


def run_script(name: str, with_hook: bool) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = [name]
    fixture.ignore_device_ids()  # test_ddp_comm_hook passes them even on CPUs
    if with_hook:
        fixture.install()
    script: Any = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    if name == "test_ddp_comm_hook":
        script.test_ddp_comm_hook = unless_it_needs_cuda(script.test_ddp_comm_hook)
    if name == "test_distributed_data_loop":
        script.create_accelerator = with_join(script.create_accelerator)
    try:
        script.main()
    finally:
        print(f"exchanged {fixture.exchanged}")


def unless_it_needs_cuda(test: Any) -> Any:
    @functools.wraps(test)
    def run(*arguments: object) -> None:
        try:
            test(*arguments)
        except TypeError as error:
            if "required CUDA" not in str(error):  # PyTorch's hook of bfloat16
                raise

    return run


def with_join(create: Any) -> Any:
    """Let an Accelerator join uneven inputs on CPUs, as it does on GPUs."""

    @functools.wraps(create)
    def created(*arguments: Any, **options: Any) -> Any:
        accelerator = create(*arguments, **options)
        accelerator.state.distributed_type = DistributedType.MULTI_GPU
        return accelerator

    return created
