"""`sparsecomm.SparseAdamW` on simulated ranks, against the rule in plain NumPy, and what it promises."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import CpuBackend
from sparsecomm.transport import simulated
from tests import data, reference
from tests.emulator.deferred import DeferredRuntime
from tests.optimizers import adapters
from tests.optimizers.adapters import MIN_OWNED
from tests.ranks import run

SHAPES = {"matrix": (30, 11), "bias": (11,), "number": (), "nothing": (0, 3)}
Arrays = dict[str, np.ndarray]
gradients = partial(adapters.gradients, shapes=SHAPES)
weights = partial(adapters.weights, SHAPES)

every_size = pytest.mark.parametrize("P", [1, 2, 3, 5])


class Oracle:
    """All ranks' steps in flat vectors of float64: the rule of `sparsecomm.optimizers.adamw`, with exact values."""

    def __init__(self, P: int, **rule: Any) -> None:
        self.P, self.rule = P, rule
        order = list(reversed(SHAPES))  # in which tensors lie in the only bucket
        self.names = [name for name in order if np.prod(SHAPES[name])]
        self.sizes = [int(np.prod(SHAPES[name])) for name in self.names]
        self.n = n = sum(self.sizes)
        self.owners = min(P, max(1, n // MIN_OWNED))
        self.w = self.flat({name: w.astype(float) for name, w in weights().items()})
        self.m, self.v, self.last, self.t = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
        self.unit, self.lag = np.zeros(n), False  # the unit's exponent of two
        self.residuals = np.zeros((P, n))  # times units
        decay = rule["weight_decay"]
        of_name = {name: decay.get(name, 0) if isinstance(decay, dict) else decay for name in SHAPES}
        self.decay = self.flat({name: np.full(shape, of_name[name]) for name, shape in SHAPES.items()})

    def flat(self, arrays: Arrays) -> np.ndarray:
        given = [arrays.get(name) for name in self.names]
        parts = [np.full(n, np.nan) if x is None else np.ravel(x) for n, x in zip(self.sizes, given, strict=True)]
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
        self.t += there.any(0)
        kept_back, waiting = np.where(there, 0, self.residuals), np.where(there, self.residuals, 0) + rows
        if density == 1:
            self.update(np.flatnonzero(there.any(0)), waiting.sum(0) / self.P, lr)
            waiting[:], self.lag = 0, True
        else:
            if self.lag:
                self.unit, self.lag = np.where(self.v > 0, self.target(self.v), self.unit), False
            mean = self.exchange(waiting, max(1, round(density * self.n)))
            self.update(np.flatnonzero(mean), mean, lr)
            excess = np.log2(np.sqrt(self.v) + self.rule["eps"]) - self.unit
            up, down = (np.floor(excess + np.log2(factor)) for factor in (0.75, 1.5))
            jumps = np.where(up > 0, up, np.minimum(down, 0))
            self.unit += np.where(mean != 0, np.clip(jumps, -4, 4), 0)
        self.residuals = waiting + kept_back

    def target(self, squares: np.ndarray) -> np.ndarray:
        return np.floor(np.log2(np.sqrt(squares) + self.rule["eps"]))

    def exchange(self, waiting: np.ndarray, k: int) -> np.ndarray:
        """Take the largest entries from what waits, and return their means."""
        n, owners, mean, k = self.n, self.owners, np.zeros(self.n), max(k, self.owners)
        for owner in range(owners):
            own = slice(n * owner // owners, n * (owner + 1) // owners)
            count = k * (owner + 1) // owners - k * owner // owners
            sums, unit = waiting[owner, own].copy(), 2.0 ** self.unit[own]
            for rank in range(self.P):
                if rank != owner:
                    indices, _ = reference.topk(waiting[rank, own] / unit, count)
                    sums[indices] += waiting[rank, own][indices]
                    waiting[rank, own][indices] = 0
            indices, _ = reference.topk(sums / unit, count)
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
    """Return weights, means and squares after ``a`` steps, the last of which is ``t``, with a mean gradient ``g``."""
    b1, b2 = betas
    m = b1**a * m + (1 - b1**a) * g
    v = b2**a * v + (1 - b2**a) * a * g * g
    step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return (1 - lr * decay) ** a * w - a * lr * step, m, v


def whole(states: list[Any]) -> tuple[dict[str, Any], Arrays]:
    """Return all moments as flat arrays, and the units, from the states of all ranks."""
    one = sc.reshard(states, 0, 1)
    moments = {
        name: {key: each if each is None or key == "step" else np.ravel(each) for key, each in its.items()}
        for name, its in one["moments"].items()
    }
    bias = {np.dtype(np.uint8): 127, np.dtype(np.uint16): 1023}
    units = {name: np.ldexp(1.0, e.ravel().astype(int) - bias[e.dtype]) for name, e in one["units"].items()}
    return moments, units


def check_equal(results: list[Any]) -> None:
    """Weights and units are the same on all ranks, and each element has one owner. Results: weights and a state."""
    first, state = results[0]
    for mine, its in results:
        assert all(data.same_bits(mine[name], first[name]) for name in first)
        assert all(data.same_bits(its["units"][name], state["units"][name]) for name in first)
    for name, w in first.items():
        bounds = [its["moments"][name]["part"] for _, its in results]
        parts = sorted((begin, end) for begin, end in bounds if begin < end)
        assert [0, *(end for _, end in parts)] == [*(begin for begin, _ in parts), w.size], name
        for _, its in results:
            moments = its["moments"][name]
            lengths = {len(moments[key]) for key in ("mean", "squares", "last")}
            assert lengths == {moments["part"][1] - moments["part"][0]}


@every_size
@pytest.mark.parametrize("density", [0.04, 0.3, "both", 1.0])
@pytest.mark.parametrize("lacking", [False, True])
def test_weights_are_the_oracles(P: int, density: Any, lacking: bool) -> None:
    """Also by a schedule that begins with dense steps, and makes one in between."""
    rule: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": {"matrix": 0.3}}
    steps = 12
    schedule = (lambda step: 1.0 if step in (0, 1, 2, 8) else 0.2) if density == "both" else lambda step: density
    oracle = Oracle(P, **rule)
    pushed = partial(adapters.given, P=P, shapes=SHAPES) if lacking else gradients
    for step in range(steps):
        oracle.step([pushed(step, rank) for rank in range(P)], 0.01 * (step + 1), schedule(step))

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, density=schedule, wire="packed", comm=transport, **rule)
        for step in range(steps):
            optimizer.lr, before = 0.01 * (step + 1), mine["matrix"].copy()
            done = optimizer.step(pushed(step, transport.rank))
            assert done.usable
            assert done.number == step
            if lacking and 4 <= step < 6:
                assert "matrix" in done.without_gradient
                assert data.same_bits(mine["matrix"], before)
        return mine, optimizer.state_dict()

    check_equal(results := run(P, program))
    mine = results[0][0]
    np.testing.assert_allclose(oracle.flat(mine), oracle.w, rtol=2e-4, atol=2e-5)
    moments, units = whole([state for _, state in results])
    np.testing.assert_array_equal(oracle.flat(units), 2.0**oracle.unit)
    for key, expected in {"mean": oracle.m, "squares": oracle.v, "last": oracle.last}.items():
        found = oracle.flat({name: its[key] for name, its in moments.items()})
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    for rank, (_, its) in enumerate(results):
        waiting = oracle.flat(its["residuals"]) * 2.0**oracle.unit
        np.testing.assert_allclose(waiting, oracle.residuals[rank], rtol=1e-3, atol=1e-3)


@every_size
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [("float32", "auto"), ("float32", "plain"), ("bfloat16", "auto"), ("float16", "packed"), ("float64", "auto")],
)
@pytest.mark.parametrize("lacking", [False, True])
def test_nothing_is_lost(P: int, dtype: str, wire: str, lacking: bool) -> None:
    """Gradients are in the means that were applied, or wait in residuals; weights plus compensations are AdamW's.

    The means that were applied follow from the first moments, so this holds for all formats, whatever they round. The
    gradients of some weights cancel in the first step, which is dense. Their units must not become eps.
    """
    real, steps, rule = data.DTYPES[dtype], 16, {"betas": (0.5, 0.9), "weight_decay": 0.1, "eps": 1e-8}
    schedule = lambda step: 1.0 if step in (0, 6) else 0.1  # noqa: E731

    def pushed(step: int, rank: int) -> Arrays:
        found = adapters.given(step, rank, P, SHAPES) if lacking else gradients(step, rank)
        return {name: g.astype(real) for name, g in found.items()}

    def program(transport: simulated.SimulatedTransport) -> list[Any]:
        mine, found = {name: w.astype(real) for name, w in weights().items()}, []
        optimizer = sc.SparseAdamW(mine, 1e-2, density=schedule, wire=wire, comm=transport, **rule)
        for step in range(steps):
            assert optimizer.step(pushed(step, transport.rank)).usable
            found.append(copy.deepcopy((mine, optimizer.state_dict())))
        return found

    results = run(P, program)
    pairs = {
        name: (w.astype(real).astype(float).ravel(), np.zeros((4, w.size))) for name, w in weights().items() if w.size
    }
    for step, outcomes in enumerate(zip(*results, strict=True)):
        everyones = [pushed(step, rank) for rank in range(P)]
        check_equal([*outcomes])
        moments, units = whole([state for _, state in outcomes])
        for name, (w, (m, v, last, left)) in pairs.items():
            its = {key: None if x is None else np.asarray(x, float) for key, x in moments[name].items()}
            t, moved = moments[name]["step"], its["last"] > last
            assert np.array_equal(its["last"][moved], np.full(moved.sum(), t))
            a = np.where(moved, t - last, 1)
            g = np.where(moved, (its["mean"] - 0.5**a * m) / (1 - 0.5**a), 0)
            left += sum((grads[name].astype(float).ravel() for grads in everyones if name in grads), np.zeros(w.size))
            left -= np.where(moved, P * g * a, 0)
            waits = sum(state["residuals"][name].astype(float).ravel() * units[name] for _, state in outcomes)
            np.testing.assert_allclose(left, waits, rtol=1e-3, atol=1e-4 * (1 + np.abs(left).max()))
            new = adamw(w, m, v, g, a, max(t, 1), 1e-2, 0.1, **rule)
            for array, values in zip((w, m, v), new, strict=True):
                array[:] = np.where(moved, values, array)
            np.testing.assert_allclose(its["squares"], v, rtol=1e-3, atol=1e-5 * v.max())
            m[:], v[:], last[:] = its["mean"], its["squares"], its["last"]
            found = outcomes[0][0][name].astype(float).ravel()
            if P > 1 or real in (np.float32, np.float64):
                exact = found if its["compensation"] is None else found + its["compensation"]
                np.testing.assert_allclose(exact, w, rtol=1e-4, atol=1e-5)
                w[:] = exact
            else:
                w[:] = found


def test_16_bit_weights_keep_updates_that_rounding_would_lose() -> None:
    """With several ranks, bfloat16 weights are float32 ones, rounded: 100 updates of 2^-14 move a weight of 1."""

    def program(transport: simulated.SimulatedTransport, dtype: Any, density: float) -> Arrays:
        mine = {"w": np.ones(300, dtype)}
        rule: dict[str, Any] = {"weight_decay": 0.0, "betas": (0.0, 0.0), "wire": "packed", "density": density}
        optimizer = sc.SparseAdamW(mine, 2.0**-14, comm=transport, **rule)
        for step in range(100):
            optimizer.step({"w": (1 + (np.arange(300) + step) % 3 + transport.rank).astype(dtype)})
        return mine

    narrow, single = data.DTYPES["bfloat16"], np.float32
    for density in (1.0, 0.2):
        found = {dtype: run(2, lambda t, d=dtype, s=density: program(t, d, s))[1]["w"] for dtype in (narrow, single)}
        assert data.same_bits(found[narrow], found[single].astype(narrow))
        assert (found[single] < 1 - 2.0**-9).all()
    alone = run(1, lambda transport: program(transport, narrow, 1.0))[0]["w"]
    assert (alone == 1).all()  # so this training needs the compensation


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
def test_an_overflow_at_one_owner_drops_only_what_overflows(density: float) -> None:
    """The entries of other owners wait for the next step, and no rank changes anything."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = {"a": np.ones(4 * MIN_OWNED, np.float32), "b": np.ones(7, np.float32)}
        optimizer = sc.SparseAdamW(mine, comm=transport, density=density, wire="packed")
        optimizer.step({name: w * (1 + transport.rank) for name, w in mine.items()})
        before = copy.deepcopy((mine, optimizer.state_dict()))
        g = {name: np.zeros(w.shape, np.float32) for name, w in mine.items()}
        g["a"][[3, 250]] = 1 + transport.rank, 2
        optimizer.reducer.residual("a")[5] += 1e37 * np.sign(transport.rank - 1)  # the sum is far above zero
        waited = {name: optimizer.reducer.residual(name).copy() for name in mine}
        done = optimizer.step(g)
        assert not done.usable
        assert done.number == 1
        after = optimizer.state_dict()
        assert data.same_bits(after["units"]["a"], before[1]["units"]["a"])
        for name, w in before[0].items():
            assert data.same_bits(mine[name], w)
            for key in ("mean", "squares", "last", "compensation"):
                assert data.same_bits(after["moments"][name][key], before[1]["moments"][name][key])
        unit = np.ldexp(1.0, after["units"]["a"].astype(int) - 127)
        expected = np.where(np.arange(len(unit)) == 5, 0, waited["a"] + g["a"] / unit)
        np.testing.assert_allclose(after["residuals"]["a"], expected, rtol=1e-6)
        rng = np.random.default_rng(transport.rank)
        for _ in range(3):
            later = {name: rng.standard_normal(w.shape).astype(np.float32) for name, w in mine.items()}
            assert optimizer.step(later).usable
        return mine, optimizer.state_dict()

    check_equal(run(4, program))


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_sums_are_freed_without_the_garbage_collector(density: float) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        optimizer, sums = sc.SparseAdamW({"w": np.ones(1000, np.float32)}, comm=transport, density=density), []
        gradient, adamw = np.linspace(-1, 2 + transport.rank, 1000, dtype=np.float32), optimizer._adamw
        decided = type(adamw).decided

        def watch(bucket: Any, outcome: Any) -> None:
            sums.append(weakref.ref(outcome.result.dense if density == 1 else outcome.result.values))
            decided(adamw, bucket, outcome)

        adamw.decided = watch  # type: ignore[method-assign]
        for _ in range(3):
            optimizer.step({"w": gradient})
        assert len(sums) == 3
        assert sums[0]() is None

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


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("rebuilds", [False, True])
def test_an_update_that_stopped_anywhere_goes_on(P: int, density: float, rebuilds: bool) -> None:
    """`step` completes it, and so does `rebuild`: all bits are as without the interrupt."""
    failed = set()

    def program(transport: simulated.SimulatedTransport, at: int | None) -> Any:
        mine = weights()
        optimizer, made = sc.SparseAdamW(mine, 0.01, comm=transport, density=density), []
        optimizer.step(gradients(0, transport.rank))
        update, backend, buckets = optimizer._adamw.update, CpuBackend(1), optimizer.reducer.buckets

        class Failing:
            def __getattr__(self, name: str) -> Any:
                made.append(name)
                if len(made) - 1 == at:
                    raise MemoryError
                return getattr(backend, name)

        def failing(*arguments: Any) -> None:
            kept = [bucket.backend for bucket in buckets]
            for bucket in buckets:
                bucket.backend = cast("Any", Failing())
            try:
                update(*arguments)
            finally:
                for bucket, its in zip(buckets, kept, strict=True):
                    bucket.backend = its

        if transport.rank == 0 and at is not None:
            optimizer._adamw.update = failing  # type: ignore[method-assign]
            try:
                optimizer.step(gradients(1, transport.rank))
            except MemoryError:
                failed.add(at)
                with pytest.raises(sc.InvalidInputError, match=r"call step\(\) again to complete it"):
                    optimizer.state_dict()
                if not rebuilds:
                    optimizer.step(gradients(1, transport.rank))
        else:
            optimizer.step(gradients(1, transport.rank))
        if rebuilds:
            optimizer.rebuild(transport)
        optimizer._adamw.update = update  # type: ignore[method-assign]
        for step in range(2, 4):
            optimizer.step(gradients(step, transport.rank))
        return copy.deepcopy((mine, optimizer.state_dict()))

    expected = run(P, lambda transport: program(transport, None))
    for at in range(6):
        found = run(P, lambda transport, at=at: program(transport, at))
        check_equal(found)
        for (mine, state), (theirs, other) in zip(found, expected, strict=True):
            assert all(data.same_bits(mine[name], theirs[name]) for name in mine)
            check_same(state, other)
    assert failed >= {0, 1}


def check_same(state: Any, other: Any) -> None:
    for key in ("residuals", "units"):
        assert all(data.same_bits(state[key][name], other[key][name]) for name in other[key])
    for name, its in other["moments"].items():
        assert all(data.same_bits(np.asarray(state["moments"][name][key]), np.asarray(x)) for key, x in its.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_on_a_cuda_device_all_bits_are_those_of_the_cpu(dtype: str, cuda: DeferredRuntime) -> None:
    """From any streams, with dense and sparse steps, an overflow, absent gradients, states, and a lost rank."""
    real = data.DTYPES[dtype]

    def train(device: DeferredRuntime | None) -> list[Any]:
        def put(array: np.ndarray) -> Any:
            return array if device is None else device.put(array)

        def elsewhere() -> None:
            if device is not None:
                device.make_current(device.new_stream())

        def program(transport: simulated.SimulatedTransport) -> Any:
            with nullcontext() if device is None else device.on_stream(device.new_stream()):
                host = {name: w.astype(real) for name, w in weights().items()}
                mine, found = {name: put(w) for name, w in host.items()}, []
                schedule = lambda step: 1.0 if step in (0, 3) else 0.2  # noqa: E731
                options: dict[str, Any] = {"density": schedule, "check_weights_every": None}
                made = partial(sc.SparseAdamW, mine, 0.01, comm=transport, **options)
                optimizer = made()
                for step in range(8):
                    g = {n: x.astype(real) for n, x in adapters.given(step, transport.rank, 3, SHAPES).items()}
                    if step in (2, 3) and transport.rank == 1:
                        g["bias"][4] = np.nan if step == 2 else 1e19 if dtype == "bfloat16" else 1
                    elsewhere()
                    found.append(optimizer.step({name: put(x) for name, x in g.items()}).usable)
                    elsewhere()
                    state = copy.deepcopy(optimizer.state_dict())
                    if step in (3, 5):
                        optimizer = made()
                        optimizer.load_state_dict(state)
                    if step == 6:
                        optimizer.rebuild(transport)
                    if device is not None:
                        device.synchronize()
                    found.append((copy.deepcopy(host), state))
                return found

        return run(3, program)

    for ours, theirs in zip(train(cuda), train(None), strict=True):
        assert ours[::2] == theirs[::2]
        for (mine, state), (others, other) in zip(ours[1::2], theirs[1::2], strict=True):
            assert all(data.same_bits(mine[name], others[name]) for name in mine)
            check_same(state, other)


@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("density", [0.09, 1.0])
def test_a_step_takes_two_trips_and_owners_share_the_state(P: int, density: float) -> None:
    """For float32 weights, gradients included. In a trip, each rank sends a message to each other rank at most."""
    n = 40_000

    def program(transport: simulated.SimulatedTransport) -> float:
        w, g = {"w": np.ones(n, np.float32)}, {"w": data.gradient("normal", n, "float32", transport.rank)}
        optimizer = sc.SparseAdamW(w, density=density, comm=transport, check_weights_every=None)
        for _ in range(3):
            before = transport.counters.messages_sent
            optimizer.step(g)
        assert transport.counters.messages_sent - before == 2 * (P - 1)
        state = optimizer.state_dict()
        arrays = [w["w"], g["w"], state["residuals"]["w"], state["units"]["w"]]
        arrays += [x for x in state["moments"]["w"].values() if isinstance(x, np.ndarray)]
        return sum(array.nbytes for array in arrays) / n

    assert all(result == pytest.approx(13 + 16 / P, abs=0.01) for result in run(P, program))


def test_subnormal_changes_are_applied_on_a_gpu(cuda: DeferredRuntime) -> None:
    """CuPy takes subnormal numbers for zeros."""

    def program(transport: simulated.SimulatedTransport, on_gpu: bool) -> np.ndarray:
        w = np.zeros(200, np.float32)
        mine: Any = {"w": cuda.put(w) if on_gpu else w}
        optimizer = sc.SparseAdamW(mine, 1e-40, comm=transport, density=0.5, wire="plain", check_weights_every=None)
        for step in range(3):
            g = data.gradient("normal", 200, "float32", 10 * step + transport.rank)
            optimizer.step({"w": cuda.put(g) if on_gpu else g})
        cuda.streams.run_all()
        return w

    on_host, on_gpu = (run(2, partial(program, on_gpu=each)) for each in (False, True))
    for ours, theirs in zip(on_gpu, on_host, strict=True):
        assert 0 < np.abs(theirs).max() < np.finfo(np.float32).tiny
        assert data.same_bits(ours, theirs)


@pytest.mark.parametrize("P", [1, 3])
def test_training_resumes_from_a_state_after_any_step(P: int) -> None:
    """With the same bits, also between dense steps and the refresh of units."""
    schedule = lambda step: 1.0 if step in (0, 1, 4) else 0.2  # noqa: E731

    def program(transport: simulated.SimulatedTransport) -> None:
        mine, saved = weights(), []
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=schedule)
        for step in range(8):
            saved.append(copy.deepcopy((mine, optimizer.state_dict())))
            optimizer.step(gradients(step, transport.rank))
        for step, (begun, state) in enumerate(saved):
            other = sc.SparseAdamW(begun, 0.01, comm=transport, density=schedule)
            other.load_state_dict(state)
            check_same(other.state_dict(), state)
            for later in range(step, 8):
                other.step(gradients(later, transport.rank))
            check_same(other.state_dict(), optimizer.state_dict())
            assert all(data.same_bits(mine[name], begun[name]) for name in mine)

    run(P, program)


@pytest.mark.parametrize("sizes", [(3, 2, 3), (1, 4), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resharded_states_keep_everything(sizes: tuple[int, ...], dtype: str) -> None:
    """Moments, compensations and units of each weight, and the sums of residuals."""
    real, steps = data.DTYPES[dtype], 4

    def begin(transport: simulated.SimulatedTransport, states: list[Any], mine: Arrays, first: int) -> Any:
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=0.2)
        loaded = None
        if states:
            optimizer.load_state_dict(sc.reshard(states, transport.rank, transport.size))
            loaded = copy.deepcopy(optimizer.state_dict())
        for step in range(first, first + steps):
            optimizer.step({name: g.astype(real) for name, g in gradients(step, transport.rank).items()})
        return mine, optimizer.state_dict(), loaded

    states: list[Any] = []
    mine = {name: w.astype(real) for name, w in weights().items()}
    for i, P in enumerate(sizes):
        found = run(P, lambda t, s=states, m=mine, n=i: begin(t, s, copy.deepcopy(m), n * steps))  # type: ignore[misc]
        check_equal([each[:2] for each in found])
        if states:
            (before, units), (after, others) = whole(states), whole([loaded for *_, loaded in found])
            for name, its in before.items():
                lost = its.pop("compensation"), after[name].pop("compensation")
                assert all(data.same_bits(np.asarray(x), np.asarray(after[name][key])) for key, x in its.items())
                none = np.zeros(its["last"].size, np.float32)
                ours, theirs = (none if each is None else each for each in lost)
                np.testing.assert_array_equal(ours, theirs)
                np.testing.assert_array_equal(units[name], others[name])
                sums = (sum(s["residuals"][name] for s in each) for each in (states, [each[2] for each in found]))
                np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-5)
        mine, states = found[0][0], [state for _, state, _ in found]


@pytest.mark.parametrize("P", [1, 3])
def test_states_of_version_2_load(P: int) -> None:
    """They have whole moments, the same on all ranks, and no units, which were sqrt(v) + eps at any time.

    A weight that was not updated yet has a second moment for its unit.
    """
    rng, step = np.random.default_rng(4), 9
    moments: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        last = np.array(rng.integers(0, step + 1, shape), np.int32)
        mean = np.where(last > 0, rng.standard_normal(shape), 0).astype(np.float32)
        squares = np.array(10.0 ** rng.uniform(-6, 2, shape), np.float32)
        moments[name] = {"mean": mean, "squares": squares, "last": last, "step": step}
    waiting = [{name: its["mean"] * 0.1 * rank for name, its in moments.items()} for rank in range(P)]
    given = copy.deepcopy(moments)
    rule: dict[str, Any] = {"density": 1.0, "eps": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, **rule)
        state = {key: x for key, x in optimizer.state_dict().items() if key not in ("units", "units_lag")}
        state |= {"format": "SparseAdamW 2", "step": step, "moments": given, "residuals": waiting[transport.rank]}
        optimizer.load_state_dict(state)
        loaded = copy.deepcopy(optimizer.state_dict())
        optimizer.step(gradients(step, transport.rank))
        if transport.rank == P - 1 > 0:
            state["moments"] = copy.deepcopy(given)
            state["moments"]["bias"]["squares"][3] *= 16
        if P > 1:
            with pytest.raises(sc.InvalidInputError, match="differ in moments"):
                optimizer.load_state_dict(state)
        return mine, optimizer.state_dict(), loaded

    results = run(P, program)
    assert all(data.same_bits(given[name]["squares"], its["squares"]) for name, its in moments.items())
    check_equal([each[:2] for each in results])
    found, units = whole([loaded for *_, loaded in results])
    for name, its in moments.items():
        root, updated = np.sqrt(its["squares"].ravel()) + np.float32(1e-3), its["last"].ravel() > 0
        np.testing.assert_array_equal(units[name], 2.0 ** np.floor(np.log2(root)))
        np.testing.assert_array_equal(found[name]["squares"], np.where(updated, its["squares"].ravel(), 0))
        total = sum(
            gradients(step, rank)[name].ravel() + waiting[rank][name].ravel() * units[name] for rank in range(P)
        )
        last, flat = its["last"].ravel(), [its[key].ravel().astype(float) for key in ("mean", "squares")]
        a = step + 1 - last
        flat[1] = np.where(updated, flat[1], 0)
        arguments = weights()[name].ravel().astype(float), *flat, total / P / a, a, step + 1, 0.01, 0.1
        expected = adamw(*arguments, betas=rule["betas"], eps=rule["eps"])[0]
        np.testing.assert_allclose(results[0][0][name].ravel(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_moments_of_a_lost_rank_are_made_from_units(density: float, caplog: pytest.LogCaptureFixture) -> None:
    """During dense steps, which do not change units, from the others. A new rank brings nothing that it had."""

    def begin(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=density, betas=(0.9, 0.95))
        for step in range(30):
            optimizer.step(gradients(step, transport.rank))
        return optimizer, copy.deepcopy(optimizer.state_dict())

    old, stale = run(3, begin), run(1, begin)[0][0]
    before, units = whole([state for _, state in old])

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer = stale if transport.rank == 1 else old[(0, 1, 2)[transport.rank]][0]
        for name, w in old[0][0].weights.items():
            optimizer.weights[name][...] = w
        rebuilt = optimizer.rebuild(transport, joining=transport.rank == 1)
        state = copy.deepcopy(optimizer.state_dict())
        assert (rebuilt.ranks_lost, rebuilt.ranks_joined) == ((1,), (1,))
        for step in range(30, 33):
            assert optimizer.step(gradients(step, transport.rank)).usable
        return optimizer.weights, optimizer.state_dict(), state

    results = run(3, program)
    check_equal([each[:2] for each in results])
    after, others = whole([state for *_, state in results])
    count = 0
    for name, its in before.items():
        begin_, end = old[1][1]["moments"][name]["part"]
        count += end - begin_
        np.testing.assert_array_equal(units[name], others[name])
        is_lost = (np.arange(its["last"].size) >= begin_) & (np.arange(its["last"].size) < end)
        for key in ("mean", "squares", "last", "compensation"):
            np.testing.assert_array_equal(after[name][key][~is_lost], its[key][~is_lost])
        assert not after[name]["mean"][is_lost].any()
        assert not after[name]["compensation"][is_lost].any()
        assert (after[name]["last"][is_lost] == 30).all()
        ratio = (after[name]["squares"] / np.maximum(its["squares"], 1e-30))[is_lost & (its["last"] > 3)]
        assert ratio.size == 0 or 0.4 < np.exp(np.log(ratio).mean()) < 2.5
    assert f"rank 1: {count} moments were on lost ranks" in caplog.text


@pytest.mark.parametrize("behind", [0, 1])
def test_a_refresh_of_units_that_failed_on_a_rank_is_made_again(behind: int) -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=lambda step: 1.0 if step < 3 else 0.3)
        for step in range(3):
            optimizer.step(gradients(step, transport.rank))
        kept = copy.deepcopy([(bucket.exponents, bucket.residual) for bucket in optimizer.reducer.buckets])
        optimizer._adamw._refresh_units(optimizer._rules())
        for bucket, (exponents, residual) in zip(optimizer.reducer.buckets, kept, strict=True):
            assert not data.same_bits(bucket.exponents, exponents)
            if transport.rank == behind:  # as if its call had failed
                bucket.exponents[:], bucket.residual[:], bucket.units_lag = exponents, residual, True
        optimizer.rebuild(transport)
        for step in range(3, 6):
            assert optimizer.step(gradients(step, transport.rank)).usable
        return mine, optimizer.state_dict()

    check_equal(run(2, program))


@pytest.mark.parametrize("behind", [0, 1])
def test_ranks_that_are_a_step_apart_go_on_together(behind: int) -> None:
    def begin(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer, adamw = sc.SparseAdamW(mine, 0.01, comm=transport, density=0.3), None
        for step in range(5):
            if step == 4 and transport.rank == behind:
                adamw, bucket = optimizer._adamw, optimizer.reducer.buckets[0]
                kept = copy.deepcopy((mine, adamw.moments, adamw.steps, bucket.exponents, bucket.residual))
            optimizer.step(gradients(step, transport.rank))
        if adamw is not None:  # as if the last call had failed on this rank
            adamw.adopt(kept[1], kept[2])
            bucket.exponents[:], bucket.residual[:] = kept[3:]
            optimizer.reducer._open.number = 4
            for name, w in kept[0].items():
                mine[name][...] = w
        state = optimizer.state_dict()
        return optimizer, {name: w * np.exp2(state["units"][name] - 127.0) for name, w in state["residuals"].items()}

    old = run(2, begin)

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer, waiting = old[transport.rank]
        assert optimizer.rebuild(transport).steps_apart == 1
        for name, w in old[0][0].weights.items():
            optimizer.weights[name][...] = w
        state = copy.deepcopy(optimizer.state_dict())
        for name, w in state["residuals"].items():
            np.testing.assert_allclose(w * np.exp2(state["units"][name] - 127.0), waiting[name], rtol=1e-6)
        optimizer.load_state_dict(state)
        for step in range(6, 9):
            optimizer.step(gradients(step, transport.rank))
        return optimizer.weights, optimizer.state_dict()

    check_equal(run(2, program))


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("dense_steps", [0, 3])
def test_ranks_of_which_one_has_not_finished_an_opening_call_go_on_together(dense_steps: int, behind: int) -> None:
    """That rank has no moments yet, or after dense steps still has the old units."""

    def begin(transport: simulated.SimulatedTransport) -> sc.SparseAdamW:
        optimizer = sc.SparseAdamW(weights(), 0.01, comm=transport, density=0.3, dense_steps=dense_steps)
        adamw, bucket, rules = optimizer._adamw, optimizer.reducer.buckets[0], optimizer._rules()
        for step in range(dense_steps):
            optimizer.step(gradients(step, transport.rank))
        before = bucket.exponents.copy(), bucket.residual.copy()
        if dense_steps:
            assert bucket.units_lag
            adamw._refresh_units(rules)
        else:
            adamw._begin(adamw.missing, gradients(0, transport.rank), rules, 1.0)
        optimizer.reducer.end_opening()
        assert (bucket.exponents != before[0]).any()
        if transport.rank == behind:
            bucket.exponents[:], bucket.residual[:] = before
            bucket.units_lag = bool(dense_steps)
            adamw.adopt(adamw.moments if dense_steps else {}, adamw.steps)
        return optimizer

    old = run(2, begin)

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer = old[transport.rank]
        assert not optimizer.rebuild(transport).steps_apart
        for step in range(dense_steps, dense_steps + 3):
            optimizer.step(gradients(step, transport.rank))
        return optimizer.weights, optimizer.state_dict()

    check_equal(run(2, program))


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
