"""The codec of patches against an oracle in NumPy, with each instruction set, and with damaged bytes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsecomm.backends import _codec
from tests.patches.elements import LAYOUTS, changed, elements, host_tensor, layout_of
from tests.processes import LIMIT

CLASSES, PIECE, BLOCK = 16, 2**21, 1024
ESCAPE = 24  # from this quotient of a Rice code, the number follows uncoded
SIMD = ("portable", "avx2", "avx512")
ROOT = Path(__file__).parents[2]
Change = tuple[int, int, int]  # class, rank, distance
every_layout = pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "complex128"])


@pytest.fixture(params=SIMD)
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    if not _codec.use_simd(request.param):
        pytest.skip(f"no {request.param}")
    yield request.param
    assert any(_codec.use_simd(name) for name in reversed(SIMD))


def mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest(elements: np.ndarray) -> int:
    golden, low = np.uint64(0x9E3779B97F4A7C15), np.uint64(2**32 - 1)
    half = np.uint64(32)
    with np.errstate(over="ignore"):
        keys = mix(np.arange(1, BLOCK // 8 + 1, dtype=np.uint64) * golden)
        words = np.frombuffer(elements.tobytes().ljust(-(-elements.nbytes // BLOCK) * BLOCK, b"\0"), "<u8").reshape(
            -1, BLOCK // 8
        )
        keyed = words ^ keys
        hashes = ((keyed & low) * (keyed >> half) + (words << half | words >> half)).sum(1, dtype=np.uint64)
        total = mix(hashes + np.arange(1, len(hashes) + 1, dtype=np.uint64) * golden).sum(dtype=np.uint64)
        return int(mix(total + mix(np.array([elements.nbytes], np.uint64) + golden))[0])


def order(elements: np.ndarray, is_float: bool) -> np.ndarray:
    sign = elements.dtype.type(1 << (8 * elements.itemsize - 1))
    return np.where(elements & sign, ~elements, elements | sign) if is_float else elements


def changes(old: np.ndarray, new: np.ndarray, name: str) -> list[Change]:
    """Return the changes of a piece by class and rank."""
    itemsize, shift, mask, low, is_float = LAYOUTS[name]
    exponents = (old >> old.dtype.type(shift)).astype(np.uint64) & np.uint64(mask)
    classes = (exponents.astype(np.int64) - low).clip(0, CLASSES - 1)
    distances = (order(new, is_float) - order(old, is_float)).view(f"i{itemsize}")
    result = []
    for c in range(CLASSES):
        members = np.flatnonzero(classes == c)
        ranks = np.flatnonzero(old[members] != new[members])
        result += [(c, int(rank), int(distances[members[rank]])) for rank in ranks]
    return result


class Reader:
    """Reads the format that kernels/patches/README.md describes."""

    def __init__(self, data: bytes) -> None:
        self.bits, self.width = int.from_bytes(data, "little"), 8 * len(data)

    def get(self, width: int) -> int:
        value, self.bits, self.width = self.bits & ((1 << width) - 1), self.bits >> width, self.width - width
        return value

    def number(self) -> int:
        return self.get(self.get(6))

    def rice(self, parameter: int) -> int:
        quotient = 0
        while not self.get(1):
            quotient += 1
        return quotient << parameter | self.get(parameter) if quotient < ESCAPE else self.get(self.get(6) + 1)

    def numbers(self, count: int) -> list[int]:
        parameter = self.get(6) if count else 0
        return [self.rice(parameter) for _ in range(count)]

    def set_of(self, count: int, size: int, others: bool) -> list[int]:
        gaps = self.numbers(size - count if others else count)
        members = (np.cumsum(np.array(gaps, np.int64) + 1) - 1).tolist()
        return sorted(set(range(size)) - set(members)) if others else members

    def values(self, count: int) -> list[int]:
        low = self.get(6)
        values, rest = [self.get(low) for _ in range(count)], list(range(count))
        while rest:
            if self.get(1):
                for i, more in zip(rest, self.numbers(len(rest)), strict=True):
                    values[i] += more << low
                break
            larger = self.number()
            rest = [rest[i] for i in self.set_of(larger, len(rest), 2 * larger > len(rest))]
            for i in rest:
                values[i] += 1 << low
        return values


def decoded(piece: bytes, size: int) -> list[Change]:
    """Return the changes of a piece by class and rank."""
    reader, result = Reader(piece), []
    present = reader.get(CLASSES) if piece else 0
    for c in range(CLASSES):
        if not present >> c & 1:
            continue
        count, others = reader.number(), bool(reader.get(1))
        ranks = reader.set_of(count, reader.number() if others else size, others)
        signs = [-1 if reader.get(1) else 1 for _ in range(count)]
        steps = reader.values(count)
        result += [(c, rank, sign * (step + 1)) for rank, sign, step in zip(ranks, signs, steps, strict=True)]
    assert 0 <= reader.width < 8
    return result


def check(old: np.ndarray, new: np.ndarray, name: str) -> bytes:
    """Check that a patch has the right digests, and turns ``old`` into ``new``. Return it."""
    layout = layout_of(name)
    coded, count, before, after = _codec.diff(host_tensor(old, name), host_tensor(new, name), layout)
    assert (count, before, after) == (np.count_nonzero(old != new), digest(old), digest(new))
    assert _codec.digest(host_tensor(new, name)) == after
    written = old.copy()
    located = _codec.locate(host_tensor(written, name), layout, coded)
    assert (located.before, located.after) == (before, after)
    np.testing.assert_array_equal(written, old)
    located.write(host_tensor(written, name))
    np.testing.assert_array_equal(written, new)
    return coded


@every_layout
@pytest.mark.parametrize(("n", "density"), [(1, 1), (1023, 0.3), (5000, 0.01), (5000, 0.9), (20011, 0.05), (9000, 1)])
def test_changes_are_coded_by_class_and_rank(simd: str, name: str, n: int, density: float) -> None:
    old = elements(name, n, 0)
    new = changed(name, old, density, 1)
    coded = check(old, new, name)
    length = int.from_bytes(coded[:4], "little")
    assert length == len(coded[4:])
    assert decoded(coded[4:], n) == changes(old, new, name)


@every_layout
def test_all_instruction_sets_agree_at_the_ends_of_groups_tiles_and_pieces(name: str) -> None:
    sets = [simd for simd in SIMD if _codec.use_simd(simd)]
    ends = [64, 512, BLOCK // LAYOUTS[name][0], 1024, 8192, 16384]
    for seed, n in enumerate([2, *(end + d for end in ends for d in (-1, 0, 1)), PIECE - 1, PIECE + 1]):
        old = elements(name, n, seed)
        new, coded = changed(name, old, (0.001, 0.02, 0.4, 0.97)[seed % 4], seed + 1), set()
        for simd in sets:
            _codec.use_simd(simd)
            coded.add(check(old, new, name))
        assert len(coded) == 1


def test_patches_without_changes_and_of_other_elements(simd: str) -> None:
    name, layout = "bfloat16", layout_of("bfloat16")
    old = elements(name, 5000, 0)
    assert check(old, old, name) == check(old[:0], old[:0], name) == b""
    coded, *_ = _codec.diff(host_tensor(old, name), host_tensor(changed(name, old, 0.1, 1), name), layout)
    assert _codec.locate(host_tensor(old[:10].copy(), name), layout, coded) is None
    for damaged in (coded[:-1], coded + b"\0"):
        assert _codec.locate(host_tensor(old, name), layout, damaged) is None


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
