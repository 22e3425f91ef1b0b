"""Numbers with units: the texts for people, and the options that read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsecomm import quantities
from sparsecomm.tools import options

TEXTS = {
    quantities.size_text: {
        0: "0 B", 999: "999 B", 65_536: "64 KiB", 64_000: "64 kB", 25_600_000: "25.6 MB", 3 << 30: "3 GiB",
    },
    quantities.bytes_text: {307_200: "307.2 kB", 179_201_344: "179.2 MB"},
    quantities.time_text: {2: "2 s", 0.0015: "1.5 ms", 1e-6: "1 us", 3e-8: "30 ns"},
    quantities.number_text: {
        0: "0", 1060.4: "1,060", 0.00001: "0.00001", 25.0: "25", 9.999: "10", -12345678: "-12,345,678",
    },
    quantities.rate_text: {1e9: "1 Gb/s", 99.96e6: "100 Mb/s", 123456.0: "123 kb/s"},
    quantities.percent_text: {0.00012345: "0.0123 %"},
}  # fmt: skip


def test_examples_and_the_options_that_read_them() -> None:
    for text_of, examples in TEXTS.items():
        assert {number: text_of(number) for number in examples} == examples
    for size, text in TEXTS[quantities.size_text].items():
        assert options.nbytes(text) == size
    for length, text in TEXTS[quantities.time_text].items():
        assert options.seconds(text) == pytest.approx(length)


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
    assert {file: formats for file, formats in rounded.items() if formats} == {}, (
        "take sparsecomm.quantities.number_text"
    )
