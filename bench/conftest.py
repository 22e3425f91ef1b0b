"""Fixtures and reports of the pytest benchmarks. ``make bench`` runs them.

``BENCH_N`` sets the number of elements of their long vectors.

Under mpirun every rank runs the same benchmarks. Rank 0 reports; the others say something only if they fail.
"""

from __future__ import annotations

import io
import os
import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pytest_benchmark.logger import PytestBenchmarkWarning

import sparsecomm as sc
from sparsecomm.backends import _cpu

N = int(float(os.environ.get("BENCH_N") or 1 << 22))
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--other-version",
        action="store_true",
        help="let --benchmark-compare take results that another version of sparsecomm stored",
    )


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
    return {
        "machine": platform.node(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "sparsecomm": {"version": sc.__version__, "simd": _cpu.simd(), "ranks": ranks},
    }


def pytest_benchmark_compare_machine_info(
    config: pytest.Config, benchmarksession: Any, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    warnings.filterwarnings("default", category=PytestBenchmarkWarning)  # that the machines differ is no error
    stored = compared_benchmark["machine_info"].get("sparsecomm", {}).get("version", "an unknown version")
    if stored != sc.__version__ and not config.getoption("--other-version"):
        raise pytest.UsageError(
            f"the stored results are of sparsecomm {stored}, and this is {sc.__version__}; if you mean to compare "
            "versions, say --other-version"
        )


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: pytest.Config) -> None:
    if _RANK > 0:
        config.option.benchmark_json = config.option.benchmark_save = config.option.benchmark_autosave = None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if _RANK > 0:
        session.config.get_terminal_writer()._file = io.StringIO()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_FAILED] = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not config.stash.get(_FAILED, False):
        return
    if _RANK > 0:
        hidden = config.get_terminal_writer()._file
        print(f"rank {_RANK}:\n{hidden.getvalue()}", file=sys.stderr, flush=True)
    if "mpi4py.MPI" in sys.modules:
        sys.stdout.flush()
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(1)  # the other ranks may be waiting for this one


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long vectors, and one that fits into the caches."""
    if "n" in metafunc.fixturenames:
        metafunc.parametrize("n", sorted({65_536, N}), ids=lambda n: f"n={n}")
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))


@pytest.fixture
def normal() -> Callable[[int, np.dtype[Any]], np.ndarray]:
    """Normal data: every part of the vector has the same scale."""
    return lambda n, dtype: np.random.default_rng(n).standard_normal(n, dtype=np.float32).astype(dtype)


@pytest.fixture
def measure(benchmark: Any) -> Callable[..., Any]:
    """Time a function. Beside the time stand the bytes that it has to move, and at what rate that makes."""

    def run(function: Callable[..., Any], *args: Any, read: int, written: int) -> Any:
        result = benchmark(function, *args)
        benchmark.extra_info |= {"bytes_read": read, "bytes_written": written}
        if benchmark.stats is not None:  # None with --benchmark-disable
            benchmark.extra_info["floor_gb_per_s"] = (read + written) / benchmark.stats.stats.median / 1e9
        return result

    return run
