"""Numbers with units: the texts for people, and the options that read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsecomm import quantities
from sparsecomm.cli import options


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (65_536, "64 KiB"), (64_000, "64 kB"), (25_600_000, "25.6 MB"), (3 << 30, "3 GiB")],
)
def test_sizes_use_the_shorter_unit(size: int, text: str) -> None:
    assert quantities.size_text(size) == text
    assert options.nbytes(text) == size


def test_byte_counts_are_decimal() -> None:
    assert [quantities.bytes_text(size) for size in (307_200, 179_201_344)] == ["307.2 kB", "179.2 MB"]


@pytest.mark.parametrize(("length", "text"), [(2, "2 s"), (0.0015, "1.5 ms"), (1e-6, "1 us"), (3e-8, "30 ns")])
def test_times(length: float, text: str) -> None:
    assert quantities.time_text(length) == text
    assert options.seconds(text) == pytest.approx(length)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (1060.4, "1,060"), (0.00001, "0.00001"), (25.0, "25"), (9.999, "10"), (-12345678, "-12,345,678")],
)
def test_numbers(number: float, text: str) -> None:
    assert quantities.number_text(number) == text


def test_rates_and_percentages() -> None:
    assert [quantities.rate_text(rate) for rate in (1e9, 99.96e6, 123456.0)] == ["1 Gb/s", "100 Mb/s", "123 kb/s"]
    assert quantities.percent_text(0.00012345) == "0.0123 %"


UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
UNITS |= {"TiB": 2.0**40, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "%": 0.01}
UNITS |= {"bit/s": 1.0, "kb/s": 1e3, "Mb/s": 1e6, "Gb/s": 1e9, "Tb/s": 1e12}


def value(text: str) -> float:
    """Return the value of a text: a number with commas between thousands, and a unit."""
    number, _, unit = text.partition(" ")
    assert re.fullmatch(r"(\d{1,3}(,\d{3})*)(\.\d*[1-9])?", number), text
    return float(number.replace(",", "")) * UNITS[unit]


@pytest.mark.parametrize(
    ("shown", "lowest"),
    [
        (quantities.number_text, 1e-9),
        (quantities.percent_text, 1e-9),
        (quantities.bytes_text, 1.0),
        (quantities.size_text, 1.0),
        (quantities.rate_text, 1.0),
        (quantities.time_text, 1e-10),
    ],
)
@given(data=st.data())
def test_texts_have_three_digits_no_exponent_and_keep_the_order(
    shown: Callable[[float], str], lowest: float, data: st.DataObject
) -> None:
    numbers = st.floats(lowest, 1e15)
    small, large = sorted((data.draw(numbers), data.draw(numbers)))
    assert value(shown(small)) == pytest.approx(small, rel=0.0051)
    assert value(shown(small)) <= value(shown(large)) * (1 + 1e-12)


def test_nothing_else_rounds_numbers_that_are_printed() -> None:
    root = Path(__file__).parent.parent
    files = [file for folder in ("sparsecomm", "bench", "examples", "docs") for file in (root / folder).rglob("*.py")]
    rounded = {str(file.relative_to(root)): re.findall(r"[:\"']\.\d+g[}\"']", file.read_text()) for file in files}
    assert {file: found for file, found in rounded.items() if found} == {}, "take sparsecomm.quantities.number_text"
