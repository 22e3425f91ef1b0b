"""The codec of patches: the same bytes with each instruction set and in each version, and damaged bytes."""

from __future__ import annotations

import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparsecomm.backends import _codec
from tests.patches.elements import LAYOUTS, host_tensor, layout_of
from tests.processes import LIMIT

SIMD = ("portable", "avx2", "avx512")
ROOT = Path(__file__).parents[2]
# By layout: CRC-32 of patches and digests. If one must change, change the mark of patches, too.
CHECKSUMS = {
    "float8_e4m3": 271533654, "float8_e5m2": 2169130508, "uint8": 346897235, "bfloat16": 3020354867,
    "float16": 512376362, "int16": 2242799491, "float32": 98746151, "int32": 825248560, "float64": 4067459935,
    "int64": 2885054083,
}  # fmt: skip
# One more and one less than ends of vectors, groups, tiles and pieces.
LENGTHS = [1, *(end + d for end in (64, 512, 1024, 8192, 16384, _codec.PIECE) for d in (-1, 1)), 20_011]


@pytest.fixture(params=SIMD)
def _simd(request: pytest.FixtureRequest) -> Iterator[None]:
    if not _codec.use_simd(request.param):
        pytest.skip(f"no {request.param}")
    yield
    assert any(_codec.use_simd(name) for name in reversed(SIMD))


def versions(name: str, n: int, rate: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of elements of all classes, and a copy where one in ``rate`` moves by a few steps."""
    itemsize, shift, mask, low, is_float = LAYOUTS[name]
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    bits = x.astype(f"u{itemsize}")
    if is_float:
        exponents = np.minimum(low + (x >> np.uint64(40)) % np.uint64(20), mask).astype(bits.dtype)
        bits = bits & ~bits.dtype.type(mask << shift) | exponents << bits.dtype.type(shift)
    steps = (x >> np.uint64(33)).astype(np.int64) % 9 - 4
    return bits, np.where((x >> np.uint64(11)) % np.uint64(rate) == 0, bits + steps.astype(bits.dtype), bits)


@pytest.mark.usefixtures("_simd")
@pytest.mark.parametrize("name", CHECKSUMS)
def test_patches_are_exact_and_their_bytes_never_change(name: str) -> None:
    layout, checksum = layout_of(name), 0
    for i, n in enumerate(LENGTHS):
        old, new = versions(name, n, (1, 2, 10, 200)[i % 4])
        coded, count, before, after = _codec.diff(host_tensor(old, name), host_tensor(new, name), layout)
        checksum = zlib.crc32(f"{before} {after}".encode(), zlib.crc32(coded, checksum))
        assert (count, _codec.digest(host_tensor(new, name))) == (np.count_nonzero(old != new), after)
        written = old.copy()
        located = _codec.locate(host_tensor(written, name), layout, coded)
        assert (located.before, located.after) == (before, after)
        np.testing.assert_array_equal(written, old)
        located.write(host_tensor(written, name))
        np.testing.assert_array_equal(written, new)
        if coded:
            for damaged in (coded[:-1], coded + b"\0"):
                assert _codec.locate(host_tensor(old, name), layout, damaged) is None
    assert checksum == CHECKSUMS[name]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_damaged_bytes_are_refused_or_yield_another_digest(tmp_path: Path) -> None:
    kernels = ROOT / "kernels"
    sources = [*kernels.glob("patches/*.cpp"), kernels / "cpu/pool.cpp", kernels / "cpu/processor.cpp"]
    options = ["-std=c++17", "-O1", "-fwrapv", "-pthread", "-Wno-psabi", "-fsanitize=address,undefined"]
    command = ["g++", *options, "-fno-sanitize-recover=all", f"-I{kernels / 'patches'}", "-o", tmp_path / "fuzz"]
    subprocess.run([*command, ROOT / "tests/patches/fuzz.cpp", *sources], check=True, timeout=LIMIT)
    done = subprocess.run([tmp_path / "fuzz", "1000000", "1"], text=True, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
