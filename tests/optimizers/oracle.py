"""The rule of `SparseAdamW` in plain NumPy, and views of states."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import sparsecomm as sc
from tests import data, reference
from tests.optimizers import adapters
from tests.optimizers.adapters import MIN_OWNED, members_of, part_of

SHAPES = {"matrix": (30, 11), "bias": (11,), "number": (), "nothing": (0, 3)}
Arrays = dict[str, np.ndarray]
gradients = partial(adapters.gradients, shapes=SHAPES)
weights = partial(adapters.weights, SHAPES)


class Oracle:
    """The rule of `sparsecomm.optimizers.adamw` for all ranks, in flat float64 vectors with exact values.

    A member is a group of ranks that count as one. The k-th rank of every member exchanges the k-th slice.
    """

    def __init__(self, layout: str, **rule: Any) -> None:
        self.P, self.rule, self.members = len(layout), rule, members_of(layout)
        order = list(reversed(SHAPES))  # of the tensors in the only bucket
        self.names = [name for name in order if np.prod(SHAPES[name])]
        self.sizes = [int(np.prod(SHAPES[name])) for name in self.names]
        self.n = n = sum(self.sizes)
        self.slices = len(self.members[0])
        self.length = -(-n // self.slices)
        self.owners = min(len(self.members), max(1, self.length // MIN_OWNED))
        self.w = self.flat({name: w.astype(float) for name, w in weights().items()})
        self.m, self.v, self.last, self.t = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
        self.unit, self.lag = np.zeros(n), False  # base-2 logarithm of the unit
        self.residuals = np.zeros((len(self.members), n))  # unscaled
        decay = rule["weight_decay"]
        of_name = {name: decay.get(name, 0) if isinstance(decay, dict) else decay for name in SHAPES}
        self.decay = self.flat({name: np.full(shape, of_name[name]) for name, shape in SHAPES.items()})

    def flat(self, arrays: Arrays) -> np.ndarray:
        values = [arrays.get(name) for name in self.names]
        parts = [np.full(n, np.nan) if x is None else np.ravel(x) for n, x in zip(self.sizes, values, strict=True)]
        return np.concatenate(parts).astype(float)

    def step(self, everyones: list[Arrays], lr: float, density: float) -> None:
        rows = np.stack([self.flat(g) for g in everyones])
        there = ~np.isnan(rows)
        rows = np.where(there, rows, 0)
        if not self.t.any():
            means = [np.square(part).sum() / self.P for part in np.split(rows, np.cumsum(self.sizes)[:-1], axis=1)]
            overall = sum(means) / self.n
            means = [total / size or overall for total, size in zip(means, self.sizes, strict=True)]
            self.unit = self.target(0.2 * (1 - self.rule["betas"][1]) * np.repeat(means, self.sizes))
        rows, there = (np.stack([array[ranks].sum(0) for ranks in self.members]) for array in (rows, there))
        there = there > 0
        self.t += there.any(0)
        kept_back, waiting = np.where(there, 0, self.residuals), np.where(there, self.residuals, 0) + rows
        if density == 1:
            self.update(np.flatnonzero(there.any(0)), waiting.sum(0) / self.P, lr)
            waiting[:], self.lag = 0, True
        else:
            if self.lag:
                self.unit, self.lag = np.where(self.v > 0, self.target(self.v), self.unit), False
            mean, k = np.zeros(self.n), max(1, round(density * self.length))
            for begin in range(0, self.n, self.length):
                own = slice(begin, begin + self.length)
                mean[own] = self.exchange(waiting[:, own], 2.0 ** self.unit[own], k)
            self.update(np.flatnonzero(mean), mean, lr)
            excess = np.log2(np.sqrt(self.v) + self.rule["eps"]) - self.unit
            up, down = (np.floor(excess + np.log2(factor)) for factor in (0.75, 1.5))
            jumps = np.where(up > 0, up, np.minimum(down, 0))
            self.unit += np.where(mean != 0, np.clip(jumps, -4, 4), 0)
        self.residuals = waiting + kept_back

    def target(self, squares: np.ndarray) -> np.ndarray:
        return np.floor(np.log2(np.sqrt(squares) + self.rule["eps"]))

    def exchange(self, waiting: np.ndarray, unit: np.ndarray, k: int) -> np.ndarray:
        """Remove the largest entries from ``waiting``, a slice's residuals plus gradients, and return their means."""
        owners, mean, k = self.owners, np.zeros(len(unit)), max(k, self.owners)
        for owner in range(owners):
            own = slice(self.length * owner // owners, self.length * (owner + 1) // owners)
            count = k * (owner + 1) // owners - k * owner // owners
            sums = waiting[owner, own].copy()
            for member in range(len(waiting)):
                if member != owner:
                    indices, _ = reference.topk(waiting[member, own] / unit[own], count)
                    sums[indices] += waiting[member, own][indices]
                    waiting[member, own][indices] = 0
            indices, _ = reference.topk(sums / unit[own], count)
            mean[own][indices] = sums[indices] / self.P
            sums[indices] = 0
            waiting[owner, own] = sums
        return mean

    def update(self, i: np.ndarray, mean: np.ndarray, lr: float) -> None:
        a, t = self.t[i] - self.last[i], self.t[i]
        values = self.w[i], self.m[i], self.v[i]
        self.w[i], self.m[i], self.v[i] = adamw(*values, mean[i] / a, a, t, lr, self.decay[i], **self.rule)
        self.last[i] = t


def adamw(w: Any, m: Any, v: Any, g: Any, a: Any, t: Any, lr: Any, decay: Any, betas: Any, eps: Any, **_: Any) -> Any:
    """Return weights, means and squares after ``a`` steps with mean gradient ``g``, the last being step ``t``."""
    b1, b2 = betas
    m = b1**a * m + (1 - b1**a) * g
    v = b2**a * v + (1 - b2**a) * a * g * g
    step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return (1 - lr * decay) ** a * w - a * lr * step, m, v


def moments_and_units(states: list[Any]) -> tuple[dict[str, Any], Arrays]:
    """Return moments and units from the states of all ranks, as flat arrays."""
    one = sc.reshard(states, 0, 1)
    moments = {
        name: {key: value if value is None or key == "step" else np.ravel(value) for key, value in moment.items()}
        for name, moment in one["moments"].items()
    }
    bias = {np.dtype(np.uint8): 127, np.dtype(np.uint16): 1023}
    units = {name: np.ldexp(1.0, e.ravel().astype(int) - bias[e.dtype]) for name, e in one["units"].items()}
    return moments, units


def waiting(states: list[Any]) -> Arrays:
    """Return the sums of all ranks' residuals and unsummed gradients, unscaled, as flat float64 arrays."""
    sums = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    for state in states:
        for name, residual in state["residuals"].items():
            sums[name][slice(*part_of(state, name))] += residual.ravel() * np.exp2(exponents_of(state, name))
            sums[name] += sum((array.ravel() for array in state["unsummed"].get(name, [])), 0.0)
    return sums


def units_of(state: Any, name: str) -> np.ndarray:
    """Return the exponents of a rank's units as a flat array, empty if there are no units yet."""
    own = state["units"][name] if state["slices"] is None else state["slices"][name]["units"]
    return np.zeros(0, np.uint8) if own is None else np.ravel(own)


def exponents_of(state: Any, name: str) -> Any:
    units = units_of(state, name)
    return units.astype(float) - (127 if units.dtype == np.uint8 else 1023) if units.any() else 0.0


def check_equal(results: list[Any]) -> None:
    """Check that all ranks have the same weights and units, and that each element has one owner."""
    first, state = results[0][0], sc.reshard([state for _, state in results], 0, 1)
    for mine, own in results:
        assert all(data.same_bits(mine[name], first[name]) for name in first)
        for name, units in state["units"].items():
            if units.size:
                assert data.same_bits(units_of(own, name), units.ravel()[slice(*part_of(own, name))])
    for name, w in first.items():
        bounds = [own["moments"][name]["part"] for _, own in results]
        parts = sorted((begin, end) for begin, end in bounds if begin < end)
        assert [0, *(end for _, end in parts)] == [*(begin for begin, _ in parts), w.size], name
        for _, own in results:
            moments = own["moments"][name]
            lengths = {len(moments[key]) for key in ("mean", "squares", "last")}
            assert lengths == {moments["part"][1] - moments["part"][0]}


def check_same(state: Any, other: Any) -> None:
    for name, residual in other["residuals"].items():
        assert data.same_bits(state["residuals"][name], residual)
        assert part_of(state, name) == part_of(other, name)
        assert not other["moments"] or data.same_bits(units_of(state, name), units_of(other, name))
    assert state["unsummed"].keys() == other["unsummed"].keys()
    for name, arrays in other["unsummed"].items():
        assert all(data.same_bits(*pair) for pair in zip(state["unsummed"][name], arrays, strict=True))
    for name, moment in other["moments"].items():
        assert all(data.same_bits(np.asarray(state["moments"][name][key]), np.asarray(x)) for key, x in moment.items())
