"""Training with local steps on simulated ranks, and the same training in plain NumPy."""

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
Frozen = Callable[[int, int], set[str]]  # (rank, step) -> names


def initial() -> Arrays:
    """Return the initial parameters, the same on all ranks."""
    random = np.random.default_rng(0)
    return {name: np.asarray(random.normal(size=shape), DTYPES[name]) for name, shape in SHAPES.items()}


def nothing_frozen(rank: int, step: int) -> set[str]:
    return set()


def some_frozen(rank: int, step: int) -> set[str]:
    """Return the names that a rank does not train in a step: one on rank 1, others on all ranks for some steps."""
    return ({"b"} if rank == 1 else set()) | ({"a", "c"} if 5 <= step < 14 else set()) | ({"f"} if step > 9 else set())


def move(parameters: Arrays, rank: int, step: int, frozen: Frozen = nothing_frozen) -> None:
    """Take a local step in place: towards this rank's own minimum, with noise."""
    random = np.random.default_rng((rank, step))
    for name, values in parameters.items():
        noise = np.asarray(random.normal(size=values.shape), values.dtype)
        if name in frozen(rank, step):
            continue
        values -= ((values - values.dtype.type(rank)) / 8 + noise / 16).astype(values.dtype)


class Oracle:
    """All ranks of a training, in plain NumPy. It sums the entries that the ranks select, as `allgather` does."""

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
        self.trained: list[set[str]] = [set() for _ in range(P)]  # names, since their last exchange
        self.local = [initial() for _ in range(P)]
        self.globals = {name: reference.widened(values) for name, values in initial().items()}
        self.residuals = [{n: np.zeros_like(v) for n, v in self.globals.items()} for _ in range(P)]
        self.velocities: Arrays = {}
        self.means: dict[int, Arrays] = {}

    def train(self, steps: int, rounds: Sequence[Sequence[int]] = ()) -> None:
        """Train for ``steps`` of the schedule. ``rounds``: each rank's local steps per round (``sync_every``).

        By step t of the schedule, each rank has taken its share of the round's local steps, rounded up.
        """
        H, F = self.sync_every, len(self.fragments)
        ends = [(r * H + (i + 1) * H // F, i) for r in range(steps // H + 2) for i in range(F)]
        taken = [0] * self.P
        for t in range(1, steps + 1):
            r, passed = divmod(t - 1, H)
            for rank in range(self.P):
                before = sum(counts[rank] for counts in rounds[:r]) if rounds else r * H
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
        """Average the parameters that any rank has trained."""
        trained: set[str] = set().union(*self.trained)
        self.means[fragment] = {name: self.mean(name) for name in self.fragments[fragment] if name in trained}

    def mean(self, name: str) -> np.ndarray:
        summed = []
        size = self.globals[name].size
        for rank in range(self.P):
            residuals = self.residuals[rank]
            if name not in self.trained[rank]:
                summed.append(np.zeros_like(residuals[name]))
                continue
            residuals[name] = residuals[name] * residuals[name].dtype.type(self.decay) + self.moved(name, rank)
            indices = np.arange(size)
            if size >= PLAIN["dense_below"] and self.density < 1:
                indices, _ = reference.topk(residuals[name], max(1, round(self.density * size)))
            sent = np.zeros_like(residuals[name])
            sent[indices], residuals[name][indices] = residuals[name][indices], 0
            summed.append(sent)
        while len(summed) > 1:
            summed = [sum(summed[i : i + 2][1:], summed[i]) for i in range(0, len(summed), 2)]
        return summed[0] / summed[0].dtype.type(self.P)

    def moved(self, name: str, rank: int) -> np.ndarray:
        return self.globals[name] - reference.widened(self.local[rank][name])

    def apply(self, fragment: int) -> None:
        for name, mean in self.means.pop(fragment).items():
            x = self.globals[name]
            if self.sgd:
                rate, momentum, nesterov = self.sgd
                velocity = self.velocities[name] = (
                    momentum * self.velocities[name] + mean if name in self.velocities else mean
                )
                x -= rate * (mean + momentum * velocity if nesterov else velocity)
            else:
                x -= mean
            for local, trained in zip(self.local, self.trained, strict=True):
                trained.discard(name)
                mixed = self.alpha * reference.widened(local[name]) + (1 - self.alpha) * x if self.alpha else x
                local[name][...] = mixed.reshape(local[name].shape).astype(local[name].dtype)


def made(transport: Any, parameters: Mapping[str, Any], density: Any = 0.1, **options: Any) -> sc.LocalSteps:
    return sc.LocalSteps(parameters, density, comm=transport, **(PLAIN | options))


def train(
    local: sc.LocalSteps, parameters: Arrays, rank: int, first: int, last: int, frozen: Frozen = nothing_frozen
) -> list[tuple[str, ...]]:
    """Take the local steps ``first`` to ``last``; return the names that each step replaced."""
    replaced = []
    for step in range(first, last + 1):
        move(parameters, rank, step, frozen)
        replaced.append(local.step(parameters))
    return replaced


def left_out(local: Any) -> None:
    """Act as the deadline thread does when the deadline has passed."""
    local = getattr(local, "_core", local)
    for exchange in local._exchanges.values():
        exchange.wait()
        local._update_pace(exchange)
    local.leave_out()


def comes_late(rank: int, rendezvous: Callable[[], object], **options: Any) -> tuple[sc.LocalSteps, dict[str, Any]]:
    """Train on real ranks. One local step of rank 0 takes until all other ranks are some rounds ahead.

    Args:
        rank: this rank.
        rendezvous: rank 0 calls it to wait for the other ranks, which call it without waiting.
        options: of `LocalSteps`.

    Returns:
        The finished `LocalSteps`, and the values that `nothing_is_lost` adds up.
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
    globals_ = local.global_parameters()["x"].copy()
    waits = x["x"] - globals_ - local.reducers[0].residual("x")
    return local, {"held": globals_, "waits": waits, "moved": moved, "seen": seen, "divisions": divisions}


def nothing_is_lost(outcomes: Sequence[Mapping[str, Any]]) -> None:
    """Check the outcomes of `comes_late` without a delay. All values are integers, so sums are exact."""
    total = len(outcomes) * outcomes[0]["held"] + sum(outcome["waits"] for outcome in outcomes)
    np.testing.assert_allclose(total, sum(outcome["moved"] for outcome in outcomes), atol=1e-9)
