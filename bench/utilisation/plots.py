"""Heat maps of utilisation: rounds against links, a panel for each method, delay and loss. Each cell has its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.utilisation.grid import Cell, Network, name
from bench.utilisation.tables import LOCAL, Found, percent
from sparsecomm.cli.outputs import pyplot
from sparsecomm.quantities import rate_text

_TITLES = {"dense": "dense, gloo", "blocking": "ours", "delayed": "ours, delayed"}


def heat_maps(cells: Found) -> Any:
    """Return the figure."""
    methods = [method for method in LOCAL if any(cell.method == method for cell in cells)]
    sites = sorted({(cell.network.loss, cell.network.rtt) for cell in cells})
    every, rates = sorted({cell.H for cell in cells}), sorted({cell.network.rate for cell in cells})
    size = (1.2 + (0.62 * len(rates) + 0.35) * len(sites), 0.9 + (0.36 * len(every) + 0.55) * len(methods))
    figure, grid = pyplot().subplots(
        len(methods), len(sites), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for method, line in zip(methods, grid, strict=True):
        for (loss, rtt), axes in zip(sites, line, strict=True):
            its = [[cells.get(Cell(Network(rate, rtt, loss), method, H)) for rate in rates] for H in every]
            values = np.array([[np.nan if row is None else 100 * row["utilisation"] for row in rows] for rows in its])
            drawn = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto", origin="lower")
            for i, rows in enumerate(its):
                for j, row in enumerate(rows):
                    if row is not None:
                        dark = row["utilisation"] < 0.55
                        style = {"color": "white" if dark else "black", "fontsize": 8}
                        axes.text(j, i, percent(row["utilisation"]), ha="center", va="center", **style)
            axes.set_xticks(range(len(rates)), [rate_text(rate) for rate in rates], fontsize=7, rotation=30)
            axes.set_yticks(range(len(every)), [str(H) for H in every], fontsize=8)
            axes.set_title(f"{_TITLES[method]}\n{name(Network(0, rtt, loss))}", fontsize=7.5)
        line[0].set_ylabel("H", fontsize=8)
    figure.colorbar(drawn, ax=grid, label="compute time / wall time, %", shrink=0.6)
    return figure


def write(cells: Found, file: Path) -> None:
    """Write the heat maps to a file."""
    figure = heat_maps(cells)
    figure.savefig(file, dpi=130)
    pyplot().close(figure)
