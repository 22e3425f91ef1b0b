"""Which rules of error feedback train best, with which settings?

    python -m bench.experiments.ablation model=text ranks=8 method=split mask=selected,both momentum=0.5,0.9 --jobs 2
    python -m bench.experiments.ablation --report bench/results/ablation.jsonl

Every combination of the values is trained on a task of `tasks`, with all ranks in one process. The rules are plain
NumPy, and only the selection is the library's, so that a rule costs ten lines. Rules that win are trained again with
the library itself, by `convergence`. Each training is a line of the file OUT, and is not repeated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsecomm as sc
from bench.experiments.grid import Grid, Outcome, mean, spread
from bench.experiments.tasks import TASKS
from bench.experiments.trainer import Trainer, Vector
from sparsecomm.quantities import percent_text

Indices = NDArray[Any]
Entries = tuple[Indices, Vector]


@dataclass(frozen=True)
class Variant:
    """A training."""

    model: str = "text"  # as in `convergence`
    ranks: int = 8
    # "topk" (the sum of all top-k), "split" (its exact top-k), "butterfly" (merged in pairs), or "dense"
    method: str = "split"
    density: float = 0.001
    seed: int = 0
    steps: int = 0  # 0 for the task's own number
    keep: str = "owner"  # who takes back entries that the result does not hold: "owner", or "merger" (a shard each)
    # where velocities are reset: at the rank's "selected" entries, at the "applied" ones, at "both", or "none"
    mask: str = "both"
    momentum: float = 0.9  # of each rank's velocity, before the residual
    nesterov: int = 0
    decay: float = 1.0  # factor on the residual in each step (SparseLoCo, 2025)
    rate: float = 1.0  # factors on the task's learning rate and on its norm for clipping; clip 0: no clipping
    clip: float = 1.0
    warmup: float = 0.1  # of all steps, in which the density falls from `start` in `stages` (Lin et al., ICLR 2018)
    start: float = 0.25
    stages: int = 4
    # limit on sent values, as a multiple of the smallest one; the residual keeps the rest. 0: no limit
    clamp: float = 0.0
    # the result: "no", the sum of the sent entries; "sum", of all accumulated gradients at their indices;
    # "contributors", that divided by the number of ranks that selected the index; "root", by its square root
    complete: str = "no"
    scope: str = "model"  # "model": one selection from all, or "tensor": one from each
    lowpass: float = 1.0  # b of ScaleCom's m' = m + b (g - sent) (Chen et al., NeurIPS 2020); 1 is error feedback
    ef21: float = 0.0  # h of EF21-SGDM (Fatkhullin et al., NeurIPS 2023); 0 is error feedback
    regular: float = 0.0  # mu of RegTop-k's damping (2024); 0 for none
    threshold: float = 0.0  # select entries above it, instead of k (Sahu et al., NeurIPS 2021); 0 for k
    # of a value on the wire: 32, 16 (bfloat16) or 8 (a shared exponent per block of 64); the residual keeps the
    # rounding error
    bits: int = 32
    result_ratio: float = 1.0  # entries of the result / entries that a rank selects; not for "topk"


# -- exchange ---------------------------------------------------------------------------------------------------------


def add_up(vectors: Sequence[Entries]) -> Entries:
    """Return the sum of vectors, without zeros."""
    indices = np.concatenate([i for i, _ in vectors])
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], np.concatenate([v for _, v in vectors])[order]
    first = np.flatnonzero(np.diff(indices, prepend=-1))
    return (indices[first], np.add.reduceat(values, first)) if len(first) else (indices, values)


def cut(entries: Entries, k: int) -> tuple[Entries, Entries]:
    """Return the k largest entries, and the others."""
    indices, values = entries
    if len(values) <= k:
        return entries, (indices[:0], values[:0])
    selected = np.zeros(len(values), bool)
    selected[np.argsort(-np.abs(values), kind="stable")[:k]] = True
    return (indices[selected], values[selected]), (indices[~selected], values[~selected])


def exchange(method: str, mine: Sequence[Entries], k: int) -> tuple[Entries, list[list[Entries]]]:
    """Return the result, and the entries that each rank drops."""
    P = len(mine)
    drops: list[list[Entries]] = [[] for _ in range(P)]
    if method == "topk":
        return add_up(mine), drops
    if method == "split":
        result, lost = cut(add_up(mine), k)
        owner = lost[0].astype(np.int64) * P // (int(max(i[-1] for i, _ in mine)) + 1)
        for rank in range(P):
            drops[rank].append((lost[0][owner == rank], lost[1][owner == rank]))
        return result, drops
    in_result = list(mine)
    mask = 1
    while mask < P:  # P is a power of two
        merged = {}
        for rank in range(P):
            group = rank // (2 * mask)
            if group not in merged:
                merged[group] = cut(add_up([in_result[group * 2 * mask], in_result[group * 2 * mask + mask]]), k)
        for rank in range(P):
            in_result[rank], (indices, values) = merged[rank // (2 * mask)]
            member = slice(
                len(indices) * (rank % (2 * mask)) // (2 * mask), len(indices) * (rank % (2 * mask) + 1) // (2 * mask)
            )
            drops[rank].append((indices[member], values[member]))
        mask *= 2
    return in_result[0], drops


def rounded(values: Vector, bits: int) -> Vector:
    """Round values to a format of ``bits`` bits."""
    if bits == 32 or not len(values):
        return values
    if bits == 16:
        nearest: Vector = (values.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
        return nearest
    blocks = np.concatenate([values, np.zeros(-len(values) % 64, np.float32)]).reshape(-1, 64)
    scale = np.exp2(np.ceil(np.log2(np.abs(blocks).max(1, keepdims=True) + 1e-38))) / 2 ** (bits - 1)
    limit = 2 ** (bits - 1) - 1
    result: Vector = (np.clip(np.rint(blocks / scale), -limit, limit) * scale).astype(np.float32).ravel()[: len(values)]
    return result


# -- the state of the ranks -------------------------------------------------------------------------------------------


class Ranks:
    """The state of all ranks between steps: a row of the residuals and of the velocities for each."""

    def __init__(self, variant: Variant, sizes: Sequence[int]) -> None:
        self.variant, n = variant, sum(sizes)
        self.boundaries = [0, *itertools.accumulate(sizes)] if variant.scope == "tensor" else [0, n]
        self.residual = np.zeros((variant.ranks, n), np.float32)
        self.velocity = np.zeros((variant.ranks, n), np.float32)
        self.applied = np.zeros(n, np.float32)  # EF21's estimate
        self.last: Vector | None = None
        self.sent = 0  # entries that a rank has selected
        self.in_result = 0  # entries that results have held

    def step(self, gradients: Vector, density: float) -> Vector:
        """Return the update of a step, the mean over the ranks, before the learning rate."""
        v, P = self.variant, len(gradients)
        if v.ef21:
            self.velocity *= 1 - v.ef21
            self.velocity += v.ef21 * gradients
            accumulated = self.velocity - self.residual  # here the residual is what has been sent so far
        else:
            if v.momentum:
                self.velocity *= v.momentum
                self.velocity += gradients
                g = gradients + v.momentum * self.velocity if v.nesterov else self.velocity
            else:
                g = gradients
            if v.lowpass < 1:
                old, fresh = self.residual, g
                accumulated = old + fresh
            else:
                if v.decay < 1:
                    self.residual *= v.decay
                self.residual += g
                accumulated = self.residual
        total = np.zeros(accumulated.shape[1], np.float32)
        for begin, end in itertools.pairwise(self.boundaries):
            self._exchange(accumulated[:, begin:end], total[begin:end], density, slice(begin, end))
        if v.lowpass < 1:
            self.residual[:] = old + v.lowpass * (fresh - (old + fresh - accumulated))
        total /= P
        self.last = total
        if v.ef21:
            self.applied += total
            return self.applied
        return total

    def _exchange(self, accumulated: Vector, total: Vector, density: float, where: slice) -> None:
        """Exchange one range of elements, and remove the applied entries from ``accumulated``."""
        v, P, n = self.variant, *accumulated.shape
        k = min(n, max(1, round(density * n)))
        mine, taken = [], []
        for rank in range(P):
            indices, values = self._select(accumulated[rank], k, where)
            sent = rounded(values, v.bits)
            if v.clamp and len(sent):
                limit = v.clamp * np.abs(sent).min()
                sent = np.clip(sent, -limit, limit)
            mine.append((indices, sent))
            taken.append(values)
            self.sent += len(indices)
        if v.method == "dense":
            total[:] = accumulated.sum(0)
            accumulated[:] = 0
            return
        if v.threshold:
            k = max(1, round(np.mean([len(i) for i, _ in mine])))
        (indices, values), drops = exchange(v.method, mine, round(v.result_ratio * k))
        self.in_result += len(indices) * P
        inside = np.zeros(n, bool)
        inside[indices] = True
        if v.complete != "no":
            values = accumulated[:, indices].sum(0)
            if v.complete != "sum":
                count = np.sum([np.isin(indices, i) for i, _ in mine], 0, dtype=np.float32)
                values /= count if v.complete == "contributors" else np.sqrt(count)
            accumulated[:, indices] = 0
        elif v.ef21:
            for rank, (i, sent) in enumerate(mine):
                in_result = inside[i]
                self.residual[rank, where][i[in_result]] += sent[in_result]
        elif v.keep == "owner":
            for rank, (i, sent) in enumerate(mine):
                in_result = inside[i]
                accumulated[rank][i[in_result]] = taken[rank][in_result] - sent[in_result]
                for j, lost in drops[rank]:
                    in_result = inside[j]
                    accumulated[rank][j[in_result]] += lost[in_result]
        else:
            for rank, (i, sent) in enumerate(mine):
                accumulated[rank][i] = taken[rank] - sent
                for j, lost in drops[rank]:
                    accumulated[rank][j] += lost
        if not v.ef21:
            for rank, (i, _) in enumerate(mine):
                if v.mask in ("selected", "both"):
                    self.velocity[rank, where][i] = 0
                if v.mask in ("applied", "both"):
                    self.velocity[rank, where][indices] = 0
        total[indices] = rounded(values, v.bits) if v.method != "topk" else values

    def _select(self, accumulated: Vector, k: int, where: slice) -> Entries:
        v = self.variant
        if v.threshold:
            indices = np.flatnonzero(np.abs(accumulated) >= v.threshold).astype(np.int32)
            return indices, accumulated[indices]
        if v.regular and self.last is not None:
            last = self.last[where]
            with np.errstate(divide="ignore", invalid="ignore"):
                distortion = np.where(last != 0, last * v.ranks / accumulated - 1, 0)
                score = np.where(last != 0, accumulated * np.tanh(np.abs(1 + distortion) / v.regular), accumulated)
            indices = sc.topk(np.nan_to_num(score).astype(np.float32), k).indices
            return indices, accumulated[indices]
        entries = sc.topk(accumulated, k)
        return entries.indices, entries.values


# -- training ---------------------------------------------------------------------------------------------------------


def train(variant: Variant) -> Outcome:
    """Return the outcome of a training."""
    v = variant
    trainer = Trainer(TASKS[v.model], v.seed, v.steps)
    task, steps, dense = trainer.task, trainer.steps, v.method == "dense"
    ranks = Ranks(v, trainer.sizes)
    gradients = np.zeros_like(ranks.residual)
    schedule = sc.Warmup(v.density, round(v.warmup * steps), v.start, v.stages)
    velocity = np.zeros(gradients.shape[1], np.float32)
    for step in range(steps):
        batch = trainer.batch()
        for rank in range(1 if dense else v.ranks):
            g = gradients[rank]
            trainer.gradient(batch if dense else batch[rank :: v.ranks], g)
            if task.clip is not None and v.clip:
                norm, limit = float(np.linalg.norm(g)), v.clip * task.clip * (1 if dense else math.sqrt(v.ranks))
                if norm > limit:
                    g *= limit / norm
        if dense:
            update = velocity = v.momentum * velocity + gradients[0]
        else:
            update = ranks.step(gradients, schedule(step))
        if not np.isfinite(update).all():
            break
        trainer.subtract(update, v.rate * task.rate_at(step, steps))
        trainer.note(step)
    per_step = v.ranks * gradients.shape[1] * steps
    return trainer.outcome() | {"sent": ranks.sent / per_step, "held": ranks.in_result / per_step}


GRID = Grid(
    Variant,
    "variant",
    "Rules of error feedback",
    {"model": "model", "ranks": "P", "method": "method", "density": "density"},
    {
        "score": spread("score"),
        "seeds": len,
        "selected": mean("sent", percent_text),
        "in results": mean("held", percent_text),
    },
    lambda v, seeds: (v.model, v.ranks, v.method),
)


def main() -> None:
    GRID.run(__doc__, train, "ablation.jsonl")


if __name__ == "__main__":
    main()
