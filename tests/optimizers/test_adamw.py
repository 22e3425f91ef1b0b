"""`sparsecomm.SparseAdamW` on simulated ranks, against the rule in plain NumPy, and what it promises."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import CpuBackend
from sparsecomm.transport import simulated
from tests import data, reference
from tests.optimizers import adapters
from tests.ranks import run

SHAPES = {"matrix": (30, 11), "bias": (11,), "number": (), "nothing": (0, 3)}
Arrays = dict[str, np.ndarray]
gradients = partial(adapters.gradients, shapes=SHAPES)
weights = partial(adapters.weights, SHAPES)

every_size = pytest.mark.parametrize("P", [1, 2, 5])


class Oracle:
    """All ranks' steps in flat vectors of float64: the rule of `sparsecomm.optimizers.adamw`, with exact values."""

    def __init__(self, P: int, density: float, **rule: Any) -> None:
        self.P, self.density, self.rule = P, density, rule
        order = list(reversed(SHAPES))  # in which tensors lie in the only bucket
        self.names = [name for name in order if np.prod(SHAPES[name])]
        self.sizes = [int(np.prod(SHAPES[name])) for name in self.names]
        n = sum(self.sizes)
        self.w = self.flat({name: w.astype(float) for name, w in weights().items()})
        self.m, self.v, self.last, self.t = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
        self.start: np.ndarray | None = None
        self.residuals = np.zeros((P, n))
        decay = rule["weight_decay"]
        self.decay = self.flat(
            {
                name: np.full(shape, decay.get(name, 0) if isinstance(decay, dict) else decay)
                for name, shape in SHAPES.items()
            }
        )

    def flat(self, arrays: Arrays) -> np.ndarray:
        given = [arrays.get(name) for name in self.names]
        parts = [np.full(n, np.nan) if x is None else np.ravel(x) for n, x in zip(self.sizes, given, strict=True)]
        return np.concatenate(parts).astype(float)

    def step(self, everyones: list[Arrays], lr: float) -> None:
        (b1, b2), eps, rows = self.rule["betas"], self.rule["eps"], np.stack([self.flat(g) for g in everyones])
        n, P, there = self.w.size, self.P, ~np.isnan(rows)
        rows = np.where(there, rows, 0)
        if self.start is None:
            means = [np.square(part).sum() / P for part in np.split(rows, np.cumsum(self.sizes)[:-1], axis=1)]
            overall = sum(means) / n
            means = [total / size or overall for total, size in zip(means, self.sizes, strict=True)]
            self.start = 0.2 * (1 - b2) * np.repeat(means, self.sizes)
        self.t += there.any(0)
        root = np.sqrt(np.where(self.last == 0, self.start, self.v)) + eps
        unit = 2.0 ** np.floor(np.log2(root))  # in which entries are selected
        kept_back, waiting = np.where(there, 0, self.residuals), np.where(there, self.residuals, 0) + rows
        k = max(1, round(self.density * n))
        owners, mean = min(P, max(1, k // 16)), np.zeros(n)
        for owner in range(owners):
            own = slice(n * owner // owners, n * (owner + 1) // owners)
            count = k * (owner + 1) // owners - k * owner // owners
            sums = waiting[owner, own].copy()
            for rank in range(P):
                if rank != owner:
                    indices, _ = reference.topk(waiting[rank, own] / unit[own], count)
                    sums[indices] += waiting[rank, own][indices]
                    waiting[rank, own][indices] = 0
            indices, _ = reference.topk(sums / unit[own], count)
            mean[own][indices] = sums[indices] / P
            sums[indices] = 0
            waiting[owner, own] = sums
        self.residuals = waiting + kept_back
        i = np.flatnonzero(mean)
        a, t = self.t[i] - self.last[i], self.t[i]
        g = mean[i] / a
        self.m[i] = b1**a * self.m[i] + (1 - b1**a) * g
        self.v[i] = b2**a * self.v[i] + (1 - b2**a) * a * g * g
        step = (self.m[i] / (1 - b1**t)) / (np.sqrt(self.v[i] / (1 - b2**t)) + eps)
        self.w[i] = (1 - lr * self.decay[i]) ** a * self.w[i] - a * lr * step
        self.last[i] = t


@every_size
@pytest.mark.parametrize("weight_decay", [0.1, {"matrix": 0.3}], ids=["of all", "by name"])
@pytest.mark.parametrize("density", [0.04, 0.3])
@pytest.mark.parametrize("lacking", [False, True])
def test_weights_are_the_oracles(P: int, density: float, weight_decay: Any, lacking: bool) -> None:
    rule = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    oracle, steps = Oracle(P, density, **rule), 12

    pushed = partial(adapters.given, P=P, shapes=SHAPES) if lacking else gradients
    for step in range(steps):
        oracle.step([pushed(step, rank) for rank in range(P)], 0.01 * (step + 1))

    def program(transport: simulated.SimulatedTransport) -> Arrays:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, density=density, wire="packed", comm=transport, **rule)
        for step in range(steps):
            optimizer.lr, before = 0.01 * (step + 1), mine["matrix"].copy()
            done = optimizer.step(pushed(step, transport.rank))
            assert done.usable
            assert done.number == step
            if lacking and 4 <= step < 6:
                assert "matrix" in done.without_gradient
                assert data.same_bits(mine["matrix"], before)
        return mine

    results = run(P, program)
    for mine in results:
        np.testing.assert_allclose(oracle.flat(mine), oracle.w, rtol=2e-4, atol=2e-5)
        assert all(data.same_bits(mine[name], results[0][name]) for name in mine)


@every_size
@pytest.mark.parametrize("wire", ["packed_int2", "packed"])
def test_nothing_is_lost(P: int, wire: str) -> None:
    """Every gradient is in the means that were applied, or waits in residuals, times the root of second moments."""
    steps, rule = 20, {"betas": (0.0, 0.9), "weight_decay": 0.0}

    def program(transport: simulated.SimulatedTransport) -> tuple[Arrays, Arrays]:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 1e-3, density=0.1, wire=wire, comm=transport, **rule)
        left = {name: np.zeros(w.shape) for name, w in mine.items()}
        applied = copy.deepcopy(left)
        for step in range(steps):
            g = gradients(step, transport.rank)
            before = optimizer.state_dict()["moments"]
            optimizer.step(g)
            after = optimizer.state_dict()["moments"]
            for name, its in after.items():
                left[name] += g[name]
                waited = step + 1 - before[name]["last"] if before else 1
                moved = its["last"] == step + 1  # m is the mean gradient, as it keeps nothing
                applied[name] += np.where(moved, its["mean"] * waited, 0)
        waits = optimizer.state_dict()["residuals"]
        for name, its in after.items():
            left[name] -= waits[name] * 2.0 ** np.floor(np.log2(np.sqrt(its["squares"]) + np.float32(1e-8)))
        return applied, left

    results = run(P, program)
    for name, applied in results[0][0].items():
        left = sum(left[name] for _, left in results)
        np.testing.assert_allclose(applied * P, left, rtol=1e-3, atol=1e-3 * (1 + np.abs(left).max(initial=0)))


@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("what", ["second moment", "weight", "float16 weight", "eps", "beta2", "sum", "residual"])
def test_a_step_that_would_overflow_is_no_step(what: str, density: float) -> None:
    """Gradients are finite on all ranks, and so is all that they make; the next step counts again.

    The program may have changed weights and eps itself, and with a beta2 of 0 no bound of the moments is known.
    """
    of_weight = what in ("weight", "float16 weight", "eps", "beta2")
    dtype = np.float16 if of_weight and what != "weight" else np.float32
    big = {"second moment": 1.5e19, "sum": 1e19}.get(what, 1.0)

    def program(transport: simulated.SimulatedTransport) -> Arrays:
        mine, i = {"a": np.ones(64, dtype), "b": np.ones(5, dtype)}, 7
        lr = {"weight": 3e37, "eps": 600.0}.get(what, 2e4 if of_weight else 0.1)
        betas, eps = (0.9, 0.0 if what == "beta2" else 0.95), {"sum": 1e-30, "eps": 1e3}.get(what, 1e-8)
        rule = {"betas": betas, "weight_decay": 0.0, "eps": eps}
        optimizer = sc.SparseAdamW(mine, 0.1, comm=transport, density=density, wire="packed", **rule)
        outcomes = []
        for step in range(5):
            g = {name: np.ones(w.shape, dtype) * (1 + transport.rank) for name, w in mine.items()}
            optimizer.lr = lr if step == 2 else 0.1
            if step == 2 and what in ("second moment", "sum"):
                g["a"][i] = big
            if step == 2 and what == "second moment":
                optimizer.reducer.residual("a")[i] = 1e20  # of several steps: units are about 1
            if step == 2 and what == "residual":
                optimizer.reducer.residual("a")[i] = np.finfo(np.float32).max
                g["a"][i] = 1.8e19
            if step == 2 and of_weight:
                mine["a"][i], g["a"][i], optimizer.eps = -np.finfo(dtype).max, 100, 1e-8
            before, state = copy.deepcopy(mine), copy.deepcopy(optimizer.state_dict()["moments"])
            done = optimizer.step(g)
            outcomes.append(done.usable)
            after = optimizer.state_dict()
            if not done.usable:
                assert all(data.same_bits(mine[name], before[name]) for name in mine)
                for name, its in state.items():
                    assert all(data.same_bits(after["moments"][name][key], its[key]) for key in ("mean", "squares"))
            arrays = [*mine.values(), *after["residuals"].values()]
            arrays += [its[key] for its in after["moments"].values() for key in ("mean", "squares")]
            assert all(np.isfinite(array).all() for array in arrays)
        if what != "sum":  # a sum of two gradients that are allowed need not overflow
            assert outcomes == [True, True, False, True, True]
        return mine

    first, second = run(2, program)
    assert all(data.same_bits(first[name], second[name]) for name in first)


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_sums_are_freed_without_the_garbage_collector(density: float) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        optimizer = sc.SparseAdamW({"w": np.ones(1000, np.float32)}, comm=transport, density=density)
        gradient = np.linspace(-1, 2 + transport.rank, 1000, dtype=np.float32)

        def step() -> weakref.ref[Any]:
            sums = optimizer.step({"w": gradient}).left["w"]
            return weakref.ref(sums.values if density < 1 else sums.dense)

        sums = step()
        step()
        step()
        assert sums() is None

    gc.disable()
    try:
        run(2, program)
    finally:
        gc.enable()


def test_begins_when_there_is_a_gradient() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = weights()
        before = copy.deepcopy(mine)
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport)
        assert not optimizer.step({}).usable
        assert all(data.same_bits(w, before[name]) for name, w in mine.items())
        g = gradients(0, transport.rank)
        assert optimizer.step({"matrix": g["matrix"] if transport.rank else None}).usable  # of one rank, and one tensor
        assert not data.same_bits(mine["matrix"], before["matrix"])
        assert data.same_bits(mine["bias"], before["bias"])
        assert optimizer.step(g).usable

    run(2, program)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types(dtype: str) -> None:
    """Sums and moments are in the accumulator's type."""
    real = data.DTYPES[dtype]

    def program(transport: simulated.SimulatedTransport) -> Arrays:
        mine = {name: w.astype(real) for name, w in weights().items()}
        optimizer = sc.SparseAdamW(mine, 0.01, density=0.3, comm=transport)
        for step in range(10):
            optimizer.step({name: g.astype(real) for name, g in gradients(step, transport.rank).items()})
        squares = optimizer.state_dict()["moments"]["matrix"]["squares"]
        assert squares.dtype == (np.float64 if dtype == "float64" else np.float32)
        return mine

    first, second = run(2, program)
    for name, w in first.items():
        assert w.dtype == real
        assert data.same_bits(w, second[name])
        moved = np.abs(w.astype(float) - weights()[name].astype(real).astype(float))
        assert (moved.max() if moved.size else 0) < 0.3
    assert not data.same_bits(first["matrix"], weights()["matrix"].astype(real))


# -- states, other ranks, and what goes wrong -------------------------------------------------------------------------


def test_a_step_that_stopped_half_way_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: simulated.SimulatedTransport) -> Arrays:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=0.5)
        optimizer.step(gradients(0, transport.rank))
        backend, made = CpuBackend(1), []

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(backend, name)

            def adamw(self, *arguments: Any) -> Any:
                made.append(arguments)
                if len(made) == 2:
                    raise MemoryError
                return backend.adamw(*arguments)

        with monkeypatch.context() as patch:
            if transport.rank == 1:
                adamw = optimizer._adamw
                patch.setattr(adamw, "_backends", dict.fromkeys(adamw._backends, Failing()))
                with pytest.raises(MemoryError):
                    optimizer.step(gradients(1, transport.rank))
                with pytest.raises(sc.InvalidInputError, match=r"call step\(\) again to complete it"):
                    optimizer.state_dict()
            optimizer.step(gradients(1, transport.rank))
        optimizer.step(gradients(2, transport.rank))
        return mine

    for mine in (results := run(2, program)):
        assert all(data.same_bits(mine[name], results[0][name]) for name in mine)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"lr": float("nan")}, "lr=nan: must be a number that is at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\): must be two numbers in \[0, 1\)"),
        ({"eps": 0}, "eps=0: must be a number above 0"),
        ({"weight_decay": {"matrix": -1}}, "weight_decay=-1: must be"),
        ({"weight_decay": {"other": 1}}, "weight_decay: 'other' are no names"),
        ({"lr": 10.0, "weight_decay": 0.1}, "is 1: must be below 1"),
        ({"check_weights_every": -1}, "check_weights_every=-1"),
        ({"weights": {"a": np.frombuffer(b"1234", np.float32)}}, "a: .*read-only"),
        ({"weights": {"a": np.ones(3)}, "wire": "packed_int2"}, "carries values of float32 sums"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], why: str) -> None:
    arguments: dict[str, Any] = {"weights": weights(), **wrong}
    with pytest.raises(sc.InvalidInputError, match=why):
        run(1, lambda transport: sc.SparseAdamW(**arguments, comm=transport))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (5, "got int; expected gradients by name"),
        ({"other": np.ones(3)}, "'other' are no names"),
        ({"bias": np.ones(5, np.float32)}, r"bias: got shape \(5,\)"),
        ({"bias": "all"}, "bias: got str"),
    ],
)
def test_wrong_gradients_are_refused_before_anything_is_sent(wrong: Any, why: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        optimizer = sc.SparseAdamW(weights(), comm=transport)
        before = transport.number
        with pytest.raises(sc.InvalidInputError, match=why):
            optimizer.step(wrong)
        assert transport.number == before
        assert optimizer.step(gradients(0, 0)).usable

    run(1, program)
