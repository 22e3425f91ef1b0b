"""The plot of `sparsecomm bench`: the median time of a call against the size of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsecomm.cli.bench.rows import Row
from sparsecomm.cli.plots import log_axis, panels, pyplot, size_axis, style
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

    Colours and markers stand for algorithms, line styles for wire formats. Dense sums have no wire format.
    """
    from matplotlib.lines import Line2D

    keys = "algorithm", "density", "wire"
    names, densities, wires = (list(dict.fromkeys(row[key] for row in rows)) for key in keys)
    sizes = sorted({float(row["size_bytes"]) for row in rows})
    figure, all_axes = panels(len(densities), 4.2, 3.9, sharey=True)
    for axes, density in zip(all_axes, densities, strict=True):
        for name in names:
            for wire in wires[:1] if name.startswith("dense") else wires:
                line = [r for r in rows if (r["algorithm"], r["density"], r["wire"]) == (name, density, wire)]
                line.sort(key=lambda row: row["size_bytes"])
                look = {**style(name), "linestyle": _LINES[wires.index(wire) % len(_LINES)]}
                axes.plot([r["size_bytes"] for r in line], [1e-6 * r["time_median_us"] for r in line], **look)
        size_axis(axes, sizes, size_text)
        axes.set_title(f"density {number_text(density)}", fontsize="medium")
        axes.set_xlabel(f"dense gradient, {header['dtype']}")
    log_axis(all_axes[0].yaxis, time_text)
    all_axes[0].set_ylabel("median time of a call, slowest rank")
    handles = [Line2D([], [], **style(name), label=name) for name in names]
    handles += [
        Line2D([], [], color="black", linestyle=_LINES[i % len(_LINES)], label=f"wire format {wire}")
        for i, wire in enumerate(wires)
        if len(wires) > 1
    ]
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    ranks, nodes = header["ranks"], header["machines"]
    where = f"{ranks} rank{'s' * (ranks > 1)}, {nodes} node{'s' * (nodes > 1)}"
    figure.suptitle(f"sparse_allreduce on {where}; {header['mpi']}", fontsize="medium")
    return figure
