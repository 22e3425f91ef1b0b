"""Output of commands: tables with columns of fixed width, JSON with one row per line, and the style of plots.

In all plots, a method has the same colour and marker. Colour-blind readers can distinguish the colours (Okabe and Ito;
Tol).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparsecomm.errors import InvalidInputError, pip_install


class Column(NamedTuple):
    """A column of a table: a heading of two lines, the width, and a function from a row to its cell."""

    name: str
    unit: str
    width: int
    cell: Callable[[Any], object]


def table_head(header: Mapping[str, object], columns: Sequence[Column]) -> str:
    """Return the header and the headings of a table, as comment lines."""
    names, units = ("".join(f"{getattr(c, key):>{c.width}}" for c in columns)[2:] for key in ("name", "unit"))
    lines = [*(f"{name:<15} {value}" for name, value in header.items()), "", names, units]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def table_line(row: object, columns: Sequence[Column]) -> str:
    """Return a row as a line of text."""
    return "".join(f" {column.cell(row):>{column.width - 1}}" for column in columns)


def json_text(data: dict[str, Any]) -> str:
    """Return ``data`` as JSON with one line per key, and per row of a list of rows."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in data.items()) + "\n}\n"


# Colour and marker of each method in all plots of the library and of ``bench``.
_STYLES = {
    "dense": ("#4d4d4d", "o"),
    "allgather": ("#0072b2", "s"),
    "tree": ("#e69f00", "^"),
    "butterfly": ("#d55e00", "D"),
    "split": ("#009e73", "v"),
    "double": ("#aa4499", "X"),
    "hierarchical": ("#cc79a7", "P"),
    "ssar_recursive_doubling": ("#56b4e9", "<"),
    "ssar_split_allgather": ("#332288", ">"),
    "PowerSGD": ("#999933", "p"),
    "1-bit Adam": ("#882255", "h"),
    "local steps": ("#009e73", "v"),  # they use `split:2` or `allgather`
    "SparseAdamW": ("#aa4499", "X"),  # it uses `double`
}
_OTHERS = [(colour, marker) for marker in "*pd8" for colour in ("#117733", "#aa4499", "#44aa99", "#661100")]


def style(name: str) -> dict[str, Any]:
    """Return the arguments of ``plot`` for a method: an algorithm or a way to train.

    A name such as ``hierarchical:tree`` has the colour of the first part and the hollow marker of the second. "auto"
    coincides with another line, so it is drawn as rings around the markers of that line.
    """
    if name == "auto":
        rings = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "zorder": 5}
        return {"color": "black", "linewidth": 0.8, "linestyle": "", **rings}
    outer, _, inner = name.partition(":")
    colour, marker = _STYLES.get(outer) or _OTHERS[zlib.crc32(outer.encode()) % len(_OTHERS)]
    hollow = {"marker": _STYLES.get(inner, ("", marker))[1], "markerfacecolor": "white"} if inner else {}
    return {"color": colour, "linewidth": 1.6, "marker": marker, "markersize": 5, **hollow}


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with a backend for files, which needs no display."""
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidInputError(f"--plot needs matplotlib ({error}): {pip_install('bench')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure to a file, and close it."""
    figure.savefig(path, dpi=dpi)
    pyplot().close(figure)


def panels(count: int, width: float, height: float, columns: int = 3, **options: Any) -> tuple[Any, Sequence[Any]]:
    """Return a figure and ``count`` axes of that size in inches, with room for a legend on the right.

    ``options`` are passed on to ``subplots``.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    size = (width * columns + 2.2, height * rows + 0.5)
    figure, grid = pyplot().subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    for unused in grid.flat[count:]:
        unused.set_visible(False)
    return figure, list(grid.flat[:count])


def log_axis(axis: Any, text: Callable[[float], str]) -> None:
    """Make an axis logarithmic, with enough labels to read it; ``text`` formats the labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis._set_axes_scale("log", base=10)
    formatter = FuncFormatter(lambda value, _: text(value))
    low, high = sorted(axis.get_view_interval())
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(NullFormatter())
    if high / low < 1000:
        few, more = (2, 5) if high / low > 30 else (2, 3, 5, 7), (1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
        axis.set_minor_locator(LogLocator(subs=few if high / low > 4 else more))
        axis.set_minor_formatter(formatter)


def size_axis(axes: Any, values: list[float], text: Callable[[float], str]) -> None:
    """Make the x axis logarithmic, with a label at every value or, if there are many, at some of them."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    labelled = values[:: -(-len(values) // 12)]
    axes.set_xticks(labelled, [text(value) for value in labelled], rotation=45 if len(labelled) > 6 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(values[0] / 1.2, values[-1] * 1.2)
    axes.grid(True, which="major", alpha=0.35)
    axes.grid(True, which="minor", axis="y", alpha=0.12)
