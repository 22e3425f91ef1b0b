"""The plots: the course of the trainings, and the score against bytes and seconds; each method at its best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.experiments.convergence.results import Outcome, Results, best, grouped
from bench.experiments.convergence.tables import amount
from bench.experiments.convergence.training import METHODS, Curve
from bench.experiments.tasks import TASKS
from sparsecomm.cli.outputs import log_axis, pyplot, save, style
from sparsecomm.quantities import bytes_text, number_text, time_text

FAR = {"accuracy": 10.0, "loss": 0.6}  # percent, nats: larger differences to dense are outside the plot
NETWORK = "1 Gb/s, a model of 25.6M weights"
BOLD: dict[str, Any] = {"loc": "left", "fontsize": 11, "fontweight": "bold"}


class Figure:
    """A grid of axes with a row for each title and a column for each x axis, and one legend."""

    def __init__(self, titles: Sequence[str], columns: int, size: tuple[float, float], ranks: int) -> None:
        figsize = (size[0] * columns, size[1] * len(titles) + 1)
        options = {"sharey": "row", "squeeze": False, "layout": "constrained", "figsize": figsize}
        self._figure, self.rows = pyplot().subplots(len(titles), columns, **options)
        for title, row in zip(titles, self.rows, strict=True):
            row[0].set_title(title, **BOLD)
        self._lines: dict[str, Any] = {}
        self._title = f"{ranks} ranks, each method at its best setting"

    def label(self, method: str, line: Any) -> None:
        self._lines.setdefault(METHODS[method][0], line)

    def write(self, path: Path) -> None:
        columns = min(len(self._lines), int(self._figure.get_figwidth() / 2))
        lines = self._lines.values(), self._lines.keys()
        self._figure.legend(*lines, loc="outside upper center", ncols=columns, frameon=False, title=self._title)
        save(self._figure, path, 100)


def plot_courses(results: Results, ranks: int, path: Path) -> None:
    """Plot the held-out loss by steps, bytes and seconds: lines are medians of the seeds, bands their range."""
    outcomes = _of_ranks(results, ranks)
    rows = _rows(outcomes)
    rows = {title: part for title, part in rows.items() if _sparse(part) > 1} or rows  # rows that compare methods
    communication = f"time of communication\n({NETWORK})"
    panels: list[tuple[Callable[[Curve], Sequence[float]], str, Callable[[float], str] | None]] = [
        (lambda curve: curve.steps, "steps", None),
        (_bytes_later, "bytes sent after the warm-up\nby the busiest rank", bytes_text),
        (lambda curve: curve.seconds, communication, time_text),
    ]
    if not any(training.curve.seconds for outcome in outcomes for training in outcome.seeds.values()):
        del panels[-1]
    figure = Figure(list(rows), len(panels), (5, 3.6), ranks)
    for part, row in zip(rows.values(), figure.rows, strict=True):
        for (x_of, label, text), axes in zip(panels, row, strict=True):
            for outcome in part:
                curves = [training.curve for training in outcome.seeds.values()]
                if not all(len(x_of(curve)) == len(curve.losses) for curve in curves):
                    continue  # seconds were not counted
                x, losses = np.mean([x_of(curve) for curve in curves], axis=0), np.array([c.losses for c in curves])
                visible, colour = x > 0, style(outcome.setting.method)["color"]
                (line,) = axes.plot(x[visible], np.median(losses, axis=0)[visible], color=colour)
                low, high = losses.min(0)[visible], losses.max(0)[visible]
                axes.fill_between(x[visible], low, high, color=colour, alpha=0.15, linewidth=0)
                figure.label(outcome.setting.method, line)
            if text is not None and axes.lines:
                log_axis(axes.xaxis, text)
            axes.grid(color="0.9")
            axes.set_xlabel(label)
        row[0].set_yscale("log")
        row[0].set_ylim(top=1.1 * max(t.curve.losses[0] for o in part for t in o.seeds.values()))  # cut off divergence
        log_axis(row[0].yaxis, number_text)
        row[0].set_ylabel("held-out loss, nats")
        notes = [f"{METHODS[o.setting.method][0]}: {o.setting.unusual}" for o in part if o.setting.unusual]
        row[-1].set_title("\n".join(notes), loc="right", fontsize=8)
    figure.write(path)


def plot_costs(results: Results, ranks: int, path: Path) -> None:
    """Plot the score by bytes and by milliseconds per step after the warm-up; each point is a method at its best."""
    outcomes = _of_ranks(results, ranks)
    rows = grouped(outcomes, lambda s: (s.model, s.steps))
    rows = {key: part for key, part in rows.items() if _sparse(part) > 2} or rows
    communication = f"time of communication per step after the warm-up\n({NETWORK})"
    panels: list[tuple[Callable[[Outcome], float], str, Callable[[float], str]]] = [
        (
            lambda o: o.mean(lambda t: t.step_bytes),
            "bytes sent per step after the warm-up\nby the busiest rank",
            bytes_text,
        ),
        (lambda o: o.mean(lambda t: t.step_seconds), communication, time_text),
    ]
    if not any(panels[-1][0](outcome) > 0 for outcome in outcomes):
        del panels[-1]
    titles = [f"{TASKS[model].title}, {steps:,} steps" for model, steps in rows]
    figure = Figure(titles, len(panels), (6.5, 4), ranks)
    for ((model, _), part), row in zip(rows.items(), figure.rows, strict=True):
        for (x_of, label, text), axes in zip(panels, row, strict=True):
            for method, tried in grouped(part, lambda s: s.method).items():
                points = [best(same) for same in grouped(tried, amount).values()]
                points = sorted((o for o in points if x_of(o) > 0 and math.isfinite(o.score)), key=x_of)
                if points:
                    figure.label(method, _scores(axes, [x_of(o) for o in points], points))
            log_axis(axes.xaxis, text)
            axes.grid(color="0.9")
            axes.set_xlabel(label)
        row[0].set_ylim(*_limits(part, FAR[TASKS[model].score]))
        row[0].set_ylabel("held-out accuracy, %" if TASKS[model].score == "accuracy" else "held-out loss, nats")
    figure.write(path)


def _scores(axes: Any, x: Sequence[float], points: Sequence[Outcome]) -> Any:
    """Draw a method's scores with their range, or a horizontal line for dense."""
    method = points[0].setting.method
    if method == "dense":
        return axes.axhline(points[0].score, color=style(method)["color"], linestyle="--")
    errors = np.abs([[o.score - min(o.scores), max(o.scores) - o.score] for o in points]).T
    return axes.errorbar(x, [o.score for o in points], errors, elinewidth=0.8, capsize=2, **style(method))


def _limits(part: Sequence[Outcome], far: float) -> tuple[float, float]:
    """Return the limits of the scores, around dense and the best sparse one."""
    visible = [score for o in part for score in o.scores if math.isfinite(score)]
    dense = [o.score for o in part if o.setting.method == "dense"] or visible[:1]
    sparse = [abs(o.score - dense[0]) for o in part if o.setting.method != "dense" and math.isfinite(o.score)]
    far = max(far, 1.2 * min(sparse, default=0.0))
    low, high = max(min(visible), dense[0] - far), min(max(visible), dense[0] + far)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def _of_ranks(results: Results, ranks: int) -> list[Outcome]:
    """Return the outcomes on that number of ranks, of the methods that the library has."""
    return [o for o in results.outcomes() if o.setting.ranks == ranks and METHODS[o.setting.method][1] is not None]


def _sparse(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.setting.method != "dense" for outcome in outcomes)


def _rows(outcomes: Sequence[Outcome]) -> Mapping[str, list[Outcome]]:
    """Return the outcomes by title, each method at its best, for every model and amount of bytes."""
    rows = {}
    for (model, steps), part in grouped(outcomes, lambda s: (s.model, s.steps)).items():
        dense = [o for o in part if o.setting.method == "dense"]
        sparse = grouped([o for o in part if o.setting.method != "dense"], amount)
        for words, same in sparse.items() or [("", [])]:
            best_ones = [best(tried) for tried in grouped(same, lambda s: s.method).values()]
            equal = f", as many bytes per step as {words}" if words.startswith("Top-k") else f", {words}" * bool(words)
            rows[f"{model}, {steps:,} steps{equal}"] = dense + best_ones
    return rows


def _bytes_later(curve: Curve) -> list[float]:
    return [float(max(0, sent - curve.warm)) for sent in curve.sent]
