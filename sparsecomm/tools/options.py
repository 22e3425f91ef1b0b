"""Option types for argparse: numbers with units, lists of names, and output files.

In all commands K, M, G and T are decimal, and Ki, Mi, Gi and Ti binary, for counts and for bytes.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sparsecomm.algorithms import ALGORITHMS, find
from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Costs
from sparsecomm.tuning import profile
from sparsecomm.wire import WIRES

ALGORITHM_NAMES = ("auto", *ALGORITHMS, "hierarchical:X")
WIRE_NAMES = ("auto", *WIRES)
_PLOTS = ("png", "pdf", "svg")
_T = TypeVar("_T")


_ONE = {"": 1.0}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {**_DECIMAL, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_MAX = 2**53 - 1  # a float does not represent all larger integers
_ABOVE_0 = math.ulp(0.0)


def number(low: float, high: float, expected: str, scales: Mapping[str, float] = _ONE) -> Callable[[str], float]:
    """Return a type for numbers from ``low`` to ``high``; ``expected`` describes them in errors.

    ``scales`` maps the units that may follow the number, in lower case, to factors.
    """

    def parsed(text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*)", text.strip().lower().replace("\xb5", "u"))
        value = float(match[1]) * scales.get(match[2], math.nan) if match else math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
        return value

    return parsed


def count(text: str) -> int:
    """Parse a positive integer."""
    return round(number(1, _MAX, "a number of at least 1, such as 4096, 64K (64,000) or 25.6M", _COUNTS)(text))


def count_or_0(text: str) -> int:
    """Parse an integer of at least 0."""
    return 0 if text == "0" else count(text)


def nbytes(text: str) -> int:
    """Parse a number of bytes."""
    scales = {unit + b: scale for unit, scale in _COUNTS.items() for b in ("", "b")}
    return int(number(0, _MAX, "bytes, such as 4096, 64K (64,000), 64Ki (65,536), 1.5M or 2Gi", scales)(text))


rate = number(  # bits per second, in the notation of `tc`
    _ABOVE_0,
    1e300,
    "a number above 0 and a unit, such as 1gbit or 100mbit",
    {f"{unit}bit{per}": scale for unit, scale in _DECIMAL.items() for per in ("", "/s", "ps")},
)
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
seconds = number(0, 1e300, "a number and a unit, such as 100us, 20ms or 1s", _TIMES)
duration = number(_ABOVE_0, 1e300, "a number above 0 and a unit, such as 30ms or 1.5s", _TIMES)
density = number(_ABOVE_0, 1, "a number above 0 and up to 1")
loss = number(0, 0.5, "a packet loss of at most 50%, such as 0.1% or 0.001", {"": 1.0, "%": 0.01})


def listed(one: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Return a type for comma-separated lists without duplicates; ``one`` is the type of the elements."""
    return lambda text: tuple(dict.fromkeys(one(part.strip()) for part in text.split(",")))


def algorithms(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of algorithms, or "all"."""
    if text == "all":
        return tuple(ALGORITHMS)
    names = listed(str)(text)
    try:
        for name in names:
            find(name)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def wires(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of wire formats, or "all"."""
    names = tuple(WIRES) if text == "all" else listed(str)(text)
    if unknown := [name for name in names if name not in WIRE_NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: expected one of {', '.join(WIRE_NAMES)}")
    return names


def add_files(parser: argparse.ArgumentParser, content: str) -> None:
    """Add ``--json`` and ``--plot``; ``content`` describes the plot."""
    output = parser.add_argument_group("output, besides the table")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    output.add_argument("--plot", type=_plot, metavar="FILE", help=f"draw {content}: {', '.join(_PLOTS)}")


def _plot(text: str) -> Path:
    path = Path(text)
    if path.suffix[1:].lower() not in _PLOTS:
        raise argparse.ArgumentTypeError(f"{text}: expected a file name that ends in .{', .'.join(_PLOTS)}")
    return path


def costs(file: Path | None) -> Costs:
    """Return the costs of a profile, or assumed costs for ``None``; raise `InvalidInputError` if it cannot be used."""
    try:
        return profile.read(file).costs if file else profile.DEFAULT
    except InvalidInputError as error:
        raise InvalidInputError(f"--profile {file}: {error}") from error


def check_writable(*paths: Path | None) -> None:
    """Raise `InvalidInputError` unless files can be written; leave them as they are."""
    for path in filter(None, paths):
        with writing(path):
            existed = path.exists()
            path.open("ab").close()
        if not existed:
            path.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` while a file is written into an `InvalidInputError` that names the file."""
    try:
        yield
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror or error}") from error
