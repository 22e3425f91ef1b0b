"""Plot what bytes buy under AdamW: the loss of each way to exchange, at its best rate, against what a rank sends.

python examples/adamw_plots.py bench/results/adamw.jsonl bench/results/adamw.png
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from adamw_rules import GRID, Rule

from sparsecomm.cli.plots import log_axis, pyplot
from sparsecomm.quantities import number_text, time_text

WAYS = {
    "dense": ("dense", "#4d4d4d", "o"),
    "sparse_adamw": ("SparseAdamW", "#009e73", "v"),
    "powersgd": ("PowerSGD", "#e69f00", "s"),
    "onebit": ("1-bit Adam", "#56b4e9", "P"),
    "updates": ("local steps, rounds of one", "#cc79a7", "D"),
    "gradients": ("sparse means (a hook)", "#d55e00", "^"),
}
TIMES = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]  # that it shows
WEIGHTS, RATE = 100e6, 1e9 / 8  # of the model and the network of the second axis


def best(done: dict[Rule, dict[str, Any]]) -> dict[Rule, list[dict[str, Any]]]:
    """Return each setting at the rate with which its first seed ends lowest, with the outcomes of its seeds."""
    found: dict[Rule, tuple[Rule, list[dict[str, Any]]]] = {}
    for rule, outcomes in GRID.by_seed(done).items():
        key = replace(rule, rate=0.0)
        if key not in found or outcomes[0]["loss"] < found[key][1][0]["loss"]:
            found[key] = rule, outcomes
    return dict(found.values())


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    chosen = {rule: outcomes for rule, outcomes in best(GRID.read(source)).items() if rule.way in WAYS}
    plt = pyplot()
    models = [model for model in ("transformer", "transformer-2m") if any(rule.model == model for rule in chosen)]
    figure, grid = plt.subplots(1, len(models), figsize=(6.2 * len(models), 4.6), squeeze=False, layout="constrained")
    for axes, model in zip(grid[0], models, strict=True):
        shown = {r: o for r, o in chosen.items() if r.model == model and (r.ranks == 8 or r.way == "sparse_adamw")}
        for way, (label, colour, marker) in WAYS.items():
            points = sorted(
                (o[0]["bytes"], np.mean([each["loss"] for each in o])) for r, o in shown.items() if r.way == way
            )
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, marker, color=colour, label=label, markersize=7)
            if way == "dense" and points:
                axes.axhline(y[0], color=colour, linewidth=0.8)
        log_axis(axes.xaxis, number_text)
        axes.set_xlabel("bytes that a rank sends in a step, per weight")
        axes.set_ylabel("nats per character, held out")
        axes.set_title(f"{model}, P = 8 (SparseAdamW: 4 to 16)")
        above = axes.secondary_xaxis("top", functions=(lambda x: x * WEIGHTS / RATE, lambda s: s * RATE / WEIGHTS))
        above.set_xticks(TIMES, [time_text(seconds) for seconds in TIMES])
        above.minorticks_off()
        above.set_xlabel("the same for 100M weights at 1 Gb/s")
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.savefig(target, dpi=110)
    print(target)


if __name__ == "__main__":
    main()
