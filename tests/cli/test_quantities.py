"""Numbers with units: K is 1000 everywhere, and Ki is 1024."""

from __future__ import annotations

import pytest

import sparsecomm as sc
from sparsecomm.cli import quantities


@pytest.mark.parametrize(
    ("text", "size"),
    [("64K", 64_000), ("64Ki", 65_536), ("64kB", 64_000), ("64KiB", 65_536), ("1.5M", 1_500_000), ("2g", 2 * 10**9)],
)
def test_bytes(text: str, size: int) -> None:
    assert quantities.nbytes("-b", text) == size


@pytest.mark.parametrize(("text", "number"), [("25.6M", 25_600_000), ("1e6", 10**6), ("4ki", 4096), ("1T", 10**12)])
def test_counts(text: str, number: int) -> None:
    assert quantities.count("--n", text) == number


@pytest.mark.parametrize("text", ["", "K", "64X", "-5", "64KK", "64 i", "1e400", "nan"])
def test_nonsense(text: str) -> None:
    for function, option in ((quantities.count, "--n"), (quantities.nbytes, "-b"), (quantities.rate, "--rate")):
        with pytest.raises(sc.InvalidInputError, match=f"^{option} {text}: expected"):
            function(option, text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (65_536, "64 KiB"), (64_000, "64 kB"), (25_600_000, "25.6 MB"), (3 << 30, "3 GiB")],
)
def test_bytes_are_shown_in_the_shorter_units(size: int, text: str) -> None:
    assert quantities.size_text(size) == text
    assert quantities.nbytes("-b", text.replace(" B", "")) == size


def test_bytes_that_were_counted_are_decimal() -> None:
    assert [quantities.bytes_text(size) for size in (307_200, 179_201_344)] == ["307.2 kB", "179.2 MB"]


@pytest.mark.parametrize(("length", "text"), [(2, "2 s"), (0.0015, "1.5 ms"), (1e-6, "1 us"), (3e-8, "30 ns")])
def test_times(length: float, text: str) -> None:
    assert quantities.time_text(length) == text
    assert quantities.seconds("--latency", text) == pytest.approx(length)
