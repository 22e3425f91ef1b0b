"""States of `sparsecomm.SparseAdamW` on simulated ranks: after any step, for other ranks, and after failures."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import CpuBackend
from sparsecomm.transport import simulated
from tests import data
from tests.optimizers import adapters
from tests.optimizers.adapters import NODES, run_on
from tests.optimizers.oracle import (
    SHAPES,
    Arrays,
    check_equal,
    check_same,
    gradients,
    moments_and_units,
    waiting,
    weights,
)


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
