"""Plot what bytes buy: the loss of each way to exchange, at its best rate, against what a rank sends.

    python examples/loss_plots.py bench/results/adamw.jsonl bench/results/convergence.json bench/results/loss.png

The transformers are trained under AdamW by `adamw_rules.py`, the LSTM under SGD by `convergence.py`; PowerSGD by
`adamw_rules.py` in both cases. Bytes are those of the whole training, warm-up included.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from adamw_rules import GRID
from convergence_results import Results
from convergence_tasks import TASKS, weights_of

from sparsecomm.cli.plots import log_axis, pyplot
from sparsecomm.quantities import number_text, time_text

# By the way to exchange: label, colour, marker.
SERIES = {
    "dense": ("dense", "#4d4d4d", "o"),
    "sparse_adamw": ("SparseAdamW", "#009e73", "v"),
    "double, few bits": ('"double", 1 to 4 bits', "#009e73", "v"),
    "allgather, few bits": ("Top-k, 2 or 4 bits", "#56b4e9", "<"),
    "allgather": ("Top-k, exact", "#0072b2", "s"),
    "split, few bits": ('"split", 2 or 4 bits', "#d55e00", "^"),
    "powersgd": ("PowerSGD", "#e69f00", "D"),
    "onebit": ("1-bit Adam", "#56b4e9", "P"),
    "updates": ("local steps, rounds of one", "#cc79a7", "X"),
    "gradients": ("sparse means (a hook)", "#d55e00", "^"),
}
PANELS = {
    "transformer": "transformer, AdamW, P = 8",
    "transformer-2m": "transformer of 2.3M, AdamW, P = 8",
    "text": "LSTM, SGD with momentum, P = 8",
}
TIMES = [0.1, 1, 10]  # that the second axes show
WEIGHTS, RATES = 100e6, {"1 Gb/s": 1e9 / 8, "100 Mb/s": 1e8 / 8}  # of the model and the networks of these axes
RANKS = 8
FAR = 1.2  # nats above dense: what ends further away leaves the picture
Points = dict[str, list[tuple[float, float]]]  # by series: bytes per weight and step, and nats


def of_rules(path: Path) -> dict[str, Points]:
    """Return the points of each model of a file of `adamw_rules.py`, each setting at its best rate."""
    best: dict[object, tuple[str, str, float, float]] = {}
    for rule, outcomes in GRID.by_seed(GRID.read(path)).items():
        nats = fmean(outcome["loss"] for outcome in outcomes)
        key = replace(rule, rate=0.0)
        if rule.optimizer == "lion" or rule.ranks != RANKS or rule.way not in SERIES:
            continue
        if key not in best or nats < best[key][3]:
            steps = rule.steps == 0
            best[key] = rule.model if steps else "", rule.way, fmean(o["bytes"] for o in outcomes), nats
    found: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for model, way, nbytes, nats in best.values():
        found[model][way].append((nbytes, nats))
    return found


def of_results(path: Path) -> Points:
    """Return the points of the LSTM in a file of `convergence.py`, each density at the best of its other settings."""
    best: dict[tuple[str, float, str], tuple[float, float]] = {}
    for outcome in Results.read(path).outcomes():
        setting = outcome.setting
        narrow = ", few bits" if setting.wire in ("packed_sign", "packed_int2", "packed_int4") else ""
        series = setting.method + narrow
        if (setting.model, setting.ranks, setting.steps) != (
            "text",
            RANKS,
            TASKS["text"].steps,
        ) or series not in SERIES:
            continue
        nbytes = outcome.mean(lambda training: training.curve.sent[-1]) / setting.steps / weights_of("text")
        key = series, setting.density, setting.wire
        if key not in best or outcome.score < best[key][1]:
            best[key] = nbytes, outcome.score
    found: Points = defaultdict(list)
    for (series, _, _), point in best.items():
        found[series].append(point)
    return found


def main() -> None:
    rules, results, target = map(Path, sys.argv[1:])
    models = of_rules(rules)
    for series, points in of_results(results).items():
        models["text"][series] += points
    plt = pyplot()
    shown = [model for model in PANELS if model in models]
    figure, grid = plt.subplots(
        1, len(shown), figsize=(5.4 * len(shown), 5.6), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, model in zip(grid[0], shown, strict=True):
        dense = min(nats for _, nats in models[model]["dense"])
        for series, (label, colour, marker) in SERIES.items():
            points = sorted(point for point in models[model].get(series, ()) if point[1] - dense < FAR)
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, [nats - dense for nats in y], marker, color=colour, label=label, markersize=7)
        axes.axhline(0, color="#4d4d4d", linewidth=0.8)
        axes.set_ylim(-0.05, FAR)
        log_axis(axes.xaxis, number_text)
        axes.set_xlabel("bytes that a rank sends in a step, per weight")
        axes.set_ylabel("nats above dense, held out")
        axes.set_title(PANELS[model])
        for number, (name, rate) in enumerate(RATES.items()):
            factor = WEIGHTS / rate
            above = axes.secondary_xaxis(
                1.0 + 0.16 * number, functions=(lambda x, f=factor: x * f, lambda s, f=factor: s / f)
            )
            low, high = (x * factor for x in axes.get_xlim())
            ticks = [t for t in TIMES if low <= t <= high] or [low, high]
            above.set_xticks(ticks, [time_text(seconds) for seconds in ticks])
            above.minorticks_off()
            above.set_xlabel(f"the same for 100M weights at {name}")
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(target, dpi=100)
    print(target)


if __name__ == "__main__":
    main()
