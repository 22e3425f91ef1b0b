"""The tests of DistributedDataParallel in PyTorch's wheel, on two CPU ranks over gloo, with this library's hook.

Tests that require two GPUs run on CPU tensors: see `tests.conformance.fixture.gpus_are_cpus`.
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

import torch

from tests.conformance import fixture
from tests.conformance.outcomes import SKIPPED, Ended, Outcome, outcome_of_runs, run_ranks

P = 2
SECONDS = 300
ON_CPUS = f"PyTorch {torch.__version__}, DDP tests"
FOR_GPUS = f"{ON_CPUS} that require 2 GPUs, on CPU tensors"
QUICK = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_create_graph",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
)
# By test: an assertion that no hook can satisfy.
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

    def run(name: str, gpus: bool, with_hook: bool) -> Ended:
        theirs.initialize_temp_directories()
        theirs.Barrier.init()
        file = os.path.join(os.environ["TEMP_DIR"], "store")

        def program(rank: int) -> None:
            torch.set_num_threads(1)
            if with_hook:
                fixture.install()
            try:
                with fixture.gpus_are_cpus(rank) if gpus else nullcontext():
                    Case._run(rank, name, file, None)
            finally:
                print(f"exchanged {fixture.exchanged}")

        try:
            return run_ranks(P, program, SECONDS)
        finally:
            theirs.cleanup_temp_dir()

    def skipped(ended: Ended) -> str:
        """Return why PyTorch skipped a test, or an empty string."""
        for skip in TEST_SKIPS.values():
            if ended[0][0] == skip.exit_code:
                line = re.search(f"{SKIPPED}(.*)", ended[1][0])
                return line[1] if line else skip.message
        return ""

    def outcome(name: str) -> Outcome:
        suite, why = ON_CPUS, getattr(getattr(Case, name), "__unittest_skip_why__", "")
        if not why:
            ended = run(name, False, True)
            why = skipped(ended)
            if gpus := "GPU" in why or "CUDA" in why:
                suite, ended = FOR_GPUS, run(name, True, True)
                why = skipped(ended)
            if not why:
                rerun = lambda with_hook: ended if with_hook else run(name, gpus, False)  # noqa: E731
                return outcome_of_runs(suite, name, rerun, EXPLAINED)
        return Outcome(suite, name, "not applicable", f"PyTorch skips it: {why}")

    methods = vars(theirs.DistributedTest._DistTestBase).items()
    of_ddp = re.compile("ddp|DistributedDataParallel", re.IGNORECASE)
    sources = {name: inspect.getsource(inspect.unwrap(method)) for name, method in methods if name.startswith("test_")}
    yield from map(outcome, QUICK if quick else [name for name, source in sources.items() if of_ddp.search(source)])
