"""By which rules should pseudo-gradients be compressed and summed?

    python -m bench.experiments.local_steps_rules method=split result_ratio=1,3 op=mean,contributors
    python -m bench.experiments.local_steps_rules --report bench/results/local-steps-rules.jsonl

Every combination of the values is trained with the workers of `local_steps`. The rules are plain NumPy, so that a rule
costs ten lines. Useful rules are in the library, and are trained with the library by `local_steps`. Each training is a
line of the file OUT, and is not repeated.

Chunks begin at each tensor's first element; tensors below `SMALL` elements are sent completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.experiments.grid import Grid, Outcome, mean, spread
from bench.experiments.local_steps import SOME, lstm_worker, rate_at
from bench.experiments.trainer import Vector

Flags = NDArray[np.bool_]

CHUNK = 4096
SMALL = 1024
BLOCK = 64  # values with common levels on the wire


@dataclass(frozen=True)
class Rule:
    """A rule for the exchange of pseudo-gradients."""

    ranks: int = 8  # of the training: workers, local steps of each, local steps per round
    steps: int = 450
    sync_every: int = 15
    seed: int = 0
    method: str = "split"  # "dense"; "allgather": the sum of all selections; "split": the largest entries of that sum
    k: int = 64  # entries that a rank selects of each chunk
    bits: int = 2  # of a value: 32, 8, 4, 2; 1 is a sign and one magnitude per block
    table: int = 0  # 1: two bits by SparseLoCo's table of four values per tensor, instead of levels per block
    decay: float = 0.95  # factor on the residual in each round
    result_ratio: float = 1.0  # entries of split's result / entries that a rank selects
    op: str = "mean"  # "mean", or "contributors": the mean over the ranks that sent an entry
    complete: int = 0  # 1: the result sums the pseudo-gradients of all ranks at its indices, not only the selected ones
    rate: float = 1.0  # of the outer optimizer, Nesterov's; 1 and 0 for none
    momentum: float = 0.0


def chunks(sizes: Sequence[int]) -> list[slice]:
    """Return the chunks of all tensors except small ones."""
    ends = pairwise([0, *accumulate(sizes)])
    return [
        slice(b, min(b + CHUNK, end)) for begin, end in ends if end - begin >= SMALL for b in range(begin, end, CHUNK)
    ]


def select(x: Vector, k: int, parts: Sequence[slice]) -> Flags:
    """Return which elements are among the k largest of their chunk. Ties go to the first; zeros are never selected."""
    chosen = np.zeros(len(x), bool)
    for part in parts:
        magnitudes = np.abs(x[part])
        largest = np.argsort(-magnitudes, kind="stable")[:k] if k < len(magnitudes) else np.arange(len(magnitudes))
        chosen[part.start + largest[magnitudes[largest] > 0]] = True
    return chosen


def quantised(values: Vector, bits: int) -> Vector:
    """Round values by blocks to a sign and a level between the smallest and the largest magnitude.

    The levels of two bits are the means of the magnitudes below and above the mean; the level of one bit is the mean.
    """
    if bits == 32 or not len(values):
        return values
    magnitudes = np.abs(values)
    pad = -len(values) % BLOCK
    blocks = np.concatenate([magnitudes, np.full(pad, np.nan, np.float32)]).reshape(-1, BLOCK)
    mean = np.nanmean(blocks, 1, keepdims=True)
    if bits == 1:
        levels = np.broadcast_to(mean, blocks.shape)
    elif bits == 2:
        high = blocks > mean
        count = high.sum(1, keepdims=True)
        above = np.where(high, blocks, 0).sum(1, keepdims=True) / np.maximum(count, 1)
        low = ~high & ~np.isnan(blocks)
        below = np.where(low, blocks, 0).sum(1, keepdims=True) / np.maximum(low.sum(1, keepdims=True), 1)
        levels = np.where(high, above, below)
    else:
        smallest, largest = np.nanmin(blocks, 1, keepdims=True), np.nanmax(blocks, 1, keepdims=True)
        step = np.maximum((largest - smallest) / (2 ** (bits - 1) - 1), np.float32(1e-38))
        levels = smallest + np.rint((blocks - smallest) / step) * step
    return np.copysign(levels.reshape(-1)[: len(values)], values).astype(np.float32)


def looked_up(values: Vector) -> Vector:
    """Round values by SparseLoCo's table: the means of four bins, 1.5 standard deviations wide, around the mean.

    Source: tplr-ai/templar, src/tplr/compress.py, with 4 bins and a range of 6 sigma.
    """
    if len(values) < 2:
        return values
    shift, width = values.mean(), 1.5 * values.std(ddof=1)
    bins = np.clip(np.rint((values - shift) / max(width, 1e-30) + 2), 0, 3).astype(int)
    table = np.bincount(bins, values, 4) / np.maximum(np.bincount(bins, minlength=4), 1)
    return table[bins].astype(np.float32)


class Ranks:
    """The state of all ranks between rounds; the residual has a row per rank."""

    def __init__(self, rule: Rule, sizes: Sequence[int]) -> None:
        self.rule, self.parts = rule, chunks(sizes)
        self.small = np.repeat([size < SMALL for size in sizes], sizes)  # elements of small tensors
        self.tensors = [slice(*ends) for ends in pairwise([0, *accumulate(sizes)])]
        self.residual = np.zeros((rule.ranks, sum(sizes)), np.float32)
        self.velocity = np.zeros(sum(sizes), np.float32)
        self.entries = {"selected": 0, "result": 0}  # entries that a rank selected, and that results held

    def step(self, deltas: Vector) -> Vector:
        """Return the update of the global parameters; ``deltas`` has a row of pseudo-gradients per rank."""
        rule = self.rule
        mean = deltas.mean(0) if rule.method == "dense" else self.exchange(deltas)
        if not rule.momentum:
            return rule.rate * mean
        self.velocity *= np.float32(rule.momentum)
        self.velocity += mean
        return np.float32(rule.rate) * (mean + np.float32(rule.momentum) * self.velocity)

    def exchange(self, deltas: Vector) -> Vector:
        """Return the mean of the exchanged entries, and leave the rest in the residuals."""
        rule, P = self.rule, len(deltas)
        accumulated = self.residual
        accumulated *= np.float32(rule.decay)
        accumulated += deltas
        chosen = np.array([select(row, rule.k, self.parts) for row in accumulated])
        sent = np.zeros_like(accumulated)
        for row, flags, values in zip(sent, chosen, accumulated, strict=True):
            row[flags] = self.rounded(values, flags)
        self.entries["selected"] += int(chosen.sum()) // P
        total = sent.sum(0)
        if rule.method == "split":
            winners = select(total, round(rule.result_ratio * chosen[0].sum()), [slice(0, len(total))])
            sent[:, ~winners] = 0  # returns to the rank that selected it
            if rule.complete:
                for row, values in zip(sent, accumulated, strict=True):
                    row[winners] = self.rounded(values, winners)
            total = sent.sum(0)
            result = np.zeros_like(total)
            result[winners] = self.rounded(total, winners)
            # The rounding error of the result stays with its owner.
            lost = np.array_split(total - result, P)
            accumulated -= sent
            for rank, part in enumerate(np.array_split(np.arange(len(total)), P)):
                accumulated[rank, part] += lost[rank]
            total = result
        else:
            accumulated -= sent
            winners = chosen.any(0)
        self.entries["result"] += int(winners.sum())
        counts = np.maximum(np.count_nonzero(sent, axis=0), 1) if rule.op == "contributors" else P
        total = (total / counts).astype(np.float32)
        total[self.small] = accumulated[:, self.small].mean(0)
        accumulated[:, self.small] = 0
        return total

    def rounded(self, values: Vector, flags: Flags) -> Vector:
        """Return the selected values, rounded for the wire."""
        if not self.rule.table:
            return quantised(values[flags], self.rule.bits)
        of_tensors: list[Any] = [looked_up(values[part][flags[part]]) for part in self.tensors]
        return np.concatenate(of_tensors)


def train(rule: Rule) -> Outcome:
    """Return the outcome of a training."""
    workers = [lstm_worker(rank, rule.ranks, rule.seed) for rank in range(rule.ranks)]
    first = workers[0][0]
    shared = _flat(first)
    ranks = Ranks(rule, [p.numel() for p in first.parameters.values()])
    deltas = np.empty((rule.ranks, len(shared)), np.float32)
    rounds, curve = rule.steps // rule.sync_every, []
    for round_no in range(rounds):
        for (worker, optimizer), delta in zip(workers, deltas, strict=True):
            for _ in range(rule.sync_every):
                worker.step(optimizer, rate_at(worker.steps_taken, rule.steps))
            delta[:] = shared - _flat(worker)
        shared -= ranks.step(deltas)
        for worker, _ in workers:
            begin = 0
            for p in worker.parameters.values():
                p.copy_(torch.from_numpy(shared[begin : begin + p.numel()].reshape(p.shape)))
                begin += p.numel()
        if (round_no + 1) % max(1, rounds // 10) == 0:
            curve.append(round(first.loss(SOME), 4))
    entries = {name: count / rounds for name, count in ranks.entries.items()}
    return {"loss": first.loss(), "curve": curve} | entries


def _flat(worker: Any) -> Vector:
    flat: Vector = np.concatenate([p.numpy().ravel() for p in worker.parameters.values()])
    return flat


GRID = Grid(
    Rule,
    "rule",
    "Rules for pseudo-gradients",
    {"ranks": "P", "steps": "steps", "sync_every": "H", "method": "method"},
    {
        "nats": spread("loss"),
        "selected": mean("selected", "{:.0f}".format),
        "in the result": mean("result", "{:.0f}".format),
    },
    lambda rule, seeds: fmean(o["loss"] for o in seeds),
)


def main() -> None:
    GRID.run(__doc__, train, "local-steps-rules.jsonl")


if __name__ == "__main__":
    main()
