"""The plots: the course of the trainings, and the score against bytes and seconds; each method at its best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.experiments.convergence.results import Outcome, Results, best, grouped
from bench.experiments.convergence.tables import amount
from bench.experiments.convergence.training import METHODS, Curve
from bench.experiments.tasks import TASKS
from sparsecomm.cli.outputs import log_axis, pyplot
from sparsecomm.quantities import bytes_text, number_text, time_text

COLOURS = dict(zip(METHODS, ("#4d4d4d", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#56b4e9", "#cc79a7"), strict=True))
MARKERS = dict(zip(METHODS, "os^vDPX", strict=True))
FAR = {"accuracy": 10.0, "loss": 0.6}  # percent, nats: larger differences to dense are outside the plot
NETWORK = "1 Gb/s, a model of 25.6M weights"
Panel = tuple[str, Callable[[Curve], Sequence[float]], str]


def plot_courses(results: Results, ranks: int, path: Path) -> None:
    """Plot the held-out loss by steps, bytes and seconds: lines are medians of the seeds, bands their range."""
    plt = pyplot()
    outcomes = [o for o in results.outcomes() if o.setting.ranks == ranks]
    rows = _rows(outcomes)
    rows = [(title, part) for title, part in rows if _sparse(part) > 1] or rows  # rows that compare methods
    panels: list[Panel] = [
        ("steps", lambda curve: curve.steps, "steps"),
        ("bytes", _bytes_later, "sent after the warm-up\nby the rank that sends most"),
        ("seconds", lambda curve: curve.seconds, f"communication; computation takes as long everywhere\n({NETWORK})"),
    ]
    if not any(training.curve.seconds for outcome in outcomes for training in outcome.seeds.values()):
        del panels[-1]
    figure, grid = plt.subplots(
        len(rows),
        len(panels),
        figsize=(5 * len(panels), 3.6 * len(rows) + 1),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    drawn: dict[str, Any] = {}
    for (title, part), row in zip(rows, grid, strict=True):
        for (kind, x_of, label), axes in zip(panels, row, strict=True):
            for outcome in part:
                curves = [training.curve for training in outcome.seeds.values()]
                if not all(len(x_of(curve)) == len(curve.losses) for curve in curves):
                    continue  # seconds were not counted
                x = np.mean([x_of(curve) for curve in curves], axis=0)
                losses = np.array([curve.losses for curve in curves])
                visible = x > 0 if kind != "steps" else x == x
                method = outcome.setting.method
                (line,) = axes.plot(x[visible], np.median(losses, axis=0)[visible], color=COLOURS[method])
                axes.fill_between(
                    x[visible],
                    losses.min(0)[visible],
                    losses.max(0)[visible],
                    color=COLOURS[method],
                    alpha=0.15,
                    linewidth=0,
                )
                drawn.setdefault(METHODS[method][0], line)
            if kind != "steps" and axes.lines:
                log_axis(axes.xaxis, bytes_text if kind == "bytes" else time_text)
            axes.grid(color="0.9")
            axes.set_xlabel(label)
        row[0].set_title(title, loc="left", fontsize=11, fontweight="bold")
        row[0].set_ylim(top=1.1 * max(t.curve.losses[0] for o in part for t in o.seeds.values()))  # cut off divergence
        log_axis(row[0].yaxis, number_text)
        row[0].set_ylabel("held-out loss, nats")
        notes = [f"{METHODS[o.setting.method][0]}: {o.setting.unusual}" for o in part if o.setting.unusual]
        if notes:
            row[-1].set_title("\n".join(notes), loc="right", fontsize=8)
    _finish(figure, drawn, f"{ranks} ranks, each method at its best", path)


def plot_costs(results: Results, ranks: int, path: Path) -> None:
    """Plot the score by bytes and by milliseconds per step after the warm-up; each point is a method at its best."""
    plt = pyplot()
    outcomes = [o for o in results.outcomes() if o.setting.ranks == ranks]
    rows = grouped(outcomes, lambda s: (s.model, s.steps))
    rows = {key: part for key, part in rows.items() if _sparse(part) > 2} or rows
    panels: list[tuple[str, Callable[[Outcome], float], Callable[[float], str]]] = [
        ("bytes per step after the warm-up", lambda o: o.mean(lambda t: t.step_bytes), bytes_text),
        (
            f"communication per step after the warm-up; computation takes as long everywhere\n({NETWORK})",
            lambda o: o.mean(lambda t: t.step_seconds),
            time_text,
        ),
    ]
    if not any(x_of(outcome) > 0 for outcome in outcomes for x_of in [panels[-1][1]]):
        del panels[-1]
    figure, grid = plt.subplots(
        len(rows),
        len(panels),
        figsize=(6.5 * len(panels), 4 * len(rows) + 1),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    drawn: dict[str, Any] = {}
    for ((model, steps), part), row in zip(rows.items(), grid, strict=True):
        for (label, x_of, write), axes in zip(panels, row, strict=True):
            for method, tried in grouped(part, lambda s: s.method).items():
                points = [best(same) for same in grouped(tried, lambda s: amount(s)).values()]
                points = sorted((o for o in points if x_of(o) > 0 and math.isfinite(o.score)), key=x_of)
                if not points:
                    continue
                x, y = [x_of(o) for o in points], [o.score for o in points]
                if method == "dense":
                    line = axes.axhline(y[0], color=COLOURS[method], linestyle="--")
                else:
                    errors = np.abs([[o.score - min(o.scores), max(o.scores) - o.score] for o in points]).T
                    style = {"color": COLOURS[method], "marker": MARKERS[method], "markersize": 5, "capsize": 2}
                    line = axes.errorbar(x, y, errors, linewidth=1.5, elinewidth=0.8, **style)
                drawn.setdefault(METHODS[method][0], line)
            log_axis(axes.xaxis, write)
            axes.grid(color="0.9")
            axes.set_xlabel(label)
        visible = [score for o in part for score in o.scores if math.isfinite(score)]
        dense = [o.score for o in part if o.setting.method == "dense"] or visible[:1]
        sparse = [abs(o.score - dense[0]) for o in part if o.setting.method != "dense" and math.isfinite(o.score)]
        far = max(FAR[TASKS[model].score], 1.2 * min(sparse, default=0.0))  # include the best one
        low, high = max(min(visible), dense[0] - far), min(max(visible), dense[0] + far)
        margin = 0.05 * (high - low) or 0.05
        row[0].set_ylim(low - margin, high + margin)
        row[0].set_title(f"{TASKS[model].title}, {steps:,} steps", loc="left", fontsize=11, fontweight="bold")
        row[0].set_ylabel("held-out accuracy, %" if TASKS[model].score == "accuracy" else "held-out loss, nats")
    _finish(figure, drawn, f"{ranks} ranks, each method at its best", path)


def _sparse(outcomes: Sequence[Outcome]) -> int:
    """Return the number of outcomes with sparse gradients."""
    return sum(outcome.setting.method != "dense" for outcome in outcomes)


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Return a title and the outcomes, each method at its best, for every model and amount of bytes."""
    rows = []
    for (model, steps), part in grouped(outcomes, lambda s: (s.model, s.steps)).items():
        dense = [o for o in part if o.setting.method == "dense"]
        sparse = grouped([o for o in part if o.setting.method != "dense"], amount)
        for words, same in sparse.items() or [("", [])]:
            best_ones = [best(tried) for tried in grouped(same, lambda s: s.method).values()]
            equal = f", as many bytes per step as {words}" if words.startswith("Top-k") else f", {words}" * bool(words)
            rows.append((f"{model}, {steps:,} steps{equal}", dense + best_ones))
    return rows


def _bytes_later(curve: Curve) -> list[float]:
    return [float(max(0, sent - curve.warm)) for sent in curve.sent]


def _finish(figure: Any, drawn: dict[str, Any], title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=12)
    columns = min(len(drawn), int(figure.get_figwidth() / 2))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)
