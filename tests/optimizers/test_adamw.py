"""`sparsecomm.SparseAdamW` on simulated ranks, compared with the rule in plain NumPy."""

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
from tests.optimizers.adapters import MIN_OWNED, NODES, members_of, part_of, run_on
from tests.ranks import run

SHAPES = {"matrix": (30, 11), "bias": (11,), "number": (), "nothing": (0, 3)}
Arrays = dict[str, np.ndarray]
gradients = partial(adapters.gradients, shapes=SHAPES)
weights = partial(adapters.weights, SHAPES)

every_layout = pytest.mark.parametrize("layout", ["0", "00", "000", "00011", *NODES])


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


@pytest.mark.covering(2)
@every_layout
@pytest.mark.parametrize("density", [0.04, 0.3, "both", 1.0])
@pytest.mark.parametrize("lacking", [False, True])
def test_weights_are_the_oracles(layout: str, density: Any, lacking: bool) -> None:
    """One schedule begins with dense steps and has another one later."""
    rule: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": {"matrix": 0.3}}
    P, steps = len(layout), 12
    schedule = (lambda step: 1.0 if step in (0, 1, 2, 8) else 0.2) if density == "both" else lambda step: density
    oracle = Oracle(layout, **rule)
    pushed = partial(adapters.partial_gradients, P=P, shapes=SHAPES) if lacking else gradients
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

    check_equal(results := run_on(layout, program))
    mine = results[0][0]
    np.testing.assert_allclose(oracle.flat(mine), oracle.w, rtol=2e-4, atol=2e-5)
    moments, units = moments_and_units([state for _, state in results])
    np.testing.assert_array_equal(oracle.flat(units), 2.0**oracle.unit)
    for key, expected in {"mean": oracle.m, "squares": oracle.v, "last": oracle.last}.items():
        actual = oracle.flat({name: moment[key] for name, moment in moments.items()})
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    for row, ranks in zip(oracle.residuals, oracle.members, strict=True):
        expected, at = dict(zip(oracle.names, np.split(row, np.cumsum(oracle.sizes)[:-1]), strict=True)), 0
        for name, values in expected.items():
            for state in (results[rank][1] for rank in ranks):
                begin, end = part_of(state, name)
                actual = state["residuals"][name].ravel() * units[name][begin:end]
                np.testing.assert_allclose(actual, values[begin:end], rtol=1e-3, atol=1e-3)
                at += end - begin
        assert at == oracle.n  # each element is in one part


@pytest.mark.covering(2)
@every_layout
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [("float32", "auto"), ("float32", "plain"), ("bfloat16", "auto"), ("float16", "packed"), ("float64", "auto")],
)
@pytest.mark.parametrize("lacking", [False, True])
def test_nothing_is_lost(layout: str, dtype: str, wire: str, lacking: bool) -> None:
    """Each gradient is in an applied mean or in a residual, and weights plus compensations follow AdamW's rule.

    The test computes the applied means from the first moments, so it holds for all wire formats. The
    gradients of some weights cancel in the first step, which is dense. Their units must not become eps.
    """
    P, real, steps, rule = len(layout), data.DTYPES[dtype], 16, {"betas": (0.5, 0.9), "weight_decay": 0.1, "eps": 1e-8}
    schedule = lambda step: 1.0 if step in (0, 6) else 0.1  # noqa: E731

    def pushed(step: int, rank: int) -> Arrays:
        arrays = adapters.partial_gradients(step, rank, P, SHAPES) if lacking else gradients(step, rank)
        return {name: g.astype(real) for name, g in arrays.items()}

    def program(transport: simulated.SimulatedTransport) -> list[Any]:
        mine, snapshots = {name: w.astype(real) for name, w in weights().items()}, []
        optimizer = sc.SparseAdamW(mine, 1e-2, density=schedule, wire=wire, comm=transport, **rule)
        for step in range(steps):
            assert optimizer.step(pushed(step, transport.rank)).usable
            snapshots.append(copy.deepcopy((mine, optimizer.state_dict())))
        return snapshots

    results = run_on(layout, program)
    pairs = {
        name: (w.astype(real).astype(float).ravel(), np.zeros((4, w.size))) for name, w in weights().items() if w.size
    }
    for step, outcomes in enumerate(zip(*results, strict=True)):
        everyones = [pushed(step, rank) for rank in range(P)]
        check_equal([*outcomes])
        states = [state for _, state in outcomes]
        moments, waits = moments_and_units(states)[0], waiting(states)
        for name, (w, (m, v, last, left)) in pairs.items():
            moment = {key: None if x is None else np.asarray(x, float) for key, x in moments[name].items()}
            t, moved = moments[name]["step"], moment["last"] > last
            assert np.array_equal(moment["last"][moved], np.full(moved.sum(), t))
            a = np.where(moved, t - last, 1)
            g = np.where(moved, (moment["mean"] - 0.5**a * m) / (1 - 0.5**a), 0)
            left += sum((grads[name].astype(float).ravel() for grads in everyones if name in grads), np.zeros(w.size))
            left -= np.where(moved, P * g * a, 0)
            np.testing.assert_allclose(left, waits[name], rtol=1e-3, atol=1e-4 * (1 + np.abs(left).max()))
            new = adamw(w, m, v, g, a, max(t, 1), 1e-2, 0.1, **rule)
            for array, values in zip((w, m, v), new, strict=True):
                array[:] = np.where(moved, values, array)
            np.testing.assert_allclose(moment["squares"], v, rtol=1e-3, atol=1e-5 * v.max())
            m[:], v[:], last[:] = moment["mean"], moment["squares"], moment["last"]
            weight = outcomes[0][0][name].astype(float).ravel()
            if P > 1 or real in (np.float32, np.float64):
                exact = weight if moment["compensation"] is None else weight + moment["compensation"]
                np.testing.assert_allclose(exact, w, rtol=1e-4, atol=1e-5)
                w[:] = exact
            else:
                w[:] = weight


def test_16_bit_weights_keep_updates_that_rounding_would_lose() -> None:
    """With several ranks, bfloat16 weights are rounded float32 weights: 100 updates of 2^-14 move a weight of 1."""

    def program(transport: simulated.SimulatedTransport, dtype: Any, density: float) -> Arrays:
        mine = {"w": np.ones(300, dtype)}
        rule: dict[str, Any] = {"weight_decay": 0.0, "betas": (0.0, 0.0), "wire": "packed", "density": density}
        optimizer = sc.SparseAdamW(mine, 2.0**-14, comm=transport, **rule)
        for step in range(100):
            optimizer.step({"w": (1 + (np.arange(300) + step) % 3 + transport.rank).astype(dtype)})
        return mine

    narrow, single = data.DTYPES["bfloat16"], np.float32
    for density in (1.0, 0.2):
        results = {dtype: run(2, lambda t, d=dtype, s=density: program(t, d, s))[1]["w"] for dtype in (narrow, single)}
        assert data.same_bits(results[narrow], results[single].astype(narrow))
        assert (results[single] < 1 - 2.0**-9).all()
    alone = run(1, lambda transport: program(transport, narrow, 1.0))[0]["w"]
    assert (alone == 1).all()  # without compensation, updates are lost


@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("what", ["second moment", "weight", "float16 weight", "eps", "beta2", "sum", "residual"])
@pytest.mark.parametrize("layout", ["00", "0011"])
def test_a_step_that_would_overflow_is_no_step(what: str, density: float, layout: str) -> None:
    """All gradients are finite, but the step would overflow. It changes nothing, and the next step works.

    The program may change weights and eps, and with beta2 = 0 the moments have no known bound.
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
            begin, end = part_of(optimizer.state_dict(), "a")
            waits = optimizer.reducer.residual("a")[i - begin : i - begin + 1] if begin <= i < end else np.empty(0)
            if step == 2 and what == "second moment":
                waits[:] = 1e20  # gradients of several steps; units are about 1
            if step == 2 and what == "residual":
                waits[:], g["a"][i] = np.finfo(np.float32).max, 1.8e19
            if step == 2 and of_weight:
                mine["a"][i], g["a"][i], optimizer.eps = -np.finfo(dtype).max, 100, 1e-8
            before, state = copy.deepcopy(mine), copy.deepcopy(optimizer.state_dict()["moments"])
            done = optimizer.step(g)
            outcomes.append(done.usable)
            after = optimizer.state_dict()
            if not done.usable:
                assert all(data.same_bits(mine[name], before[name]) for name in mine)
                for name, moment in state.items():
                    assert all(data.same_bits(after["moments"][name][key], moment[key]) for key in ("mean", "squares"))
            arrays = [*mine.values(), *after["residuals"].values()]
            arrays += [moment[key] for moment in after["moments"].values() for key in ("mean", "squares")]
            assert all(np.isfinite(array).all() for array in arrays)
        if what != "sum":  # the sum of two accepted gradients need not overflow
            assert outcomes == [True, True, False, True, True]
        return mine

    first, *others = run_on(layout, program)
    assert all(data.same_bits(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("layout", ["0123", "0011", "010110"])
def test_an_overflow_at_one_owner_drops_only_what_overflows(density: float, layout: str) -> None:
    """No rank changes weights, and the entries of other owners wait for the next step."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = {"a": np.ones(4 * MIN_OWNED, np.float32), "b": np.ones(7, np.float32)}
        optimizer = sc.SparseAdamW(mine, comm=transport, density=density, wire="packed")
        optimizer.step({name: w * (1 + transport.rank) for name, w in mine.items()})
        before = copy.deepcopy((mine, optimizer.state_dict()))

        def pushed(rank: int) -> Arrays:
            g = {name: np.zeros(w.shape, np.float32) for name, w in mine.items()}
            g["a"][[3, 250]] = 1 + rank, 2
            return g

        begin, end = part_of(before[1], "a")
        big = np.arange(begin, end) == 5
        optimizer.reducer.residual("a")[big] += 1e37 * (2 * transport.rank - 0.5)  # the sum is far from zero
        waited, g = optimizer.reducer.residual("a").copy(), pushed(transport.rank)
        done = optimizer.step(g)
        assert not done.usable
        assert done.number == 1
        after = optimizer.state_dict()
        unit = np.ldexp(1.0, optimizer.reducer.exponents("a").astype(int) - 127)
        assert data.same_bits(unit, np.ldexp(1.0, units_of(before[1], "a").astype(int) - 127))
        for name, w in before[0].items():
            assert data.same_bits(mine[name], w)
            for key in ("mean", "squares", "last", "compensation"):
                assert data.same_bits(after["moments"][name][key], before[1]["moments"][name][key])
        members = [transport.rank] if after["slices"] is None else optimizer.reducer.bucket("a").nodes.inside
        added = sum(pushed(rank)["a"] for rank in members)[begin:end]
        np.testing.assert_allclose(after["residuals"]["a"], np.where(big, 0, waited + added / unit), rtol=1e-6)
        assert not after["unsummed"]
        rng = np.random.default_rng(transport.rank)
        for _ in range(3):
            later = {name: rng.standard_normal(w.shape).astype(np.float32) for name, w in mine.items()}
            assert optimizer.step(later).usable
        return mine, optimizer.state_dict()

    check_equal(run_on(layout, program))


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


@pytest.mark.parametrize("layout", ["00", "0011"])
def test_begins_when_there_is_a_gradient(layout: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = weights()
        before = copy.deepcopy(mine)
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport)
        assert not optimizer.step({}).usable
        assert all(data.same_bits(w, before[name]) for name, w in mine.items())
        g = gradients(0, transport.rank)
        assert optimizer.step({"matrix": g["matrix"] if transport.rank else None}).usable  # one tensor, on one rank
        assert not data.same_bits(mine["matrix"], before["matrix"])
        assert data.same_bits(mine["bias"], before["bias"])
        assert optimizer.step(g).usable

    run_on(layout, program)


@pytest.mark.parametrize("layout", ["00", "0011"])
def test_weights_of_several_types(layout: str) -> None:
    """Sums and moments are in the accumulator's type."""
    reals = dict(zip(SHAPES, map(data.DTYPES.get, ["bfloat16", "float32", "float64", "float16"]), strict=True))

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = {name: w.astype(reals[name]) for name, w in weights().items()}
        optimizer = sc.SparseAdamW(mine, 0.01, density=0.3, comm=transport)
        for step in range(10):
            optimizer.step({name: g.astype(reals[name]) for name, g in gradients(step, transport.rank).items()})
        for name, moment in optimizer.state_dict()["moments"].items():
            assert moment["squares"].dtype == (np.float64 if reals[name] == np.float64 else np.float32)
        return mine, optimizer.state_dict()

    check_equal(results := run_on(layout, program))
    for name, w in results[0][0].items():
        assert w.dtype == reals[name]
        moved = np.abs(w.astype(float) - weights()[name].astype(reals[name]).astype(float)).max(initial=0)
        assert (0 < moved < 0.3) == (w.size > 0)


# -- states, other ranks and errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["0", "000", "0011"])
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("rebuilds", [False, True])
def test_an_update_that_stopped_anywhere_goes_on(layout: str, density: float, rebuilds: bool) -> None:
    """Calling `step` or `rebuild` completes the update, with the same bits as without the failure."""
    failed = set()

    def program(transport: simulated.SimulatedTransport, at: int | None) -> Any:
        mine = weights()
        optimizer, operations = sc.SparseAdamW(mine, 0.01, comm=transport, density=density), []
        optimizer.step(gradients(0, transport.rank))
        update, backend, buckets = optimizer._adamw.update, CpuBackend(1), optimizer.reducer.buckets

        class Failing:
            def __getattr__(self, name: str) -> Any:
                operations.append(name)
                if len(operations) - 1 == at:
                    raise MemoryError
                return getattr(backend, name)

        def failing(*arguments: Any) -> None:
            backends = [bucket.backend for bucket in buckets]
            for bucket in buckets:
                bucket.backend = cast("Any", Failing())
            try:
                update(*arguments)
            finally:
                for bucket, original in zip(buckets, backends, strict=True):
                    bucket.backend = original

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

    expected = run_on(layout, lambda transport: program(transport, None))
    for at in range(6):
        results = run_on(layout, lambda transport, at=at: program(transport, at))
        check_equal(results)
        for (mine, state), (theirs, other) in zip(results, expected, strict=True):
            assert all(data.same_bits(mine[name], theirs[name]) for name in mine)
            check_same(state, other)
    assert failed >= {0, 1}


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", ["000", "0011"])
def test_on_a_cuda_device_all_bits_are_those_of_the_cpu(dtype: str, layout: str, cuda: DeferredRuntime) -> None:
    """Covers several streams, dense and sparse steps, an overflow, missing gradients, states and a lost rank."""
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
                mine, outcomes = {name: put(w) for name, w in host.items()}, []
                schedule = lambda step: 1.0 if step in (0, 3) else 0.2  # noqa: E731
                options: dict[str, Any] = {"density": schedule, "check_weights_every": None}
                make = partial(sc.SparseAdamW, mine, 0.01, comm=transport, **options)
                if device is not None:
                    device.synchronize()  # a program orders its own work on several streams
                optimizer = make()
                for step in range(8):
                    pushed = adapters.partial_gradients(step, transport.rank, len(layout), SHAPES)
                    g = {n: x.astype(real) for n, x in pushed.items()}
                    if step in (2, 3) and transport.rank == 2:
                        g["bias"][4] = np.nan if step == 2 else 1e19 if dtype == "bfloat16" else 1
                    elsewhere()
                    outcomes.append(optimizer.step({name: put(x) for name, x in g.items()}).usable)
                    elsewhere()
                    state = copy.deepcopy(optimizer.state_dict())
                    if step in (3, 5):
                        optimizer = make()
                        optimizer.load_state_dict(state)
                    if step == 6:
                        optimizer.rebuild(transport)
                    if device is not None:
                        device.synchronize()
                    outcomes.append((copy.deepcopy(host), state))
                return outcomes

        return run_on(layout, program)

    for ours, theirs in zip(train(cuda), train(None), strict=True):
        assert ours[::2] == theirs[::2]
        for (mine, state), (others, other) in zip(ours[1::2], theirs[1::2], strict=True):
            assert all(data.same_bits(mine[name], others[name]) for name in mine)
            check_same(state, other)


@pytest.mark.parametrize("layout", ["00", "0123", "01234567", "00001111"])
@pytest.mark.parametrize("density", [0.09, 1.0])
def test_a_step_takes_two_trips_and_owners_share_the_state(layout: str, density: float) -> None:
    """Sizes are for float32 weights and include gradients. Per trip, a rank sends each other rank at most one message.

    With nodes there are two trips between nodes and three inside, plus one for verdicts after a dense step.
    """
    n, P = 40_000, len(layout)
    per_node, others = (4, 1) if layout == "00001111" else (1, P - 1)

    def program(transport: simulated.SimulatedTransport) -> float:
        w, g = {"w": np.ones(n, np.float32)}, {"w": data.gradient("normal", n, "float32", transport.rank)}
        optimizer = sc.SparseAdamW(w, density=density, comm=transport, check_weights_every=None)
        for _ in range(3):
            before = transport.counters.messages_sent
            optimizer.step(g)
        assert transport.counters.messages_sent - before == 2 * others + (4 if density == 1 else 3) * (per_node - 1)
        state = optimizer.state_dict()
        arrays = [w["w"], g["w"], state["residuals"]["w"], units_of(state, "w")]
        arrays += [x for x in state["moments"]["w"].values() if isinstance(x, np.ndarray)]
        return sum(array.nbytes for array in arrays) / n

    expected = pytest.approx(8 + 5 / per_node + 16 / P, abs=0.01)
    assert all(result == expected for result in run_on(layout, program))


def test_subnormal_changes_are_applied_on_a_gpu(cuda: DeferredRuntime) -> None:
    """CuPy would flush subnormal numbers to zero."""

    def program(transport: simulated.SimulatedTransport, on_gpu: bool) -> np.ndarray:
        w = np.zeros(200, np.float32)
        mine: Any = {"w": cuda.put(w) if on_gpu else w}
        optimizer = sc.SparseAdamW(mine, 1e-40, comm=transport, density=0.5, wire="plain", check_weights_every=None)
        for step in range(3):
            g = data.gradient("normal", 200, "float32", 10 * step + transport.rank)
            optimizer.step({"w": cuda.put(g) if on_gpu else g})
        cuda.streams.run_all()
        return w

    on_host, on_gpu = (run(2, partial(program, on_gpu=gpu)) for gpu in (False, True))
    for gpu_weights, cpu_weights in zip(on_gpu, on_host, strict=True):
        assert 0 < np.abs(cpu_weights).max() < np.finfo(np.float32).tiny
        assert data.same_bits(gpu_weights, cpu_weights)


@pytest.mark.parametrize("layout", ["0", "000", *NODES[:3]])
def test_training_resumes_from_a_state_after_any_step(layout: str) -> None:
    """Bits are equal even between dense steps and the update of units."""
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

    run_on(layout, program)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["0", "000", "0123", "0011", "0101", "001122", "010110", "00001111"])
@pytest.mark.parametrize("other", ["0", "00", "0123", "0011", "0110", "001122", "000111", "00001111"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resharded_states_keep_everything(layout: str, other: str, dtype: str) -> None:
    """Checks moments, compensations and units of each weight, and the sums of residuals."""
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
    for i, nodes in enumerate([layout, other, layout]):
        results = run_on(nodes, lambda t, s=states, m=mine, n=i: begin(t, s, copy.deepcopy(m), n * steps))  # type: ignore[misc]
        check_equal([result[:2] for result in results])
        if states:
            loaded = [state for *_, state in results]
            (before, units), (after, others) = moments_and_units(states), moments_and_units(loaded)
            for name, moment in before.items():
                lost = moment.pop("compensation"), after[name].pop("compensation")
                assert all(data.same_bits(np.asarray(x), np.asarray(after[name][key])) for key, x in moment.items())
                none = np.zeros(moment["last"].size, np.float32)
                ours, theirs = (none if array is None else array for array in lost)
                np.testing.assert_array_equal(ours, theirs)
                np.testing.assert_array_equal(units[name], others[name])
                sums = (waiting(of_ranks)[name] for of_ranks in (states, loaded))
                np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-5)
        mine, states = results[0][0], [state for _, state, _ in results]


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["00", *NODES[:3]])
@pytest.mark.parametrize("other", ["000", "0011", "010110"])
@pytest.mark.parametrize("odd", [0, 1])
def test_gradients_of_a_step_that_failed_are_in_the_state(layout: str, other: str, odd: int) -> None:
    """The next step applies them, also on other ranks and nodes; on the same ranks with the same bits."""
    P, density, failing = len(layout), 0.3, 3

    def pushed(step: int, rank: int) -> Arrays:
        return adapters.partial_gradients(step, rank, P, SHAPES)

    def begin(transport: simulated.SimulatedTransport) -> Any:
        mine, saved = weights(), []
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=density)
        for step in range(failing + 1):
            saved.append(copy.deepcopy(optimizer.state_dict()))
            optimizer.lr = 0.02 if step == failing and transport.rank == odd else 0.01
            with pytest.raises(sc.SparseCommError) if step == failing else nullcontext():
                optimizer.step(pushed(step, transport.rank))
        saved.append(copy.deepcopy(optimizer.state_dict()))
        loaded = sc.SparseAdamW(copy.deepcopy(mine), 0.01, comm=transport, density=density)
        loaded.load_state_dict(saved[-1])
        optimizer.lr = 0.01
        check_same(loaded.state_dict(), saved[-1])
        for step in range(failing + 1, failing + 4):
            for one in (optimizer, loaded):
                assert one.step(pushed(step, transport.rank)).usable
        check_same(loaded.state_dict(), optimizer.state_dict())
        assert all(data.same_bits(loaded.weights[name], w) for name, w in mine.items())
        return mine, optimizer.state_dict(), saved

    results = run_on(layout, begin)
    check_equal([result[:2] for result in results])
    before, after = (waiting([saved[i] for *_, saved in results]) for i in (-2, -1))
    states = [saved[-1] for *_, saved in results]

    def resume(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=density)
        optimizer.load_state_dict(sc.reshard(states, transport.rank, transport.size))
        state = copy.deepcopy(optimizer.state_dict())
        assert optimizer.step(gradients(failing + 1, transport.rank)).usable
        assert not optimizer.state_dict()["unsummed"]
        return mine, optimizer.state_dict(), state

    resumed = run_on(other, resume)
    check_equal([result[:2] for result in resumed])
    others = waiting([state for *_, state in resumed])
    for name, w in before.items():
        added = sum(g[name].ravel() for g in (pushed(failing, rank) for rank in range(P)) if name in g)
        for sums in (after, others):
            np.testing.assert_allclose(sums[name], w + added, rtol=1e-5, atol=1e-6 * (1 + np.abs(w).max(initial=0)))


@pytest.mark.parametrize("layout", ["0123", "0011"])
def test_states_of_version_3_load(layout: str) -> None:
    """Such states have whole arrays, which `reshard` divides among the ranks of a node."""

    def program(transport: simulated.SimulatedTransport, states: list[Any]) -> Any:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, density=0.3)
        if states and layout == "0123":
            optimizer.load_state_dict(states[transport.rank])
            check_same(optimizer.state_dict(), states[transport.rank] | {"slices": None, "unsummed": {}})
        elif states:
            with pytest.raises(sc.InvalidInputError, match=r"convert the states of all ranks with sparsecomm\.reshard"):
                optimizer.load_state_dict(states[transport.rank])
            optimizer.load_state_dict(sc.reshard(states, transport.rank, transport.size))
        loaded = copy.deepcopy(optimizer.state_dict())
        for step in range(3):
            optimizer.step(gradients(step, transport.rank))
        return mine, optimizer.state_dict(), loaded

    states = [state for _, state, _ in run_on("0123", lambda transport: program(transport, []))]
    before = waiting(states), moments_and_units(states)[1]
    for state in states:
        del state["slices"], state["unsummed"]
        state["format"] = "SparseAdamW 3"
    results = run_on(layout, lambda transport: program(transport, states))
    check_equal([result[:2] for result in results])
    loaded = [state for *_, state in results]
    for ours, theirs in zip(before, (waiting(loaded), moments_and_units(loaded)[1]), strict=True):
        for name, array in ours.items():
            np.testing.assert_allclose(theirs[name], array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["0", "000", "0011", "010110"])
def test_states_of_version_2_load(layout: str) -> None:
    """Such states have whole moments, equal on all ranks. They have no units: those were always sqrt(v) + eps.

    A weight without updates has a second moment only for its unit.
    """
    P, rng, step = len(layout), np.random.default_rng(4), 9
    moments: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        last = np.array(rng.integers(0, step + 1, shape), np.int32)
        mean = np.where(last > 0, rng.standard_normal(shape), 0).astype(np.float32)
        squares = np.array(10.0 ** rng.uniform(-6, 2, shape), np.float32)
        moments[name] = {"mean": mean, "squares": squares, "last": last, "step": step}
    waiting = [{name: moment["mean"] * 0.1 * rank for name, moment in moments.items()} for rank in range(P)]
    saved = copy.deepcopy(moments)
    rule: dict[str, Any] = {"density": 1.0, "eps": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer = sc.SparseAdamW(mine, 0.01, comm=transport, **rule)
        state = {
            key: x
            for key, x in optimizer.state_dict().items()
            if key not in ("units", "units_lag", "slices", "unsummed")
        }
        state |= {"format": "SparseAdamW 2", "step": step, "moments": saved, "residuals": waiting[transport.rank]}
        optimizer.load_state_dict(state)
        loaded = copy.deepcopy(optimizer.state_dict())
        optimizer.step(gradients(step, transport.rank))
        if transport.rank == P - 1 > 0:
            state["moments"] = copy.deepcopy(saved)
            state["moments"]["bias"]["squares"][3] *= 16
        if P > 1:
            with pytest.raises(sc.InvalidInputError, match="differ in moments"):
                optimizer.load_state_dict(state)
        return mine, optimizer.state_dict(), loaded

    results = run_on(layout, program)
    assert all(data.same_bits(saved[name]["squares"], moment["squares"]) for name, moment in moments.items())
    check_equal([result[:2] for result in results])
    after, units = moments_and_units([loaded for *_, loaded in results])
    for name, moment in moments.items():
        root, updated = np.sqrt(moment["squares"].ravel()) + np.float32(1e-3), moment["last"].ravel() > 0
        np.testing.assert_array_equal(units[name], 2.0 ** np.floor(np.log2(root)))
        np.testing.assert_array_equal(after[name]["squares"], np.where(updated, moment["squares"].ravel(), 0))
        total = sum(
            gradients(step, rank)[name].ravel() + waiting[rank][name].ravel() * units[name] for rank in range(P)
        )
        last, flat = moment["last"].ravel(), [moment[key].ravel().astype(float) for key in ("mean", "squares")]
        a = step + 1 - last
        flat[1] = np.where(updated, flat[1], 0)
        arguments = weights()[name].ravel().astype(float), *flat, total / P / a, a, step + 1, 0.01, 0.1
        expected = adamw(*arguments, betas=rule["betas"], eps=rule["eps"])[0]
        np.testing.assert_allclose(results[0][0][name].ravel(), expected, rtol=1e-5, atol=1e-5)


CHANGES = [  # old layout, old rank of each new rank (None: it joins), new layout
    ("001122", [0, 1, 4, 5], "0011"),
    ("0011", [0, 1, 2], "001"),
    ("000111", [0, 2, 3, 5], "0011"),
    ("0011", [0, 2], "00"),  # one slice is lost
    ("0011", [3, 0, 2, 1], "0011"),
    ("0011", [0, 1, 2, 3], "0123"),
    ("01", [0, None, 1, None], "0011"),
    ("0011", [None, 0, 1, 2, None, 3], "010110"),
    ("0011", [0, None, 1, None], "0011"),
    ("0", [None, 0, None, None], "0011"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layout", "stay", "other"), CHANGES, ids=str)
@pytest.mark.parametrize("dense_steps", [0, 3, 4])
@pytest.mark.parametrize("times", [1, 2])
def test_nodes_change(layout: str, stay: list[int | None], other: str, dense_steps: int, times: int) -> None:
    """`rebuild` runs once, or twice after a failed step. With 4 dense steps, units lag.

    Residuals and moments that joining ranks had before are dropped.
    """
    steps, schedule = 4, lambda step: 1.0 if step < dense_steps else 0.3
    fails = times == 2 and len(layout) > 1

    def made(transport: simulated.SimulatedTransport) -> sc.SparseAdamW:
        return sc.SparseAdamW(weights(), 0.01, comm=transport, density=schedule)

    def begin(transport: simulated.SimulatedTransport) -> Any:
        optimizer = made(transport)
        for step in range(steps):
            optimizer.step(gradients(step, transport.rank))
        if fails:
            optimizer.lr = 0.02 if transport.rank == 0 else 0.01
            with pytest.raises(sc.CollectiveMismatchError):
                optimizer.step(gradients(steps, transport.rank))
            optimizer.lr = 0.01
        return optimizer, copy.deepcopy(optimizer.state_dict())

    def begin_elsewhere(transport: simulated.SimulatedTransport) -> sc.SparseAdamW:
        optimizer = made(transport)
        optimizer.step({name: np.asarray(100 * gradient) for name, gradient in gradients(0, 0).items()})
        return optimizer

    old, stale = run_on(layout, begin), [*run(1, begin_elsewhere), *run(1, begin_elsewhere), *run(1, begin_elsewhere)]
    stayed = [old[rank][1] for rank in stay if rank is not None]
    (moments, units), before = moments_and_units([state for _, state in old]), waiting(stayed)
    lost, elements = len(layout) - len(stayed), sum(residual.size for residual in stayed[0]["residuals"].values())

    def program(transport: simulated.SimulatedTransport) -> Any:
        rank = stay[transport.rank]
        optimizer = stale[stay[: transport.rank].count(None)] if rank is None else old[rank][0]
        for name, w in old[0][0].weights.items():
            optimizer.weights[name][...] = w
        for time in range(times):
            rebuilt = optimizer.rebuild(transport, joining=rank is None and not time)
            assert len(rebuilt.ranks_lost) == (0 if time else lost)
            assert rebuilt.elements_lost == len(rebuilt.ranks_lost) * elements
            assert rebuilt.step == steps + fails
        state = copy.deepcopy(optimizer.state_dict())
        for step in range(steps, steps + 3):
            assert optimizer.step(gradients(step, transport.rank)).usable
        assert not optimizer.state_dict()["unsummed"]
        return optimizer.weights, optimizer.state_dict(), state

    results = run_on(other, program)
    check_equal([result[:2] for result in results])
    states = [state for *_, state in results]
    after, others = moments_and_units(states)
    waits = waiting(states)
    for name, moment in moments.items():
        has_unit, has_moments = (np.zeros(moment["last"].size, bool) for _ in range(2))
        for state in stayed:
            has_unit[slice(*part_of(state, name))] = True
            has_moments[slice(*state["moments"][name]["part"])] = True
        np.testing.assert_array_equal(others[name][has_unit], units[name][has_unit])
        np.testing.assert_allclose(
            waits[name], before[name], rtol=1e-6, atol=1e-6 * (1 + np.abs(before[name]).max(initial=0))
        )
        for key in ("mean", "squares", "last"):
            np.testing.assert_array_equal(after[name][key][has_moments], moment[key][has_moments])
        assert not after[name]["mean"][~has_moments].any()
        assert (after[name]["last"][~has_moments] == steps).all()
        if dense_steps < 4 or not has_moments.any():
            np.testing.assert_allclose(
                after[name]["squares"][~has_moments], 2 * others[name][~has_moments] ** 2, rtol=1e-6
            )


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("layout", ["00", "0011"])
def test_ranks_that_are_a_step_apart_go_on_together(behind: int, layout: str) -> None:
    def waits(state: Any) -> Arrays:
        units = {name: np.exp2(units_of(state, name) - 127.0) for name in SHAPES}
        return {name: w.ravel() * units[name] for name, w in state["residuals"].items()}

    def begin(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer, adamw = sc.SparseAdamW(mine, 0.01, comm=transport, density=0.3), None
        for step in range(5):
            if step == 4 and transport.rank == behind:
                adamw, bucket = optimizer._adamw, optimizer.reducer.buckets[0]
                saved = copy.deepcopy((mine, adamw.moments, adamw.steps, bucket.exponents, bucket.residual))
            optimizer.step(gradients(step, transport.rank))
        if adamw is not None:  # undo the step, as if the last call had failed on this rank
            adamw.adopt(saved[1], saved[2])
            bucket.exponents[:], bucket.residual[:] = saved[3:]
            optimizer.reducer._open.number = 4
            for name, w in saved[0].items():
                mine[name][...] = w
        return optimizer, waits(optimizer.state_dict())

    old = run_on(layout, begin)

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer, waiting = old[transport.rank]
        assert optimizer.rebuild(transport).steps_apart == 1
        for name, w in old[0][0].weights.items():
            optimizer.weights[name][...] = w
        state = copy.deepcopy(optimizer.state_dict())
        for name, w in waits(state).items():
            np.testing.assert_allclose(w, waiting[name], rtol=1e-6)
        optimizer.load_state_dict(state)
        for step in range(6, 9):
            optimizer.step(gradients(step, transport.rank))
        return optimizer.weights, optimizer.state_dict()

    check_equal(run_on(layout, program))


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("dense_steps", [0, 3])
@pytest.mark.parametrize("layout", ["00", "0011"])
def test_ranks_of_which_one_has_not_finished_a_preliminary_call_go_on_together(
    dense_steps: int, behind: int, layout: str
) -> None:
    """That rank has no moments yet, or still has the old units after dense steps."""

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
        optimizer.reducer.forget_preliminary_calls()
        assert (bucket.exponents != before[0]).any()
        if transport.rank == behind:
            bucket.exponents[:], bucket.residual[:] = before
            bucket.units_lag = bool(dense_steps)
            adamw.adopt(adamw.moments if dense_steps else {}, adamw.steps)
        return optimizer

    old = run_on(layout, begin)

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer = old[transport.rank]
        assert not optimizer.rebuild(transport).steps_apart
        for step in range(dense_steps, dense_steps + 3):
            optimizer.step(gradients(step, transport.rank))
        return optimizer.weights, optimizer.state_dict()

    check_equal(run_on(layout, program))


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
