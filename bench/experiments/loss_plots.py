"""Plot the loss of each way to exchange gradients, at its best learning rate, against the bytes that a rank sends.

    F=bench/results; python -m bench.experiments.loss_plots $F/adamw.jsonl $F/convergence.json $F/loss.png

The left panel has the transformers, which `adamw_rules` trains by AdamW; the right panel has the LSTM, which
`convergence` trains by SGD. `adamw_rules` trains PowerSGD for both. Bytes include warm-ups.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.experiments.adamw_rules import GRID, Rule
from bench.experiments.convergence.results import Results
from bench.experiments.tasks import TASKS, weights_of
from bench.labels import Label, label_points
from sparsecomm.quantities import number_text, time_text
from sparsecomm.tools.outputs import log_axis, pyplot, style

# By the way to exchange: label, method of the colour, marker. The label is beside the first point, where it has room.
SERIES = {
    "dense": ("dense", "dense", "o"),
    "sparse_adamw, transformer, 0.95": ("", "SparseAdamW", "o"),
    "sparse_adamw, transformer, 0.99": ("", "SparseAdamW", "s"),
    "sparse_adamw, transformer, 0.999": ("SparseAdamW, at each beta2", "SparseAdamW", "^"),
    "sparse_adamw, transformer-2m, 0.999": ("SparseAdamW, 2.3M weights", "SparseAdamW", "*"),
    "sparse_adamw, transformer-10m, 0.999": ("SparseAdamW, 12M weights", "SparseAdamW", "d"),
    "double, few bits": ('"double", 1 to 4 bits', "double", "X"),
    "allgather, few bits": ("Top-k, 2 or 4 bits", "allgather", "<"),
    "allgather": ("Top-k, exact", "allgather", "s"),
    "split, few bits": ('"split", 2 or 4 bits', "split", "v"),
    "powersgd": ("PowerSGD", "PowerSGD", "p"),
    "onebit": ("1-bit Adam", "1-bit Adam", "h"),
    "updates": ("local steps, rounds of one", "local steps", "D"),
    "gradients": ("Top-k means (DDP hook)", "allgather", "s"),
}
LABEL_AT_END = {"allgather", "double, few bits"}  # beside the last point
PANELS = {"adamw": "AdamW: transformer of 167k weights, P = 8", "text": "SGD with momentum: LSTM, P = 8"}
TIMES = [0.1, 1, 10]  # seconds: ticks of the upper axis
WEIGHTS, RATE = 100e6, 1e9 / 8  # of the model and the network of that axis
RANKS = 8
LIMITS = {"adamw": (-0.13, 0.9), "text": (-0.05, 0.48)}  # nats above dense
FAR = 0.9  # nats above dense: larger losses are left out
Points = dict[str, list[tuple[float, float]]]  # by series: bytes per weight and step, and nats above dense


def of_rules(path: Path) -> dict[str, Points]:
    """Return the points of each panel in a file of `adamw_rules`, each setting at its best rate.

    The best rate has the most seeds and, of those, the smallest loss, as in the tables of the report. A point is the
    mean over seeds of the difference to the dense training with the same seed.
    """
    rules = {
        rule: outcome
        for rule, outcome in GRID.read(path).items()
        if rule.optimizer != "lion" and not rule.steps and rule.weights == "float32"
    }
    seeds = GRID.by_seed(rules)
    best: dict[Rule, dict[int, dict[str, Any]]] = {}
    order = {rule: (-len(by_seed), sum(o["loss"] for o in by_seed.values())) for rule, by_seed in seeds.items()}
    for rule in sorted(seeds, key=lambda rule: order[rule]):
        best.setdefault(replace(rule, rate=0.0), seeds[rule])
    dense = {(rule.model, rule.beta2): by_seed for rule, by_seed in best.items() if rule.way == "dense"}
    points: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for rule, outcomes in best.items():
        panel = "text" if rule.model == "text" else "adamw"
        series = f"{rule.way}, {rule.model}, {rule.beta2:g}" if rule.way == "sparse_adamw" else rule.way
        if series not in SERIES or (rule.ranks != RANKS and rule.model in ("transformer", "text")):
            continue
        nbytes = fmean(outcome["bytes"] for outcome in outcomes.values())
        theirs = dense.get((rule.model, rule.beta2))  # the LSTM's are in the other file
        nats = fmean(o["loss"] - (theirs[seed]["loss"] if theirs else 0) for seed, o in outcomes.items())
        if rule.way != "dense" or rule.model == "transformer":
            points[panel][series].append((nbytes, nats))
    return points


def of_results(path: Path) -> Points:
    """Return the LSTM's points in a file of `convergence`, each density at its best, with absolute losses."""
    best: dict[tuple[str, float, str], tuple[float, float]] = {}
    for outcome in Results(path).outcomes():
        setting = outcome.setting
        narrow = ", few bits" if setting.wire in ("packed_sign", "packed_int2", "packed_int4") else ""
        series = setting.method + narrow
        usual = (setting.model, setting.ranks, setting.steps) == ("text", RANKS, TASKS["text"].steps)
        if not usual or series not in SERIES:
            continue
        nbytes = outcome.mean(lambda training: training.curve.sent[-1]) / setting.steps / weights_of("text")
        key = series, setting.density, setting.wire
        if key not in best or outcome.score < best[key][1]:
            best[key] = nbytes, outcome.score
    points: Points = defaultdict(list)
    for (series, _, _), point in best.items():
        points[series].append(point)
    return points


def main() -> None:
    rules, results, target = map(Path, sys.argv[1:])
    panels = of_rules(rules)
    lstm = of_results(results)
    dense = min(nats for _, nats in lstm["dense"])
    for points in (lstm, panels["text"]):
        for series in points:
            points[series] = [(nbytes, nats - dense) for nbytes, nats in points[series]]
    for series, more in lstm.items():
        panels["text"][series] += more
    plt = pyplot()
    figure, grid = plt.subplots(1, len(PANELS), figsize=(13, 5.6), sharex=True, layout="constrained")
    found_labels = []
    for axes, (name, title) in zip(grid, PANELS.items(), strict=True):
        labels = []
        for series, (label, method, marker) in SERIES.items():
            points = sorted(point for point in panels[name].get(series, ()) if point[1] < FAR)
            if points:
                x, y = zip(*points, strict=True)
                look: Any = style(method) | {"marker": marker, "markersize": 8, "linewidth": 0.8}
                if method == "SparseAdamW":
                    look |= {"fillstyle": "none", "markeredgewidth": 1.5}
                axes.plot(x, y, **look)
                point = points[-1 if series in LABEL_AT_END else 0]
                labels += [Label(*point, label, look["color"])] if label else []
        axes.axhline(0, color="#4d4d4d", linewidth=0.8)
        axes.set_ylim(*LIMITS[name])
        log_axis(axes.xaxis, number_text)
        axes.set_xlabel("bytes sent by a rank, per weight and step")
        axes.set_ylabel("held-out loss above dense, nats per character")
        axes.set_title(title)
        above = axes.secondary_xaxis(1.0, functions=(lambda x: x * WEIGHTS / RATE, lambda s: s * RATE / WEIGHTS))
        above.set_xticks(TIMES, [time_text(seconds) for seconds in TIMES])
        above.minorticks_off()
        above.set_xlabel("time to send the gradients of 100M weights at 1 Gb/s (100 Mb/s: 10 times as long)")
        axes.grid(True, alpha=0.3)
        found_labels.append((axes, labels))
    for axes, labels in found_labels:
        label_points(axes, labels, 9)
    figure.savefig(target, dpi=100)
    print(target)


if __name__ == "__main__":
    main()
