"""The selection of tests (see tests/README.md), their environment, and common fixtures."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.emulator.deferred import DeferredRuntime
from tests.emulator.devices import use
from tests.thinning import covering_array

# If set, pytest runs all tests, as `make test-all` does, also in ranks that tests start.
ALL = "SPARSECOMM_TEST_ALL"
# Variables of the user that would change results: of this library, launchers, threads, Python and the terminal.
OF_THE_USER = re.compile(
    r"SPARSECOMM_(?!TEST_ALL$)|SLURM_|TORCHELASTIC_|TORCH_|GLOO_|MASTER_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|OMP_|"
    r"\w+_NUM_THREADS$|PYTHON(WARNINGS|OPTIMIZE|HASHSEED|IOENCODING|STARTUP|UTF8)$|LC_|LANG|(NO|FORCE|CLI)_?COLOR|"
    r"COLUMNS$|LINES$"
)

# The same examples in every run, however slow the machine is.
settings.register_profile(
    "alike", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("alike")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"run all tests, as `make test-all` (or set {ALL}=1)")


@pytest.hookimpl(tryfirst=True)  # before pytest creates its temporary folder
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        os.environ[ALL] = "1"
    if {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"} & set(os.environ):
        # Ranks that share pytest's folder would delete each other's files.
        folder = tempfile.mkdtemp(prefix="sparsecomm-rank-")
        config.option.basetemp = os.path.join(folder, "pytest")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    elif "PYTEST_XDIST_WORKER" not in os.environ:
        _forget_the_user()
    config.pluginmanager.import_plugin("tests.forks")  # it keeps the environment
    # A background job of a script ignores SIGINT, but some tests need it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget_the_user() -> None:
    """Remove the user's settings from the environment of this process and its children."""
    for name in filter(OF_THE_USER.match, list(os.environ)):
        del os.environ[name]
    os.environ["LC_ALL"] = "C.UTF-8"
    # The user's cache may have a profile. The cache of the checkout is kept from run to run.
    os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build/cache")
    os.umask(0o022)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Tests that are named on the command line run with all their parameters.
    if ALL not in os.environ and not any("::" in argument for argument in config.args):
        chosen = _chosen(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    gc.collect()
    gc.freeze()  # the garbage collector need not visit thousands of tests again and again
    if "PYTEST_XDIST_WORKER" in os.environ:  # start with long files, so that all processes end together
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of `make test`: no ``exhaustive`` ones, and few combinations of ``covering`` ones."""
    chosen: set[pytest.Item] = set()
    products: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            continue
        if item.get_closest_marker("covering"):
            products[item.nodeid.partition("[")[0]].append(item)
        else:
            chosen.add(item)
    for product in products.values():
        (strength,) = product[0].get_closest_marker("covering").args
        rows = [list(map(id, item.callspec.params.values())) for item in product]  # some are not hashable
        chosen |= {product[i] for i in covering_array(rows, strength)}
    return chosen


@pytest.fixture(autouse=True, scope="module")
def _nobody_writes_to_constants() -> Iterator[None]:
    """Python has one object for each one-byte text, so a write to it changes it everywhere."""
    yield
    assert all(chr(i).encode("latin-1")[0] == i for i in range(256)), "a bytes object was written to"


@pytest.fixture
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeferredRuntime]:
    """An emulated CUDA device that replaces CuPy's. The order of its work is random, seeded by the test's name."""
    runtime = DeferredRuntime(seed=zlib.crc32(request.node.nodeid.encode()))
    use(runtime, monkeypatch, radix_max_size=50, spare_candidates=100, filter_rounds=1)
    yield runtime
    runtime.streams.run_all()
