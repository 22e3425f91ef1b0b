"""Options that several commands have, checked before anything else is done: lists of names, and files to write."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

from sparsecomm.algorithms import ALGORITHMS, find, inner_algorithms
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install
from sparsecomm.tensors.dtypes import DType
from sparsecomm.wire import EXACT, WIRES

__all__ = [
    "ALGORITHM_NAMES",
    "WIRE_NAMES",
    "add_files",
    "algorithms",
    "check_writable",
    "json_and_plot",
    "number",
    "wires",
]

ALGORITHM_NAMES = ("auto", *ALGORITHMS, "hierarchical:X")
WIRE_NAMES = ("auto", *WIRES)
_PLOTS = ("png", "pdf", "svg")


def algorithms(text: str) -> tuple[str, ...]:
    """Return the algorithms of a list with commas, or all.

    Raises:
        InvalidInputError: one is unknown.
    """
    names = _names(text)
    if names == ("all",):
        return tuple(ALGORITHMS)
    name = ""
    try:
        for name in names:
            find(name)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"--algorithms {text}: {name!r} is unknown; expected all, or some of {', '.join(ALGORITHM_NAMES)}, "
            f"where X is one of {', '.join(inner_algorithms())}"
        ) from error
    return names


def wires(text: str, dtype: DType) -> tuple[str, ...]:
    """Return the wire formats of a list with commas, or all that take values of this type.

    Raises:
        InvalidInputError: one is unknown, or does not take them.
    """
    names = _names(text)
    fitting = tuple(name for name, wire in WIRES.items() if wire.kind is EXACT or dtype.name != "float64")
    if names == ("all",):
        return fitting
    for name in names:
        if name not in WIRE_NAMES:
            known = ", ".join(WIRE_NAMES)
            raise InvalidInputError(f"--wire {text}: {name!r} is unknown; expected all, or some of {known}")
        if name not in ("auto", *fitting):
            raise InvalidInputError(
                f"--wire {text}: {name} rounds float32 values; expected auto, {' or '.join(fitting)} with --dtype "
                f"{dtype.name}"
            )
    return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def number(text: str) -> float:
    """Return a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# -- files ------------------------------------------------------------------------------------------------------------


def add_files(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Declare ``--json`` and ``--plot``."""
    output = parser.add_argument_group("output, besides the table")
    output.add_argument("--json", metavar="FILE", help="write the figures to this file as well")
    output.add_argument("--plot", metavar="FILE", help=f"draw {drawn}: {', '.join(_PLOTS)}")


def json_and_plot(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Return the files that ``--json`` and ``--plot`` name; ``None`` for an option that was not given.

    Raises:
        InvalidInputError: a plot cannot be drawn, or both are one file.
    """
    figures, plot = (Path(name) if name else None for name in (arguments.json, arguments.plot))
    if plot is not None and plot.suffix[1:].lower() not in _PLOTS:
        raise InvalidInputError(f"--plot {plot}: expected a file name that ends in .{', .'.join(_PLOTS)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidInputError(f"--plot: needs matplotlib: {pip_install('bench')}")
    if plot is not None and plot == figures:
        raise InvalidInputError(f"--json and --plot: both are {plot}; expected two files")
    return figures, plot


def check_writable(*paths: Path | None) -> None:
    """Check that files can be written. One that exists keeps its contents.

    Raises:
        InvalidInputError: one cannot.
    """
    for path in filter(None, paths):
        existed = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from error
        if not existed:
            path.unlink()
