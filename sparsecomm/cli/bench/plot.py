"""The plot of `sparsecomm bench`: the median time of a call against the size of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsecomm.cli.bench.measure import Row
from sparsecomm.cli.plots import log_axis, pyplot, size_axis, style
from sparsecomm.quantities import number_text, size_text, time_text

__all__ = ["draw", "write"]

_LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)), (0, (3, 1)))


def write(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the plot to a file."""
    figure = draw(header, rows)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def draw(header: dict[str, Any], rows: Sequence[Row]) -> Any:
    """Return the figure: a panel for each density, a line for each algorithm and wire format.

    Algorithms have their colours and markers, wire formats kinds of line. What knows no wire format has one line.
    """
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    densities = list(dict.fromkeys(row["density"] for row in rows))
    wires = list(dict.fromkeys(row["wire"] for row in rows))
    sizes = sorted({row["size_bytes"] for row in rows})
    across = min(3, len(densities))
    down = -(-len(densities) // across)
    size = (4.2 * across + 2.2, 3.9 * down + 0.5)
    figure, grid = pyplot().subplots(down, across, figsize=size, layout="constrained", sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, density in zip(panels, densities, strict=False):
        for name in names:
            for wire in wires[:1] if name.startswith("dense") else wires:
                line = [r for r in rows if (r["algorithm"], r["density"], r["wire"]) == (name, density, wire)]
                line.sort(key=lambda row: row["size_bytes"])
                look = {**style(name), "linestyle": _LINES[wires.index(wire) % len(_LINES)]}
                axes.plot([r["size_bytes"] for r in line], [1e-6 * r["time_median_us"] for r in line], **look)
        size_axis(axes, list(map(float, sizes)), size_text)
        axes.set_title(f"density {number_text(density)}", fontsize="medium")
        axes.set_xlabel(f"dense gradient, {header['dtype']}")
    for axes in panels:
        log_axis(axes.yaxis, time_text)
        axes.set_visible(axes in panels[: len(densities)])
    for row in grid:
        row[0].set_ylabel("median time of a call, slowest rank")
    kinds = [Line2D([], [], **style(name), label=name) for name in names]
    if len(wires) > 1:
        kinds += [
            Line2D([], [], color="black", linestyle=_LINES[i % len(_LINES)], label=f"wire format {wire}")
            for i, wire in enumerate(wires)
        ]
    figure.legend(handles=kinds, frameon=False, loc="outside right upper")
    ranks, nodes = header["ranks"], header["machines"]
    where = f"{ranks} rank{'s' * (ranks > 1)}, {nodes} node{'s' * (nodes > 1)}"
    figure.suptitle(f"sparse_allreduce on {where}; {header['mpi']}", fontsize="medium")
    return figure
