"""The kinds of pictures: lines on logarithmic axes, bars with their values. All can be read without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparsecomm.cli.plots import log_axis, pyplot, size_axis, style
from sparsecomm.quantities import time_text

__all__ = [
    "Curve",
    "Text",
    "bars",
    "boxes",
    "legend",
    "lines",
    "log_axis",
    "no_labels",
    "panels",
    "size_axis",
    "style",
    "time_text",
]

Curve = tuple[str, Sequence[float], Sequence[float]]  # name, x, y
Text = Callable[[float], str]


def panels(
    count: int, width: float = 3.5, height: float = 3.2, across: int = 3, beside: float = 1.8, **options: Any
) -> tuple[Any, list[Any]]:
    """Return a figure and its axes: ``count`` of them, some in a row."""
    across = min(across, count)
    down = -(-count // across)
    size = (width * across + beside, height * down + 0.4)
    figure, grid = pyplot().subplots(down, across, figsize=size, layout="constrained", squeeze=False, **options)
    every = list(grid.flat)
    for axes in every[count:]:
        axes.set_visible(False)
    return figure, every[:count]


def lines(axes: Any, its: Sequence[Curve], x_text: Text, y_text: Text = time_text, x_base: int = 2) -> None:
    """Draw a line for each algorithm, on two logarithmic axes."""
    for name, x, y in its:
        axes.plot(x, y, label=name, **style(name))
    size_axis(axes, sorted({value for _, x, _ in its for value in x}), x_text)
    if x_base == 10:
        axes.set_xscale("log", base=10)
        axes.set_xticks(shown := sorted({value for _, x, _ in its for value in x}), [x_text(value) for value in shown])
        axes.minorticks_off()
    log_axis(axes.yaxis, y_text)


def legend(figure: Any, axes: Sequence[Any], **more: Any) -> None:
    """Add one legend for all axes, beside them."""
    handles = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside right upper", **more)


def no_labels() -> Any:
    """Return the formatter of an axis, major or minor, that is to have no labels."""
    from matplotlib.ticker import NullFormatter

    return NullFormatter()


def bars(axes: Any, names: Sequence[str], values: Sequence[float], text: Text, ours: Callable[[str], bool]) -> None:
    """Draw a bar for each name, from the top down, with its value; those that are not ours are light and hatched."""
    positions = range(len(names))[::-1]
    for position, name, value in zip(positions, names, values, strict=True):
        look = (
            {"color": style(name)["color"]} if ours(name) else {"color": "#d9d9d9", "hatch": "///", "edgecolor": "#555"}
        )
        axes.barh(position, value, height=0.68, **look)
        axes.annotate(f" {text(value)}", (value, position), va="center", fontsize="small")
    axes.set_yticks(positions, names)
    axes.set_xscale("log")
    low, high = min(values), max(values)
    axes.set_xlim(low / 2, high * (high / low) ** 0.28 * 1.6)
    log_axis(axes.xaxis, text)
    axes.xaxis.set_minor_formatter(no_labels())
    axes.grid(True, axis="x", alpha=0.35)
    axes.set_axisbelow(True)


def boxes(axes: Any, names: Sequence[str], quartiles: Sequence[Sequence[float]], text: Text) -> None:
    """Draw a median and its quartiles for each name, from the top down, with the median's value."""
    positions = range(len(names))[::-1]
    for position, (low, middle, high) in zip(positions, quartiles, strict=True):
        axes.plot([low, high], [position, position], color="#0072b2", linewidth=5, alpha=0.45, solid_capstyle="butt")
        axes.plot(middle, position, marker="|", markersize=14, markeredgewidth=2.4, color="black")
        axes.annotate(f"  {text(middle)}", (max(high, middle), position), va="center", fontsize="small")
    axes.set_yticks(positions, names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.margins(x=0.22)
    axes.grid(True, axis="x", alpha=0.35)
