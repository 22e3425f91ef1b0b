"""Trainings by local steps on simulated ranks, and the same in plain NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import sparsecomm as sc
from tests import reference

SHAPES = {"a": (20, 30), "b": (7,), "c": (64,), "d": (0, 3), "e": (), "f": (9, 9)}
DTYPES = dict.fromkeys(SHAPES, "float32") | {"c": "float16", "f": "float64"}
PLAIN: dict[str, Any] = {"scope": "tensor", "algorithm": "allgather", "op": "mean", "wire": "plain"}
PLAIN |= {"decay": 0.95, "dense_below": 0}

Arrays = dict[str, np.ndarray]
Frozen = Callable[[int, int], set[str]]  # of a rank and a step


def initial() -> Arrays:
    """The parameters of all ranks."""
    random = np.random.default_rng(0)
    return {name: np.asarray(random.normal(size=shape), DTYPES[name]) for name, shape in SHAPES.items()}


def nothing_frozen(rank: int, step: int) -> set[str]:
    return set()


def some_frozen(rank: int, step: int) -> set[str]:
    """The names that a rank does not train in a step: on rank 1 some always; on all ranks others for some rounds."""
    return ({"b"} if rank == 1 else set()) | ({"a", "c"} if 5 <= step < 14 else set()) | ({"f"} if step > 9 else set())


def move(parameters: Arrays, rank: int, step: int, frozen: Frozen = nothing_frozen) -> None:
    """Take a local step, in place: towards a minimum of this rank, with noise."""
    random = np.random.default_rng((rank, step))
    for name, values in parameters.items():
        noise = np.asarray(random.normal(size=values.shape), values.dtype)
        if name in frozen(rank, step):
            continue
        values -= ((values - values.dtype.type(rank)) / 8 + noise / 16).astype(values.dtype)


class Oracle:
    """All ranks of a training, in plain NumPy: sums of what each rank selects, as `allgather` makes them."""

    def __init__(
        self,
        P: int,
        fragments: Sequence[Sequence[str]],
        sync_every: int,
        delay: int = 0,
        alpha: float = 0.0,
        density: float = 0.1,
        decay: float = 0.95,
        sgd: tuple[float, float, bool] | None = None,
        frozen: Frozen = nothing_frozen,
    ) -> None:
        self.P, self.fragments, self.sync_every, self.delay, self.alpha = P, fragments, sync_every, delay, alpha
        self.density, self.decay, self.sgd, self.frozen = density, decay, sgd, frozen
        self.trained: list[set[str]] = [set() for _ in range(P)]  # names, since their last exchange was applied
        self.local = [initial() for _ in range(P)]
        self.globals = {name: reference.widened(values) for name, values in initial().items()}
        self.residuals = [{n: np.zeros_like(v) for n, v in self.globals.items()} for _ in range(P)]
        self.velocities: Arrays = {}
        self.means: dict[int, Arrays] = {}

    def train(self, steps: int, rounds: Sequence[Sequence[int]] = ()) -> None:
        """Train for steps of the schedule. In each round, a rank takes so many local steps; by default ``sync_every``.

        Before what is due after step t of the schedule, each rank has taken its part of them, rounded up.
        """
        H, F = self.sync_every, len(self.fragments)
        ends = [(r * H + (i + 1) * H // F, i) for r in range(steps // H + 2) for i in range(F)]
        taken = [0] * self.P
        for t in range(1, steps + 1):
            r, passed = divmod(t - 1, H)
            for rank in range(self.P):
                before = sum(each[rank] for each in rounds[:r]) if rounds else r * H
                n = rounds[r][rank] if rounds else H
                while taken[rank] - before < -(-(passed + 1) * n // H):
                    taken[rank] += 1
                    self.move(rank, taken[rank])
            for end, i in ends:
                if max(1, end - self.delay) == t:
                    self.begin(i)
            for end, i in ends:
                if end == t:
                    self.apply(i)

    def move(self, rank: int, step: int) -> None:
        move(self.local[rank], rank, step, self.frozen)
        self.trained[rank] |= {n for n in self.globals if n not in self.frozen(rank, step) and self.globals[n].size}

    def begin(self, fragment: int) -> None:
        """Make the means of what any rank has trained."""
        trained: set[str] = set().union(*self.trained)
        self.means[fragment] = {name: self.mean(name) for name in self.fragments[fragment] if name in trained}

    def mean(self, name: str) -> np.ndarray:
        summed = []
        size = self.globals[name].size
        for rank in range(self.P):
            kept = self.residuals[rank]
            if name not in self.trained[rank]:
                summed.append(np.zeros_like(kept[name]))
                continue
            kept[name] = kept[name] * kept[name].dtype.type(self.decay) + self.moved(name, rank)
            indices = np.arange(size)
            if size >= PLAIN["dense_below"] and self.density < 1:
                indices, _ = reference.topk(kept[name], max(1, round(self.density * size)))
            sent = np.zeros_like(kept[name])
            sent[indices], kept[name][indices] = kept[name][indices], 0
            summed.append(sent)
        while len(summed) > 1:
            summed = [sum(summed[i : i + 2][1:], summed[i]) for i in range(0, len(summed), 2)]
        return summed[0] / summed[0].dtype.type(self.P)

    def moved(self, name: str, rank: int) -> np.ndarray:
        return self.globals[name] - reference.widened(self.local[rank][name])

    def apply(self, fragment: int) -> None:
        for name, mean in self.means.pop(fragment).items():
            held = self.globals[name]
            if self.sgd:
                rate, momentum, nesterov = self.sgd
                velocity = self.velocities[name] = (
                    momentum * self.velocities[name] + mean if name in self.velocities else mean
                )
                held -= rate * (mean + momentum * velocity if nesterov else velocity)
            else:
                held -= mean
            for local, trained in zip(self.local, self.trained, strict=True):
                trained.discard(name)
                mixed = self.alpha * reference.widened(local[name]) + (1 - self.alpha) * held if self.alpha else held
                local[name][...] = mixed.reshape(local[name].shape).astype(local[name].dtype)


def made(transport: Any, parameters: Mapping[str, Any], density: Any = 0.1, **options: Any) -> sc.LocalSteps:
    return sc.LocalSteps(parameters, density, comm=transport, **(PLAIN | options))


def train(
    local: sc.LocalSteps, parameters: Arrays, rank: int, first: int, last: int, frozen: Frozen = nothing_frozen
) -> list[tuple[str, ...]]:
    """Take the local steps ``first`` to ``last``; return the names that each of them replaced."""
    replaced = []
    for step in range(first, last + 1):
        move(parameters, rank, step, frozen)
        replaced.append(local.step(parameters))
    return replaced


def left_out(local: Any) -> None:
    """Do what the thread does when a deadline is over."""
    local = getattr(local, "_core", local)
    for exchange in local._exchanges.values():
        exchange.wait()
        local._update_pace(exchange)
    local.leave_out()


def comes_late(rank: int, rendezvous: Callable[[], object], **options: Any) -> tuple[sc.LocalSteps, dict[str, Any]]:
    """Train on real ranks, where a local step of rank 0 ends when all others are some rounds further.

    Args:
        rank: this one.
        rendezvous: rank 0 calls it, to wait until all others have called it, which they do without waiting.
        options: of `LocalSteps`.

    Returns:
        What has trained, and has finished; and all that can be lost or counted twice.
    """
    random, x, moved = np.random.default_rng(rank), {"x": np.zeros(50)}, np.zeros(50)
    local = sc.LocalSteps(x, 0.2, sync_every=4, deadline=1.5, **(PLAIN | {"decay": 1.0} | options))
    seen, divisions, step = set[int](), set[tuple[int, ...]](), 0
    while local.round < 8:
        step += 1
        time.sleep(0.01 if rank == 0 else 0.05)
        if rank == 0 and step == 10:
            rendezvous()
        change = random.integers(-8, 8, 50)
        x["x"] += change
        moved += change
        before = local.round
        local.step(x)
        if rank > 0 and before < 5 <= local.round:
            rendezvous()
        seen.update(local.left_out)
        divisions.add(local.steps)
    local.finish(x)
    held = local.global_parameters()["x"].copy()
    waits = x["x"] - held - local.reducers[0].residual("x")
    return local, {"held": held, "waits": waits, "moved": moved, "seen": seen, "divisions": divisions}


def nothing_is_lost(outcomes: Sequence[Mapping[str, Any]]) -> None:
    """Check what the ranks of `comes_late` hold, who exchanged without a delay: whole numbers."""
    whole = len(outcomes) * outcomes[0]["held"] + sum(each["waits"] for each in outcomes)
    np.testing.assert_allclose(whole, sum(each["moved"] for each in outcomes), atol=1e-9)
