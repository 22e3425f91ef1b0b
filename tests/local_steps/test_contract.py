"""Local steps with arrays, a PyTorch model and a JAX tree, compared with the algorithm in plain NumPy."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.local_steps.adapters import ADAPTERS, OnArrays
from tests.local_steps.programs import DTYPES, SHAPES, Oracle, initial, left_out, nothing_frozen, some_frozen
from tests.ranks import number_reducers_from_0, run
from tests.reducer.programs import bits

TWO = (("f", "a"), ("b", "c", "d", "e"))
UNEVEN: dict[str, Any] = {"sync_every": 4, "fragments": 2, "fragment_update_alpha": 0.25, "by_speed": True}


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Iterator[type[OnArrays]]:
    if request.param != "jax":
        yield ADAPTERS[request.param]
        return
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    yield ADAPTERS[request.param]
    jax.config.update("jax_enable_x64", before)


@pytest.mark.covering(2)
@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("density", "fragments", "sync_every", "delay", "alpha", "sgd", "frozen"),
    [
        (0.1, 1, 3, 0, 0.0, None, nothing_frozen),
        (0.1, TWO, 4, 2, 0.25, (0.7, 0.9, True), some_frozen),
        (0.3, 3, 5, 4, 0.5, (0.5, 0.5, False), nothing_frozen),
        (0.3, 1, 4, 2, 0.0, (0.5, 0.5, False), some_frozen),
        (1.0, 2, 2, 0, 0.0, (0.7, 0.9, True), some_frozen),
        (1.0, 1, 1, 0, 0.0, (1.0, 0.0, False), nothing_frozen),  # parameters are averaged
        (1.0, 6, 6, 5, 0.0, None, nothing_frozen),
    ],
)
def test_the_whole_algorithm(
    adapter: type[OnArrays],
    P: int,
    density: float,
    fragments: Any,
    sync_every: int,
    delay: int,
    alpha: float,
    sgd: Any,
    frozen: Any,
) -> None:
    steps = 4 * sync_every + 1
    schedule = {"sync_every": sync_every, "fragment_sync_delay": delay, "fragment_update_alpha": alpha}

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = adapter(transport, density, sgd, fragments=fragments, **schedule)
        changed = []
        for step in range(1, steps + 1):
            mine.step(transport.rank, step, frozen)
            changed.append({name: array.copy() for name, array in mine.values().items()})
        assert (mine.local.round, mine.local.local_step) == divmod(steps, sync_every)
        residuals = [np.asarray(a) for r in mine.local.state_dict()["reducers"] for a in r["residuals"].values()]
        return mine.local.fragments, mine.values(), mine.global_parameters(), residuals

    results = run(P, program)
    names = [[list(SHAPES)[i] for i in positions] for positions in positions_of(results[0][0])]
    oracle = Oracle(P, names, sync_every, delay, alpha, density, sgd=sgd, frozen=frozen)
    oracle.train(steps)
    exact = adapter is OnArrays and (density < 1 or P < 3)  # dense sums add in another order
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-6, "atol": 2e-6}
    for rank, (_, parameters, globals_, residuals) in enumerate(results):
        assert bits(globals_) == bits(results[0][2])
        residual_of = dict(zip([name for part in names for name in part], residuals, strict=True))
        for name, shape in SHAPES.items():
            assert parameters[name].dtype == DTYPES[name]
            chosen = close if exact or DTYPES[name] != "float16" else {"rtol": 1e-3, "atol": 1e-3}
            for values, expected in (
                (parameters[name], oracle.local[rank][name]),
                (globals_[name], oracle.globals[name]),
                (residual_of[name], oracle.residuals[rank][name]),
            ):
                np.testing.assert_allclose(values, expected.reshape(shape), err_msg=name, **chosen)


def positions_of(fragments: Any) -> list[list[int]]:
    """Return the positions of each fragment's parameters; adapters name them differently."""
    order = sorted(name for names in fragments for name in names)
    return [[order.index(name) for name in names] for names in fragments]


@pytest.mark.parametrize("delay", [0, 2])
def test_slow_late_and_resumed_ranks_do_what_they_do_with_arrays(delay: int) -> None:
    """The results are equal bit for bit, since all factors are powers of two."""

    def program(transport: simulated.SimulatedTransport, adapter: type[OnArrays], stops: bool) -> Any:
        def new() -> OnArrays:
            return adapter(transport, sgd=(0.5, 0.5, True), fragment_sync_delay=delay, **UNEVEN)

        mine, step = new(), 0
        while mine.local.round < 5:
            step += 1
            transport.compute(1.0 + 4 * transport.rank)
            if transport.rank == 1 and step in (2, 3, 5):
                left_out(mine.local)
            mine.step(transport.rank, step, some_frozen)
            if stops and (mine.local.round, mine.local.local_step) == (3, 0):
                state, values = pickle.loads(pickle.dumps(mine.local.state_dict())), mine.values()
                values = {name: array.copy() for name, array in values.items()}
                mine.finish()  # must not change the saved state
                number_reducers_from_0(transport)  # as in a new process
                mine, stops = new(), False
                mine.write(values)
                mine.local.load_state_dict(state)
        mine.finish()
        return mine.local.steps, mine.local.left_out, bits(mine.values()), bits(mine.global_parameters())

    outcomes = {
        (name, stops): run(2, lambda transport, a=adapter, s=stops: program(transport, a, s))
        for name, adapter in ADAPTERS.items()
        for stops in (False, True)
    }
    for case, results in outcomes.items():
        assert results == outcomes["arrays", False], case


@pytest.mark.parametrize("delay", [0, 1])
def test_after_an_error_ranks_lose_one_and_take_in_another(adapter: type[OnArrays], delay: int) -> None:
    """The error resets local parameters to the global ones. Then rank 2 leaves, and a rank with other weights joins."""
    options: dict[str, Any] = {"sync_every": 2, "decay": 1.0, "fragment_sync_delay": delay}

    def begin(transport: simulated.SimulatedTransport) -> Any:
        mine = adapter(transport, sgd=(0.5, 0.5, True), **options)
        mine.local.reducers[0]._open.number += 100 * (transport.rank == 1)
        mine.step(transport.rank, 1)
        with pytest.raises(sc.CollectiveMismatchError, match=r"step is (0 on .*100|100 on .* 0) on rank"):
            mine.step(transport.rank, 2)
        mine.local.reducers[0]._open.number = 1
        mine.finish()
        assert bits(mine.values()) == bits(initial())
        return mine

    old = run(3, begin)

    def survive(transport: simulated.SimulatedTransport) -> Any:
        mine = old[transport.rank]
        rebuilt = mine.rebuild(transport)
        for step in range(3, 7):
            mine.step(transport.rank, step)
        return rebuilt.ranks_lost

    assert run(2, survive) == [(2,)] * 2

    def join(transport: simulated.SimulatedTransport) -> Any:
        if transport.rank < 2:
            mine = old[transport.rank]
        else:
            mine = adapter(
                transport,
                sgd=(0.5, 0.5, True),
                start={n: np.asarray(3 * a, a.dtype) for n, a in initial().items()},
                **options,
            )
        rebuilt = mine.rebuild(transport, joining=transport.rank == 2)
        if transport.rank == 2:
            globals_ = mine.global_parameters()
            assert bits(mine.values()) == bits({name: globals_[name].astype(DTYPES[name]) for name in SHAPES})
        for step in range(7, 11):
            mine.step(transport.rank, step)
        mine.finish()
        return rebuilt.ranks_joined, mine.local.round, bits(mine.global_parameters())

    results = run(3, join)
    assert results == [((2,), results[0][1], results[0][2])] * 3


def test_forwarded_methods(adapter: type[OnArrays]) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = adapter(transport, sync_every=2, fragments=2)
        for step in range(1, 4):
            mine.step(transport.rank, step)
        local = mine.local
        local.rest()
        assert (local.steps, local.left_out, len(local.reducers)) == ((2, 2), (), 2)
        assert "6 tensors" in repr(local)
        assert "round" in local.report()
        assert any(reducer.residual(name).any() for reducer in local.reducers for name in reducer.names)
        local.discard()
        assert not any(reducer.residual(name).any() for reducer in local.reducers for name in reducer.names)

    run(2, program)
