"""Steps of `sparsecomm.SparseAdamW` on simulated ranks, compared with the rule in plain NumPy."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.optimizers import adapters
from tests.optimizers.adapters import MIN_OWNED, NODES, part_of, run_on
from tests.optimizers.oracle import (
    SHAPES,
    Arrays,
    Oracle,
    adamw,
    check_equal,
    check_same,
    gradients,
    moments_and_units,
    units_of,
    waiting,
    weights,
)
from tests.ranks import run

every_layout = pytest.mark.parametrize("layout", ["0", "00", "000", "00011", *NODES])


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


@pytest.mark.covering(1)
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
