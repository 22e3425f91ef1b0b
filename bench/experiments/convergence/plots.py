"""The plot of scores against bytes and seconds; each method at its best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.experiments.convergence.results import Outcome, Results, best, grouped
from bench.experiments.convergence.tables import amount
from bench.experiments.convergence.training import METHODS
from bench.experiments.tasks import TASKS
from bench.labels import Label, label_points
from sparsecomm.quantities import bytes_text, time_text
from sparsecomm.tools.outputs import log_axis, pyplot, save, style

FAR = {"accuracy": 10.0, "loss": 0.6}  # percent, nats: larger differences to dense are outside the plot


def plot_costs(results: Results, ranks: int, path: Path) -> None:
    """Plot the score by bytes and by milliseconds per step after the warm-up; each point is a method at its best."""
    outcomes = [o for o in results.outcomes() if o.setting.ranks == ranks and METHODS[o.setting.method][1] is not None]
    rows = grouped(outcomes, lambda s: (s.model, s.steps))
    rows = {key: part for key, part in rows.items() if sum(o.setting.method != "dense" for o in part) > 2} or rows
    sent = "bytes sent per step after the warm-up\nby the busiest rank"
    communication = "time of communication per step after the warm-up\n(1 Gb/s, a model of 25.6M weights)"
    panels: list[tuple[Callable[[Outcome], float], str, Callable[[float], str]]] = [
        (lambda o: o.mean(lambda t: t.step_bytes), sent, bytes_text),
        (lambda o: o.mean(lambda t: t.step_seconds), communication, time_text),
    ]
    if not any(panels[-1][0](outcome) > 0 for outcome in outcomes):
        del panels[-1]
    options = {"sharey": "row", "squeeze": False, "layout": "constrained"}
    figure, grid = pyplot().subplots(len(rows), len(panels), figsize=(6.5 * len(panels), 4 * len(rows) + 1), **options)
    labelled: list[tuple[Any, list[Label]]] = []
    for ((model, steps), part), row in zip(rows.items(), grid, strict=True):
        for (x_of, label, text), axes in zip(panels, row, strict=True):
            labels = []
            for method, tried in grouped(part, lambda s: s.method).items():
                points = [best(same) for same in grouped(tried, amount).values()]
                points = sorted((o for o in points if x_of(o) > 0 and math.isfinite(o.score)), key=x_of)
                if points:
                    x = [x_of(o) for o in points]
                    _scores(axes, x, points)
                    labels.append(Label(x[0], points[0].score, METHODS[method][0], style(method)["color"]))
            log_axis(axes.xaxis, text)
            right = axes.get_xlim()[1]  # where the line of dense ends
            labels = [label._replace(x=min(label.x, right)) for label in labels]
            axes.grid(color="0.9")
            axes.set_xlabel(label)
            labelled.append((axes, labels))
        row[0].set_title(f"{TASKS[model].title}, {steps:,} steps", loc="left", fontsize=11, fontweight="bold")
        row[0].set_ylim(*_limits(part, FAR[TASKS[model].score]))
        row[0].set_ylabel("held-out accuracy, %" if TASKS[model].score == "accuracy" else "held-out loss, nats")
    figure.suptitle(f"{ranks} ranks, each method at its best setting")
    for axes, labels in labelled:
        label_points(axes, labels, 9)
    save(figure, path, 100)


def _scores(axes: Any, x: Sequence[float], points: Sequence[Outcome]) -> None:
    """Draw a method's scores with their range, or a horizontal line for dense."""
    method = points[0].setting.method
    if method == "dense":
        axes.axhline(points[0].score, color=style(method)["color"], linestyle="--")
        return
    errors = np.abs([[o.score - min(o.scores), max(o.scores) - o.score] for o in points]).T
    axes.errorbar(x, [o.score for o in points], errors, elinewidth=0.8, capsize=2, **style(method))


def _limits(part: Sequence[Outcome], far: float) -> tuple[float, float]:
    """Return the limits of the scores, around dense and the best sparse one."""
    visible = [score for o in part for score in o.scores if math.isfinite(score)]
    dense = [o.score for o in part if o.setting.method == "dense"] or visible[:1]
    sparse = [abs(o.score - dense[0]) for o in part if o.setting.method != "dense" and math.isfinite(o.score)]
    far = max(far, 1.2 * min(sparse, default=0.0))
    low, high = max(min(visible), dense[0] - far), min(max(visible), dense[0] + far)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin
