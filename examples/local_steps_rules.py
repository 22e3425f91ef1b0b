"""By which rules should pseudo-gradients be compressed and summed?

    python examples/local_steps_rules.py method=split result_ratio=1,3 op=mean,contributors
    python examples/local_steps_rules.py --report bench/results/local-steps-rules.jsonl

Every combination of the values is trained, with the workers of `local_steps_worker.py`. All is plain NumPy: a rule
costs ten lines. What is worth it is in the library, and trained with the library by `local_steps_training.py`. Each
training is a line of the file OUT; those that it has already are not repeated.

Chunks begin at each tensor's first element; tensors below `WHOLE` elements travel whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from grid import Grid
from local_steps_worker import Worker
from numpy.typing import NDArray
from rich.table import Table

Vector = NDArray[np.float32]
Flags = NDArray[np.bool_]

CHUNK = 4096
WHOLE = 1024
BLOCK = 64  # values that share their levels on the wire


@dataclass(frozen=True)
class Rule:
    """How pseudo-gradients are exchanged.

    Attributes:
        ranks, steps, sync_every, seed: of the training: workers, local steps of each, and of a round.
        method: "dense"; "allgather": the sum of all that was selected; "split": the largest entries of that sum.
        k: entries that a rank selects of each chunk.
        bits: of a value: 32, 8, 4, 2; 1 is a sign and one magnitude per block.
        table: 1: two bits by SparseLoCo's table of four values per tensor, in place of levels per block.
        decay: what the residual is multiplied by in each round.
        result_ratio: entries of split's result, as a multiple of what a rank selects.
        by: whether split cuts its result by "chunk", or "all" at once.
        op: "mean", or "contributors": over the ranks that sent an entry.
        complete: 1: the result is what all ranks hold at the winners, whether they had selected it or not.
        rate, momentum: of the outer optimizer, with Nesterov's momentum; 1 and 0 for none.
    """

    ranks: int = 8
    steps: int = 450
    sync_every: int = 15
    seed: int = 0
    method: str = "split"
    k: int = 64
    bits: int = 2
    table: int = 0
    decay: float = 0.95
    result_ratio: float = 1.0
    by: str = "all"
    op: str = "mean"
    complete: int = 0
    rate: float = 1.0
    momentum: float = 0.0


def chunks(sizes: Sequence[int]) -> list[slice]:
    """Return the chunks of all tensors, those that travel whole left out."""
    ends = pairwise([0, *accumulate(sizes)])
    return [
        slice(b, min(b + CHUNK, end)) for begin, end in ends if end - begin >= WHOLE for b in range(begin, end, CHUNK)
    ]


def whole(sizes: Sequence[int]) -> Flags:
    """Return which elements belong to tensors that travel whole."""
    return np.repeat([size < WHOLE for size in sizes], sizes)


def select(x: Vector, k: int, parts: Sequence[slice]) -> Flags:
    """Return which elements are among the k largest of their chunk; the first of equal ones, and never a zero."""
    chosen = np.zeros(len(x), bool)
    for part in parts:
        magnitudes = np.abs(x[part])
        found = np.argsort(-magnitudes, kind="stable")[:k] if k < len(magnitudes) else np.arange(len(magnitudes))
        chosen[part.start + found[magnitudes[found] > 0]] = True
    return chosen


def quantised(values: Vector, bits: int) -> Vector:
    """Return values as so many bits have them, by blocks: a sign, and a level between the smallest and the largest.

    Two bits have the means of the magnitudes below and above the mean, one bit the mean.
    """
    if bits == 32 or not len(values):
        return values
    magnitudes = np.abs(values)
    pad = -len(values) % BLOCK
    blocks = np.concatenate([magnitudes, np.full(pad, np.nan, np.float32)]).reshape(-1, BLOCK)
    mean = np.nanmean(blocks, 1, keepdims=True)
    if bits == 1:
        found = np.broadcast_to(mean, blocks.shape)
    elif bits == 2:
        high = blocks > mean
        count = high.sum(1, keepdims=True)
        above = np.where(high, blocks, 0).sum(1, keepdims=True) / np.maximum(count, 1)
        low = ~high & ~np.isnan(blocks)
        below = np.where(low, blocks, 0).sum(1, keepdims=True) / np.maximum(low.sum(1, keepdims=True), 1)
        found = np.where(high, above, below)
    else:
        smallest, largest = np.nanmin(blocks, 1, keepdims=True), np.nanmax(blocks, 1, keepdims=True)
        step = np.maximum((largest - smallest) / (2 ** (bits - 1) - 1), np.float32(1e-38))
        found = smallest + np.rint((blocks - smallest) / step) * step
    return np.copysign(found.reshape(-1)[: len(values)], values).astype(np.float32)


def looked_up(values: Vector) -> Vector:
    """Return values by SparseLoCo's table: the means of four bins, 1.5 standard deviations wide, around the mean.

    Source: tplr-ai/templar, src/tplr/compress.py, with 4 bins and a range of 6 sigma.
    """
    if len(values) < 2:
        return values
    shift, width = values.mean(), 1.5 * values.std(ddof=1)
    bins = np.clip(np.rint((values - shift) / max(width, 1e-30) + 2), 0, 3).astype(int)
    table = np.bincount(bins, values, 4) / np.maximum(np.bincount(bins, minlength=4), 1)
    return table[bins].astype(np.float32)


class Ranks:
    """What all ranks keep from round to round.

    Attributes:
        residual: what each rank has not sent yet, a row per rank.
        entries: that a rank has sent to the ranks that add up, and that results have held.
    """

    def __init__(self, rule: Rule, sizes: Sequence[int]) -> None:
        self.rule, self.parts, self.whole = rule, chunks(sizes), whole(sizes)
        self.tensors = [slice(*ends) for ends in pairwise([0, *accumulate(sizes)])]
        self.residual = np.zeros((rule.ranks, sum(sizes)), np.float32)
        self.velocity = np.zeros(sum(sizes), np.float32)
        self.entries = {"selected": 0, "result": 0}

    def step(self, deltas: Vector) -> Vector:
        """Return what is to be subtracted from the weights of the last round.

        Args:
            deltas: the ranks' pseudo-gradients, a row each.
        """
        rule = self.rule
        mean = deltas.mean(0) if rule.method == "dense" else self.exchange(deltas)
        if not rule.momentum:
            return rule.rate * mean
        self.velocity *= np.float32(rule.momentum)
        self.velocity += mean
        return np.float32(rule.rate) * (mean + np.float32(rule.momentum) * self.velocity)

    def exchange(self, deltas: Vector) -> Vector:
        """Return the mean of what was exchanged; the rest is in the residuals."""
        rule, P = self.rule, len(deltas)
        held = self.residual
        held *= np.float32(rule.decay)
        held += deltas
        chosen = np.array([select(row, rule.k, self.parts) for row in held])
        sent = np.zeros_like(held)
        for row, flags, values in zip(sent, chosen, held, strict=True):
            row[flags] = self.rounded(values, flags)
        self.entries["selected"] += int(chosen.sum()) // P
        total = sent.sum(0)
        if rule.method == "split":
            winners = self.winners(total, chosen)
            sent[:, ~winners] = 0  # it goes back to the rank that selected it
            if rule.complete:
                for row, values in zip(sent, held, strict=True):
                    row[winners] = self.rounded(values, winners)
            total = sent.sum(0)
            result = np.zeros_like(total)
            result[winners] = self.rounded(total, winners)
            # What rounding the result takes waits with the rank that added it up.
            lost = np.array_split(total - result, P)
            held -= sent
            for rank, part in enumerate(np.array_split(np.arange(len(total)), P)):
                held[rank, part] += lost[rank]
            total = result
        else:
            held -= sent
            winners = chosen.any(0)
        self.entries["result"] += int(winners.sum())
        counts = np.maximum(np.count_nonzero(sent, axis=0), 1) if rule.op == "contributors" else P
        total = (total / counts).astype(np.float32)
        total[self.whole] = held[:, self.whole].mean(0)
        held[:, self.whole] = 0
        return total

    def winners(self, total: Vector, chosen: Flags) -> Flags:
        """Return which entries of the sum are in the result."""
        if self.rule.by == "chunk":
            return select(total, round(self.rule.result_ratio * self.rule.k), self.parts)
        k = round(self.rule.result_ratio * chosen[0].sum())
        return select(total, k, [slice(0, len(total))])

    def rounded(self, values: Vector, flags: Flags) -> Vector:
        """Return the values at the flags as the wire has them."""
        if not self.rule.table:
            return quantised(values[flags], self.rule.bits)
        of_tensors: list[Any] = [looked_up(values[part][flags[part]]) for part in self.tensors]
        return np.concatenate(of_tensors)


# -- training ---------------------------------------------------------------------------------------------------------


def train(rule: Rule) -> dict[str, Any]:
    """Return the outcome of a training."""
    workers = [Worker(rank, rule.ranks, rule.seed, rule.steps) for rank in range(rule.ranks)]
    shared = np.concatenate([p.numpy().ravel() for p in workers[0].parameters.values()])
    ranks = Ranks(rule, [p.numel() for p in workers[0].parameters.values()])
    deltas = np.empty((rule.ranks, len(shared)), np.float32)
    rounds = rule.steps // rule.sync_every
    curve = []
    for round_no in range(rounds):
        for worker, delta in zip(workers, deltas, strict=True):
            for _ in range(rule.sync_every):
                worker.step()
            delta[:] = shared - np.concatenate([p.numpy().ravel() for p in worker.parameters.values()])
        shared -= ranks.step(deltas)
        for worker in workers:
            begin = 0
            for p in worker.parameters.values():
                p.copy_(torch.from_numpy(shared[begin : begin + p.numel()].reshape(p.shape)))
                begin += p.numel()
        if (round_no + 1) % max(1, rounds // 10) == 0:
            curve.append(round(workers[0].loss(some=True), 4))
    entries = {name: count / rounds for name, count in ranks.entries.items()}
    return {"loss": workers[0].loss(some=False), "curve": curve} | entries


# -- the command line -------------------------------------------------------------------------------------------------


GRID = Grid(Rule, "rule")


def table(done: dict[Rule, dict[str, Any]]) -> Table:
    """Return a row for each rule, by the order of the losses."""
    made = Table(title="Rules for pseudo-gradients", box=None)
    for column in ("P", "steps", "H", "seed", "method", "rules", "nats", "selected", "in the result"):
        made.add_column(column)
    told = ("ranks", "steps", "sync_every", "seed", "method")
    for rule, outcome in sorted(done.items(), key=lambda item: item[1]["loss"]):
        made.add_row(
            *(str(getattr(rule, name)) for name in told),
            " ".join(f"{name}={value}" for name, value in GRID.unusual(rule, *told).items()),
            f"{outcome['loss']:.3f}",
            f"{outcome['selected']:.0f}",
            f"{outcome['result']:.0f}",
        )
    return made


def _said(outcome: dict[str, Any]) -> str:
    return f"{outcome['loss']:.4f}"


def main() -> None:
    GRID.run("Compare rules for pseudo-gradients.", train, _said, table, "local-steps-rules.jsonl")


if __name__ == "__main__":
    main()
