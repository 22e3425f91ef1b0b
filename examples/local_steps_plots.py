"""The pictures of trainings with local steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from local_steps_costs import RATES
from local_steps_tables import Seeds, cost, name
from local_steps_training import Setting

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["plot_choices", "plot_course"]

COLOURS = {"dense": "#4d4d4d", "allgather": "#0072b2", "split": "#d55e00", "split:2": "#009e73", "split:3": "#cc79a7"}
LINES: dict[tuple[Any, ...], Any] = {  # others are dotted
    (2, 64, "mean", 0.95): "--",
    (2, 64, "mean_of_contributors", 0.8): "-",
    (2, 64, "mean_of_contributors", 0.95): "-.",
    (2, 16, "mean_of_contributors", 0.8): (0, (6, 1, 1, 1, 1, 1)),
}
TOP = 3.0  # nats: what is above leaves the pictures


def plot_course(groups: dict[Setting, Seeds], ranks: int, sync_every: int, path: Path) -> None:
    """Plot the held-out loss against rounds, bytes, and seconds of communication; medians of the seeds."""
    shown = {s: seeds for s, seeds in groups.items() if (s.ranks, s.sync_every) == (ranks, sync_every)}
    figure, panels = plt.subplots(1, 4, figsize=(16, 5), sharey=True, layout="constrained")
    labels = ["rounds", "MB sent and received by a rank", *(f"s of communication, {rate}" for rate in RATES)]
    for setting, seeds in shown.items():
        paid = cost(setting)
        rounds = np.array([point[0] for point in seeds[min(seeds)]["curve"]])
        losses = np.median([[point[1] for point in o["curve"]] for o in seeds.values()], axis=0)
        key = setting.bits, setting.k, setting.op, setting.decay
        style = "-" if setting.method == "dense" else LINES.get(key, ":")
        per_round = [1, (paid.sent + paid.received) / 1e6, *paid.seconds]
        for axes, factor in zip(panels, per_round, strict=True):
            axes.plot(
                rounds * factor,
                losses,
                linestyle=style,
                color=COLOURS.get(setting.method, "#e69f00"),
                label=name(setting),
            )
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if label != "rounds":
            axes.set_xscale("log")
    panels[0].set_ylim(top=TOP)
    panels[0].set_ylabel("held-out loss, nats per character")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(f"P = {ranks}, H = {sync_every}; bytes and seconds of a model of 25.6M weights")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_choices(groups: dict[Setting, Seeds], ranks: int, path: Path) -> None:
    """Plot the loss at the end against the bytes of the training: a line for each method, a point for each H."""
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    lines: dict[str, list[tuple[float, float, int]]] = {}
    for setting, seeds in groups.items():
        if setting.ranks == ranks:
            paid, loss = cost(setting), float(np.mean([outcome["loss"] for outcome in seeds.values()]))
            moved = setting.steps // setting.sync_every * (paid.sent + paid.received) / 1e6
            lines.setdefault(name(replace(setting, outer=1.0, momentum=0.0)), []).append(
                (moved, loss, setting.sync_every)
            )
    for label, points in lines.items():
        if len(points) > 2:
            axes.plot(
                [p[0] for p in points], [p[1] for p in points], "o-", label=label, color=COLOURS[label.split(",")[0]]
            )
            for moved, loss, sync_every in points:
                axes.annotate(
                    f"H = {sync_every}", (moved, loss), (4, 4), textcoords="offset points", fontsize="x-small"
                )
    axes.margins(x=0.1)
    axes.set_xscale("log")
    axes.set_xlabel("MB sent and received by a rank, in all, for 25.6M weights")
    axes.set_ylabel("held-out loss at the end, nats per character")
    axes.set_title(f"P = {ranks}: equally many local steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
