"""Does training with local steps and sparse pseudo-gradients reach the loss of dense pseudo-gradients?

    python -m bench.experiments.local_steps                                  # the table of P = 8, H = 30
    python -m bench.experiments.local_steps sync_every=1,10,100 method=dense,allgather,split bits=2
    python -m bench.experiments.local_steps --report bench/results/local-steps.jsonl

P workers train the LSTM on English text, each on its own share of the data, by AdamW. After H local steps
`sparsecomm.LocalSteps` exchanges their pseudo-gradients, on simulated ranks in one process. Every combination of the
values is trained; each training is a line of the file OUT, and is not repeated. ``--report`` writes the tables and the
plots beside the file. Bytes and seconds are those of a model of 25.6 million weights with the same settings, without
computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table

import sparsecomm as sc
from bench import report
from bench.experiments.grid import Grid, Outcome, mean_and_range
from bench.experiments.tasks import TASKS
from bench.experiments.trainer import Worker
from bench.labels import Label, label_points
from bench.local_steps import CHUNK, ELEMENTS, RATES, cost_of_round
from sparsecomm.quantities import bytes_text, number_text
from sparsecomm.tools.outputs import log_axis, panels, save, style
from sparsecomm.transport import Transport, simulated

WIRES = {32: "packed", 8: "packed_int8", 4: "packed_int4", 2: "packed_int2", 1: "packed_sign"}
METHODS = ("dense", "allgather", "split")
POINTS = 20  # of a curve, at most
STEPS = 600  # local steps of a worker
RATE = 0.02  # of AdamW, chosen for dense pseudo-gradients at H = 30; it rises for `WARM` steps, then falls to a tenth
WARM = 30
SOME = 256  # held-out samples for a point of a curve; the end is evaluated on all


@dataclass(frozen=True)
class Setting:
    """A training."""

    ranks: int = 8  # P, the number of workers
    sync_every: int = 30  # H, local steps per round
    method: str = "split"  # the algorithm of `sparsecomm.sparse_allreduce`: "dense", "allgather", "split", "split:2",
    bits: int = 2  # of a value on the wire; dense pseudo-gradients have 32
    k: int = 64  # entries that a worker selects of each chunk of 4,096
    op: str = "mean"  # of `sparsecomm.LocalSteps`
    decay: float = 0.95
    delay: int = 0  # its ``fragment_sync_delay`` and ``fragment_update_alpha``
    outer: float = 1.0  # learning rate and momentum of the outer optimizer, Nesterov's; 1 and 0 for none
    momentum: float = 0.0
    steps: int = STEPS  # local steps of each worker
    seed: int = 0  # of weights and batches
    alpha: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `sparsecomm.sparse_allreduce` for the exchange of a round."""
        if self.method == "dense":
            return {"algorithm": "dense"}
        return {"algorithm": self.method, "wire": WIRES[self.bits], "op": self.op, "chunk": CHUNK}

    @property
    def name(self) -> str:
        """The method, with the settings that are not the defaults."""
        texts = [self.method]
        if self.method != "dense":
            texts.append(f"{self.bits} bits")
            texts += [f"k = {self.k}"] if self.k != Setting.k else []
            texts += ["mean of contributors"] if self.op == "mean_of_contributors" else []
            texts.append(f"decay {self.decay:g}")
        if self.momentum or self.outer != 1:
            texts.append(f"outer {self.outer:g}" + (f", Nesterov {self.momentum:g}" if self.momentum else ""))
        texts += [f"delay {self.delay}"] if self.delay else []
        texts += [f"{self.steps:,} steps"] if self.steps != STEPS else []
        return ", ".join(texts)

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of a row."""
        method = METHODS.index(self.method.partition(":")[0]), self.method, -self.bits, self.op, -self.k, -self.decay
        return self.ranks, self.sync_every, *method, self.outer, self.momentum, self.delay, self.steps, self.seed


def lstm_worker(rank: int, ranks: int, seed: int) -> tuple[Worker, torch.optim.Optimizer]:
    """Return a worker with the LSTM, and its inner optimizer."""
    worker = Worker(TASKS["text"].build, TASKS["text"].data, rank, ranks, seed)
    parameters = worker.model.parameters()
    return worker, torch.optim.AdamW(parameters, RATE, betas=(0.9, 0.99), weight_decay=0.01, foreach=False)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: a warm-up, then half a cosine down to a tenth."""
    return RATE * min(1.0, (step + 1) / WARM) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(setting: Setting) -> Outcome:
    """Return the outcome of a training, with all workers in this process."""
    results = simulated.run(setting.ranks, lambda transport: work(setting, transport))
    return next(result.value for result in results if result.value)


def work(setting: Setting, transport: Transport) -> Outcome:
    """Run one worker; return the losses on rank 0."""
    worker, optimizer = lstm_worker(transport.rank, transport.size, setting.seed)
    no_outer, dense = setting.outer == 1 and setting.momentum == 0, setting.method == "dense"
    local = sc.LocalSteps(
        worker.parameters,
        1.0 if dense else setting.k / CHUNK,
        sync_every=setting.sync_every,
        fragment_sync_delay=setting.delay,
        outer=None if no_outer else sc.NesterovSGD(setting.outer, setting.momentum),
        comm=transport,
        decay=1.0 if dense else setting.decay,
        fragment_update_alpha=setting.alpha,
        **setting.options,
    )
    rounds, curve = setting.steps // setting.sync_every, []
    for round_no in range(1, rounds + 1):
        for _ in range(setting.sync_every):
            worker.step(optimizer, rate_at(worker.steps_taken, setting.steps))
            local.step(worker.parameters)
        if transport.rank == 0 and (round_no * POINTS // rounds > (round_no - 1) * POINTS // rounds or round_no == 1):
            curve.append((round_no, round(worker.loss(SOME), 4)))
    local.finish(worker.parameters)
    return {"curve": curve, "loss": worker.loss()} if transport.rank == 0 else {}


@dataclass(frozen=True)
class Cost:
    """The cost of a round: bytes that the busiest rank sends and receives, and seconds at each of `RATES`."""

    nbytes: int
    seconds: tuple[float, ...]


def cost_of(setting: Setting) -> Cost:
    """Return the cost of a round for the large model."""
    k = 1.0 if setting.method == "dense" else setting.k
    return _cost(setting.ranks, k, tuple(sorted(setting.options.items())))


@cache
def _cost(ranks: int, k: int | float, options: tuple[tuple[str, Any], ...]) -> Cost:
    costs = [cost_of_round(ranks, ELEMENTS, k, rate, dict(options)) for rate in RATES.values()]
    return Cost(costs[0][0] + costs[0][1], tuple(seconds for _, _, seconds in costs))


GRID = Grid(Setting, "setting")
Groups = dict[Setting, dict[int, Outcome]]


def table(groups: Groups) -> Table:
    """Return a row for each setting: the loss at the end, and the costs of a round and of the training."""
    dense = {(s.ranks, s.sync_every, s.steps): s for s in groups if s.method == "dense"}

    def above_dense(setting: Setting) -> str | None:
        other = dense.get((setting.ranks, setting.sync_every, setting.steps))
        if other is None or other == setting or not (common := groups[setting].keys() & groups[other].keys()):
            return None
        return f"{fmean(groups[setting][i]['loss'] - groups[other][i]['loss'] for i in sorted(common)):+.3f}"

    def of_dense(setting: Setting) -> str | None:
        other = dense.get((setting.ranks, setting.sync_every, setting.steps))
        return None if other in (None, setting) else f"1/{cost_of(other).nbytes / cost_of(setting).nbytes:.0f}"

    columns: list[report.Column] = [
        ("P", lambda s: s.ranks),
        ("H", lambda s: s.sync_every),
        ("exchange of pseudo-gradients", lambda s: s.name),
        (
            "final loss, nats (range over seeds)",
            lambda s: mean_and_range([outcome["loss"] for outcome in groups[s].values()]),
        ),
        ("above dense", above_dense),
        ("rounds", lambda s: s.steps // s.sync_every),
        ("MB per round", lambda s: number_text(cost_of(s).nbytes / 1e6)),
        ("relative to dense", of_dense),
        ("MB in the whole training", lambda s: number_text(s.steps // s.sync_every * cost_of(s).nbytes / 1e6, 4)),
        *((f"seconds per round, {r}", lambda s, i=i: number_text(cost_of(s).seconds[i])) for i, r in enumerate(RATES)),
    ]
    title = "Training with local steps: an LSTM on English text; bytes and seconds of 25.6M weights"
    return report.table(groups, columns, title=title)


def write(outcomes: dict[Setting, Outcome], path: Path) -> None:
    """Print the table, and write it and the plots beside the file of outcomes."""
    ordered = sorted(outcomes.items(), key=lambda item: item[0].order)
    groups, stem = GRID.by_seed(dict(ordered)), path.with_suffix("")
    lines = [f"# python -m bench.experiments.local_steps --report {path}; chunks of {CHUNK}"]
    report.show(lines, [table(groups)], width=230)
    with path.with_suffix(".txt").open("w") as file:
        report.show(lines, [table(groups)], file, width=230)
    for ranks in dict.fromkeys(s.ranks for s in groups):
        compared = {s: seeds for s, seeds in groups.items() if s.ranks == ranks}
        if len({s.sync_every for s in compared}) > 2:
            plot_choices(compared, f"P = {ranks}", Path(f"{stem}-{ranks}-bytes.png"))


def plot_choices(groups: Groups, title: str, path: Path) -> None:
    """Plot the loss at the end against the bytes of the training: a line for each method, a point for each H."""
    figure, (axes,) = panels(1, 5, 4.2)
    lines: dict[str, list[tuple[float, float, int]]] = {}
    for setting, seeds in groups.items():
        nbytes = setting.steps // setting.sync_every * cost_of(setting).nbytes
        point = float(nbytes), fmean(outcome["loss"] for outcome in seeds.values()), setting.sync_every
        same = replace(setting, outer=1.0, momentum=0.0) if setting.method == "dense" else setting
        lines.setdefault(same.name, []).append(point)
    labels = []
    for name, points in lines.items():
        if len(points) > 2:
            look = _look(name.split(",")[0])
            points.sort()
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], **look, label=name)
            labels += [Label(x, y, f"H = {H}", look["color"]) for x, y, H in points]
    log_axis(axes.xaxis, bytes_text)
    axes.margins(x=0.1)
    axes.set_xlabel("sent and received by the busiest rank in the training, for 25.6M weights")
    axes.set_ylabel("held-out loss at the end, nats per character")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper right")
    figure.suptitle(f"{title}: the same number of local steps")
    label_points(axes, labels)
    save(figure, path, 110)


def _look(method: str) -> dict[str, Any]:
    return style(method) | {"linestyle": "--" if method == "split:3" else "-"}


def main() -> None:
    GRID.run(__doc__, train, "local-steps.jsonl", write)


if __name__ == "__main__":
    main()
