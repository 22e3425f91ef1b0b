"""The plot of `sparsecomm model`: time, bytes and messages against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsecomm.cli.model.options import Asked
from sparsecomm.cli.model.report import link_text
from sparsecomm.cli.model.simulate import Row
from sparsecomm.cli.plots import log_axis, pyplot, size_axis, style
from sparsecomm.quantities import bytes_text, number_text, time_text

__all__ = ["write"]


def write(path: Path, asked: Asked, rows: Sequence[Row]) -> None:
    """Write the plot to a file: dotted and without markers where rows were not simulated."""
    from matplotlib.lines import Line2D

    figure, (times, amounts, counts) = pyplot().subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    handles = []
    for name in asked.algorithms:
        its, look = [row for row in rows if row.name == name], style(name)
        simulated = [(row.P, row.found) for row in its if row.found is not None]
        times.plot([P for P, _ in simulated], [found.step for _, found in simulated], **look)
        amounts.plot([P for P, _ in simulated], [max(f.sent, f.received) for _, f in simulated], **look)
        counts.plot([P for P, _ in simulated], [found.messages for _, found in simulated], **look)
        last = [row for row in its if row.found is not None][-1:]
        beyond = [(r.P, r.found.step if r.found else r.step) for r in its if r.found is None or r in last]
        if len(beyond) > len(last):
            dotted = {**look, "linestyle": ":", "marker": ""}
            times.plot([P for P, _ in beyond], [seconds for _, seconds in beyond], **dotted)
        handles.append(Line2D([], [], **look, label=name))
    if any(row.found is None for row in rows):
        handles.append(Line2D([], [], color="black", linestyle=":", label="by the formula"))

    for axes, text, label in (
        (times, time_text, "time of a step, last rank"),
        (amounts, bytes_text, "bytes that the busiest rank sends or receives"),
        (counts, number_text, "messages that the busiest rank sends or receives"),
    ):
        size_axis(axes, list(map(float, asked.ranks)), number_text)
        log_axis(axes.yaxis, text)
        axes.set_xlabel("ranks" + (f", {asked.per_node} per node" if asked.per_node > 1 else ""))
        axes.set_ylabel(label)
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    late = f", the last rank {time_text(asked.straggler)} late" if asked.straggler else ""
    figure.suptitle(f"simulated: n={asked.n:,}, k={asked.k:,}, {link_text(asked.costs.link)} between nodes{late}")
    figure.savefig(path, dpi=150)
    pyplot().close(figure)
