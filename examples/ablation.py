"""Which rules of error feedback train best, at which settings?

    python examples/ablation.py model=text ranks=8 method=split mask=selected,both momentum=0.5,0.9 --jobs 2
    python examples/ablation.py --report bench/results/ablation.jsonl

Every combination of the values is trained, with the tasks of `convergence_tasks.py`, for all ranks in one process. Here
everything is plain NumPy and only selection is the library's: a rule costs ten lines, so that those that lose need not
be built into the library. What wins is trained again, with the library itself, by `convergence.py`. Each training is a
line of the file OUT; those that it has already are not repeated.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trainings share the cores
os.environ.setdefault("SPARSECOMM_THREADS", "1")

import numpy as np
import torch
from convergence_tasks import TASKS, evaluate
from grid import Grid, mean_and_range
from numpy.typing import NDArray
from rich.table import Table
from torch.nn import functional

import sparsecomm as sc
from sparsecomm.quantities import number_text, percent_text

Vector = NDArray[np.float32]
Indices = NDArray[Any]
Entries = tuple[Indices, Vector]

torch.set_num_threads(1)


@dataclass(frozen=True)
class Variant:
    """A training: a task, a method, and the rules that are compared.

    Attributes:
        model, ranks, density, seed: as in `convergence.py`.
        steps: 0 for the task's own number.
        method: "topk" (the sum of all top-k), "split" (its exact top-k), "butterfly" (merged in pairs), or "dense".
        keep: who takes back what the result does not hold: "owner", or "merger" (a shard each).
        mask: where velocities are forgotten: where a rank has "selected", where the result "applied", "both", "none".
        momentum: m, of each rank's velocity, before the residual; or "after" the sum, in the optimizer (`place`).
        decay: what the residual is multiplied by in each step (SparseLoCo, 2025).
        rate: times the task's learning rate.
        clip: times the task's norm, 0 for none.
        warmup: of all steps, in which the density falls from `start` in `stages` (Lin et al., ICLR 2018).
        clamp: send at most so many times the smallest magnitude that is sent; the rest waits. 0: no limit.
        complete: "no"; "sum" of all that ranks hold at the winners; "contributors": over how many selected there;
            "root": over the root of that.
        scope: "model": one selection from all, or "tensor": one from each.
        lowpass: b of ScaleCom's m' = m + b (g - sent) (Chen et al., NeurIPS 2020); 1 is error feedback.
        ef21: h of EF21-SGDM (Fatkhullin et al., NeurIPS 2023); 0 is error feedback.
        regular: mu of RegTop-k's damping (2024); 0 for none.
        threshold: select what exceeds it, not k (Sahu et al., NeurIPS 2021); 0 for k.
        bits: of a value on the wire: 32, 16 (bfloat16) or 8 (a shared exponent per block of 64); what rounding takes
            stays.
        result_ratio: entries of the result, as a multiple of what a rank selects; not for "topk".
    """

    model: str = "text"
    ranks: int = 8
    method: str = "split"
    density: float = 0.001
    seed: int = 0
    steps: int = 0
    keep: str = "owner"
    mask: str = "both"
    momentum: float = 0.9
    place: str = "before"
    nesterov: int = 0
    decay: float = 1.0
    rate: float = 1.0
    clip: float = 1.0
    warmup: float = 0.1
    start: float = 0.25
    stages: int = 4
    clamp: float = 0.0
    complete: str = "no"
    scope: str = "model"
    lowpass: float = 1.0
    ef21: float = 0.0
    regular: float = 0.0
    threshold: float = 0.0
    bits: int = 32
    result_ratio: float = 1.0


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
    kept = np.zeros(len(values), bool)
    kept[np.argsort(-np.abs(values), kind="stable")[:k]] = True
    return (indices[kept], values[kept]), (indices[~kept], values[~kept])


def exchange(method: str, mine: Sequence[Entries], k: int) -> tuple[Entries, list[list[Entries]]]:
    """Return the result, and what each rank drops on the way."""
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
    held = list(mine)
    mask = 1
    while mask < P:  # P is a power of two
        merged = {}
        for rank in range(P):
            group = rank // (2 * mask)
            if group not in merged:
                merged[group] = cut(add_up([held[group * 2 * mask], held[group * 2 * mask + mask]]), k)
        for rank in range(P):
            held[rank], (indices, values) = merged[rank // (2 * mask)]
            member = slice(
                len(indices) * (rank % (2 * mask)) // (2 * mask), len(indices) * (rank % (2 * mask) + 1) // (2 * mask)
            )
            drops[rank].append((indices[member], values[member]))
        mask *= 2
    return held[0], drops


def rounded(values: Vector, bits: int) -> Vector:
    """Return values as a format of so many bits has them."""
    if bits == 32 or not len(values):
        return values
    if bits == 16:
        nearest: Vector = (values.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
        return nearest
    blocks = np.concatenate([values, np.zeros(-len(values) % 64, np.float32)]).reshape(-1, 64)
    scale = np.exp2(np.ceil(np.log2(np.abs(blocks).max(1, keepdims=True) + 1e-38))) / 2 ** (bits - 1)
    limit = 2 ** (bits - 1) - 1
    found: Vector = (np.clip(np.rint(blocks / scale), -limit, limit) * scale).astype(np.float32).ravel()[: len(values)]
    return found


# -- what ranks keep --------------------------------------------------------------------------------------------------


class Ranks:
    """What all ranks keep from step to step: rows of residuals and velocities."""

    def __init__(self, variant: Variant, sizes: Sequence[int]) -> None:
        self.variant, n = variant, sum(sizes)
        self.boundaries = [0, *itertools.accumulate(sizes)] if variant.scope == "tensor" else [0, n]
        self.residual = np.zeros((variant.ranks, n), np.float32)
        self.velocity = np.zeros((variant.ranks, n), np.float32)
        self.applied = np.zeros(n, np.float32)  # EF21's estimate, or the optimizer's velocity
        self.last: Vector | None = None
        self.sent = 0  # entries that a rank has selected
        self.held = 0  # entries that results have held

    def step(self, gradients: Vector, density: float) -> Vector:
        """Return what is to be subtracted from the weights, times the rate: the mean over the ranks."""
        v, P = self.variant, len(gradients)
        if v.ef21:
            self.velocity *= 1 - v.ef21
            self.velocity += v.ef21 * gradients
            accumulated = self.velocity - self.residual  # here the residual is what has been sent so far
        else:
            if v.place == "before" and v.momentum:
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
        if v.place == "after":
            self.applied *= v.momentum
            self.applied += total
            return self.applied
        return total

    def _exchange(self, accumulated: Vector, total: Vector, density: float, where: slice) -> None:
        """Exchange a part of all tensors; what is applied leaves ``accumulated``."""
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
        self.held += len(indices) * P
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
                held = inside[i]
                self.residual[rank, where][i[held]] += sent[held]
        elif v.keep == "owner":
            for rank, (i, sent) in enumerate(mine):
                held = inside[i]
                accumulated[rank][i[held]] = taken[rank][held] - sent[held]
                for j, lost in drops[rank]:
                    held = inside[j]
                    accumulated[rank][j[held]] += lost[held]
        else:
            for rank, (i, sent) in enumerate(mine):
                accumulated[rank][i] = taken[rank] - sent
                for j, lost in drops[rank]:
                    accumulated[rank][j] += lost
        if v.place == "before" and not v.ef21:
            for rank, (i, _) in enumerate(mine):
                if v.mask in ("selected", "both"):
                    self.velocity[rank, where][i] = 0
                if v.mask in ("applied", "both"):
                    self.velocity[rank, where][indices] = 0
        total[indices] = rounded(values, v.bits) if v.method != "topk" else values

    def _select(self, accumulated: Vector, k: int, where: slice) -> Entries:
        v = self.variant
        if v.threshold:
            found = np.flatnonzero(np.abs(accumulated) >= v.threshold).astype(np.int32)
            return found, accumulated[found]
        if v.regular and self.last is not None:
            last = self.last[where]
            with np.errstate(divide="ignore", invalid="ignore"):
                distortion = np.where(last != 0, last * v.ranks / accumulated - 1, 0)
                score = np.where(last != 0, accumulated * np.tanh(np.abs(1 + distortion) / v.regular), accumulated)
            found = sc.topk(np.nan_to_num(score).astype(np.float32), k).indices
            return found, accumulated[found]
        entries = sc.topk(accumulated, k)
        return entries.indices, entries.values


# -- training ---------------------------------------------------------------------------------------------------------


def train(variant: Variant) -> dict[str, Any]:
    """Return the outcome of a training."""
    v, task = variant, TASKS[variant.model]
    steps = v.steps or task.steps
    training, held_out = task.data()
    torch.manual_seed(v.seed)
    model = task.build()
    batches = torch.Generator().manual_seed(v.seed)
    parameters = list(model.parameters())
    ranks = Ranks(v, [p.numel() for p in parameters])
    gradients = np.zeros_like(ranks.residual)
    schedule = sc.Warmup(v.density, round(v.warmup * steps), v.start, v.stages) if v.method != "dense" else None
    some = type(held_out)(held_out.inputs[: task.some], held_out.targets[: task.some])
    curve = []
    velocity = np.zeros(gradients.shape[1], np.float32)
    for step in range(steps):
        batch = torch.randint(len(training), (task.batch,), generator=batches)
        for rank in range(v.ranks if v.method != "dense" else 1):
            shard = batch[rank :: v.ranks] if v.method != "dense" else batch
            model.zero_grad()
            scores = model(training.inputs[shard]).flatten(0, -2)
            functional.cross_entropy(scores, training.targets[shard].flatten()).backward()  # type: ignore[no-untyped-call]
            g = gradients[rank]
            np.concatenate([p.grad.numpy().ravel() for p in parameters if p.grad is not None], out=g)
            if task.clip is not None and v.clip:
                norm, limit = float(np.linalg.norm(g)), v.clip * task.clip * (math.sqrt(v.ranks) if schedule else 1)
                if norm > limit:
                    g *= limit / norm
        if schedule is None:
            velocity = v.momentum * velocity + gradients[0]
            update = velocity
        else:
            update = ranks.step(gradients, schedule(step))
        if not np.isfinite(update).all():
            break
        rate = v.rate * task.rate_at(step, steps)
        with torch.no_grad():
            begin = 0
            for p in parameters:
                p.sub_(torch.from_numpy(update[begin : begin + p.numel()].reshape(p.shape)), alpha=rate)
                begin += p.numel()
        if (step + 1) % max(8, steps // 20) == 0:
            curve.append(round(evaluate(model, some)[0], 4))
    loss, accuracy = evaluate(model, held_out)
    n = gradients.shape[1]
    return {
        "score": accuracy if task.score == "accuracy" else loss,
        "loss": loss,
        "accuracy": accuracy,
        "sent": ranks.sent / v.ranks / n / steps,
        "held": ranks.held / v.ranks / n / steps,
        "curve": curve,
    }


# -- the command line -------------------------------------------------------------------------------------------------


GRID = Grid(Variant, "variant")


def table(done: dict[Variant, dict[str, Any]]) -> Table:
    """Return a row for each variant: the mean of its seeds."""
    made = Table(title="Rules of error feedback", box=None)
    for column in ("model", "P", "method", "density", "rules", "score", "seeds", "selected", "in results"):
        made.add_column(column)
    ordered = sorted(GRID.by_seed(done).items(), key=lambda item: (item[0].model, item[0].ranks, item[0].method))
    for v, outcomes in ordered:
        rules = GRID.unusual(v, "model", "ranks", "method", "density", "seed")
        made.add_row(
            v.model,
            str(v.ranks),
            v.method,
            number_text(v.density),
            " ".join(f"{name}={value}" for name, value in rules.items()),
            mean_and_range([o["score"] for o in outcomes]),
            str(len(outcomes)),
            *(percent_text(np.mean([o[key] for o in outcomes])) for key in ("sent", "held")),
        )
    return made


def _said(outcome: dict[str, Any]) -> str:
    return f"{outcome['score']:.4f} sent {percent_text(outcome['sent'])} held {percent_text(outcome['held'])}"


def main() -> None:
    GRID.run("Compare rules of error feedback.", train, _said, table, "ablation.jsonl")


if __name__ == "__main__":
    main()
