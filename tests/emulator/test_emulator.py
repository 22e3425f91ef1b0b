"""The emulator reports faults that a GPU would not, in kernels that are wrong on purpose (faults.cu)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.backends.cuda.modules import TUNING, structure_definitions
from sparsecomm.tensors import interop
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.runtime import HERE, POISON, ROOT, EmulatedRuntime, EmulatorError
from tests.emulator.streams import LEGACY, PER_THREAD
from tests.processes import LIMIT


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the library's kernels and the wrong ones."""
    folder = tmp_path_factory.mktemp("sources") / "kernels"
    shutil.copytree(ROOT / "kernels", folder)
    shutil.copy(HERE / "faults.cu", folder / "cuda")
    return folder


@pytest.fixture
def runtime(sources: Path) -> EmulatedRuntime:
    return EmulatedRuntime(sources=sources)


def address(array: np.ndarray) -> np.uint64:
    return np.uint64(array.ctypes.data)


def run(runtime: EmulatedRuntime, name: str, blocks: int, threads: int, **arguments: np.generic) -> None:
    runtime.launch(runtime.kernel("faults.cu", name, structure_definitions(TUNING)), blocks, threads, arguments)


@pytest.mark.parametrize(
    ("name", "threads", "message"),
    [
        ("barrier_passed_by", 64, "has ended, and others wait at __syncthreads"),
        ("ballot_beside_barrier", 64, "a ballot with mask ffffffff names lane 5, which waits at __syncthreads"),
        ("different_operations", 32, "which is in (any|a ballot) with mask ffffffff"),
        ("different_masks", 32, "which is in a ballot with mask (ffff0001|ffffffff)"),
        ("mask_without_itself", 32, "31: a ballot with mask 7fffffff without itself"),
        ("lane_that_ended", 32, "a shuffle with mask ffffffff names lane 31, which has ended"),
        ("lane_that_does_not_exist", 16, "names lane 16, which does not exist"),
        ("endless", 32, "waits forever for a word in memory"),
        ("endless_beside_a_ballot", 32, "waits forever (in __syncwarp|for a word in memory)"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_is_an_error(sources: Path, seed: int, name: str, threads: int, message: str) -> None:
    runtime = EmulatedRuntime(sources=sources, seed=seed)
    out = runtime.empty(64, np.uint64)
    runtime.clear(out)
    with pytest.raises(EmulatorError, match=f"^{name}: block [0-9]+, thread .*{message}"):
        run(runtime, name, 2, threads, **{"word" if "endless" in name else "out": address(out)})
    run(runtime, "first_read", 2, 32, out=address(out))  # the next launch runs


def test_writes_behind_an_array_are_seen(runtime: EmulatedRuntime) -> None:
    out = runtime.empty(100, np.uint32)
    run(runtime, "writes_behind", 1, 32, out=address(out), n=np.uint64(99))
    with pytest.raises(EmulatorError, match="wrote behind the end of an array"):
        run(runtime, "writes_behind", 1, 32, out=address(out), n=np.uint64(100))


def test_shared_memory_and_arrays_begin_as_poison(runtime: EmulatedRuntime) -> None:
    out = runtime.empty(64, np.uint32)
    assert (out.view(np.uint8) == POISON).all()
    runtime.clear(out)
    run(runtime, "first_read", 2, 32, out=address(out))
    assert (out[:32].view(np.uint8) == POISON).all()
    assert not out[32:].any()


AGAIN = "if (count > stored && base + stored < capacity) {"  # a block reads its part again


@pytest.mark.parametrize(("density", "fails"), [(0.001, False), (0.01, False), (0.09, False), (0.5, True)])
def test_no_part_is_read_again_at_the_densities_in_use(density: float, fails: bool, tmp_path: Path) -> None:
    """At density 0.5 one is, which shows that the check works."""
    folder = tmp_path / "kernels"
    shutil.copytree(ROOT / "kernels", folder)
    file = folder / "cuda" / "filter.cuh"
    assert AGAIN in file.read_text()
    file.write_text(file.read_text().replace(AGAIN, f'{AGAIN} emulator::fail("read again");'))
    backend, n = CudaBackend(EmulatedRuntime(sources=folder, multiprocessors=2)), 150_000
    x, r = (interop.tensor(data.gradient("normal", n, "float32", seed), "x", writable=True) for seed in (1, 2))
    with pytest.raises(EmulatorError, match="read again") if fails else nullcontext():
        backend.topk(x, round(n * density), r)


def order(seed: int, *streams: int | None) -> str:
    """Return the order in which operations of streams run, enqueued one after another; None: a new stream."""
    runtime, ran = DeferredRuntime(seed=seed), list[str]()
    for name, stream in zip("abc", streams, strict=False):
        before = runtime.make_current(runtime.new_stream() if stream is None else stream)
        runtime.enqueue(partial(ran.append, name))
        runtime.make_current(before)
    runtime.streams.run_all()
    return "".join(ran)


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    for streams in ((PER_THREAD, LEGACY, PER_THREAD), (LEGACY, PER_THREAD, LEGACY)):
        assert {order(seed, *streams) for seed in range(20)} == {"abc"}
    assert {order(seed, None, LEGACY) for seed in range(20)} == {"ab", "ba"}


# -- AddressSanitizer ------------------------------------------------------------------------------------------------


def sanitized(program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process with AddressSanitizer."""
    compiler = os.environ.get("CXX", "g++")
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], text=True, capture_output=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=LIMIT
    )


BACKENDS = """
import sys
import pytest
from tests.emulator.runtime import EmulatedRuntime

EmulatedRuntime.flags = ("-fsanitize=address",)
files = (f"tests/backends/test_{name}.py" for name in ("cpu", "packed", "bucket", "adamw"))
# Each other type would be compiled with the sanitizer, too.
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", "cuda and not float16 and not float64", *files]))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_shipped_kernels_are_clean_under_address_sanitizer() -> None:
    done = sanitized(BACKENDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
