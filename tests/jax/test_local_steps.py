"""Local steps of pytrees: what `sparsecomm.LocalSteps` does with NumPy arrays, without writing in place."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import sparsecomm as sc  # noqa: E402
import sparsecomm.jax as sj  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.local_steps.programs import PLAIN, Arrays, bits, initial, left_out, made, move, some_frozen  # noqa: E402
from tests.reducer.programs import run  # noqa: E402

SETTINGS: dict[str, Any] = {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.25}


@pytest.fixture(autouse=True)
def _with_float64() -> Any:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def tree(arrays: Arrays) -> Any:
    first, *rest = (jnp.array(values) for values in arrays.values())
    return {"first": first, "rest": rest}


def untree(params: Any) -> Arrays:
    return dict(zip(initial(), [np.array(leaf) for leaf in (params["first"], *params["rest"])], strict=True))


def moved(params: Any, rank: int, step: int) -> Any:
    arrays = untree(params)
    move(arrays, rank, step, some_frozen)
    return tree(arrays)


def nesterov() -> Any:
    optax = pytest.importorskip("optax")
    return optax.sgd(0.5, 0.5, nesterov=True)  # powers of two: exact, in whatever order


@pytest.mark.parametrize("delay", [0, 2])
def test_slow_and_late_ranks_do_what_they_do_with_arrays(delay: int) -> None:
    """Also where leaves are replaced and then read in one call of `step`."""
    options = SETTINGS | {"fragment_sync_delay": delay, "by_speed": True}

    def program(transport: simulated.SimulatedTransport, *, trees: bool) -> Any:
        arrays, step = initial(), 0
        params = tree(arrays)
        local: Any = (
            sj.LocalSteps(params, 0.1, comm=transport, **(PLAIN | options))
            if trees
            else made(transport, arrays, **options)
        )
        while local.round < 5:
            step += 1
            transport.compute(1.0 + 4 * transport.rank)
            if transport.rank == 1 and step in (2, 3, 5):
                left_out(local)
            if trees:
                params = local.step(moved(params, transport.rank, step))
            else:
                move(arrays, transport.rank, step, some_frozen)
                local.step(arrays)
        return local.steps, bits(untree(params) if trees else arrays)

    with_trees, with_arrays = (run(2, lambda transport, b=b: program(transport, trees=b)) for b in (True, False))
    assert with_trees == with_arrays


@pytest.mark.parametrize("outer", [None, nesterov])
def test_trees_are_trained_as_arrays_are(outer: Any) -> None:
    def arrays(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = made(transport, parameters, outer=outer and sc.NesterovSGD(0.5, 0.5), **SETTINGS)
        for step in range(1, 10):
            move(parameters, transport.rank, step, some_frozen)
            local.step(parameters)
        local.finish(parameters)
        return parameters, dict(local.global_parameters())

    def trees(transport: simulated.SimulatedTransport) -> Any:
        def new(params: Any) -> sj.LocalSteps:
            return sj.LocalSteps(params, 0.1, comm=transport, outer=outer and outer(), **PLAIN, **SETTINGS)

        params = tree(initial())
        local = new(params)
        for step in range(1, 10):
            given = params = moved(params, transport.rank, step)
            before = bits(untree(given))
            params = local.step(given)
            assert (params is given) == (step not in (2, 4, 6, 8))
            assert bits(untree(given)) == before
            if step == 5:
                state = local.state_dict()
                local.finish(params)
                transport.queue.users = 0
                local = new(params)
                local.load_state_dict(state)
        params = local.finish(params)
        return untree(params), untree(local.global_parameters())

    for (mine, held), (theirs, expected) in zip(run(2, trees), run(2, arrays), strict=True):
        assert bits(mine) == bits(theirs)
        assert {name: a.dtype for name, a in held.items()} == {name: a.dtype for name, a in expected.items()}
        for name in held:
            np.testing.assert_allclose(held[name], expected[name], rtol=1e-6)


def test_after_an_error_the_next_call_returns_the_global_leaves_and_a_new_rank_gets_them() -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        params = tree(initial())
        local = sj.LocalSteps(params, 0.1, comm=transport, sync_every=2 + transport.rank, **PLAIN)
        for step in range(1, 2 + transport.rank):
            params = local.step(moved(params, transport.rank, step))
        with pytest.raises(sc.CollectiveMismatchError):
            local.step(moved(params, transport.rank, 9))
        params = local.finish(params)
        assert bits(untree(params)) == bits(initial())
        other = sj.LocalSteps(params if transport.rank else jax.tree.map(lambda leaf: 3 * leaf, params), 0.1, **PLAIN)
        rebuilt, params = other.rebuild(transport, params, joining=transport.rank == 0)
        assert bits(untree(params)) == bits(initial())
        return rebuilt.ranks_joined

    assert run(2, program) == [(0,), (0,)]


def test_what_is_refused() -> None:
    params = tree(initial())
    local = sj.LocalSteps(params, scope="tensor")
    with pytest.raises(sc.InvalidInputError, match="expected PyTreeDef"):
        local.step(params["rest"])
    with pytest.raises(sc.InvalidInputError, match=r"params\['first'\]: got ndarray; expected a JAX array"):
        local.step(params | {"first": np.zeros((20, 30), np.float32)})
    with pytest.raises(sc.InvalidInputError, match=r"got a traced array; call LocalSteps outside of jax\.jit"):
        jax.jit(local.step)(params)
    assert local.step(params) is params


@pytest.mark.parametrize("whom", [(1,), (0, 1)])
@pytest.mark.parametrize("what", ["shape", "type", "number", "name", "no leaves", "text"])
def test_a_damaged_optax_state_is_loaded_by_no_rank(what: str, whom: tuple[int, ...]) -> None:
    optax = pytest.importorskip("optax")

    def program(transport: simulated.SimulatedTransport) -> None:
        params = tree(initial())
        local = sj.LocalSteps(params, 0.1, comm=transport, outer=optax.adam(0.1), sync_every=1, **PLAIN)
        params = local.step(moved(params, transport.rank, 1))
        state = local.state_dict()
        leaves = dict(state["outer"]["leaves"])
        name = next(iter(leaves))
        many = leaves[name]
        changed: dict[str, object] = {
            "shape": {name: [np.zeros(3, np.float32) for _ in many]},
            "type": {name: [np.asarray(leaf).astype(np.float16) for leaf in many]},
            "number": {name: many[:1]},
            "name": {"z": many},
            "no leaves": {name: 3},
            "text": {name: [np.array("x") for _ in many]},
        }
        damaged = state | {"outer": {"leaves": leaves | changed[what]}}  # type: ignore[operator]
        with pytest.raises(sc.InvalidInputError, match=r"outer|rank 1"):
            local.load_state_dict(damaged if transport.rank in whom else state)
        local.load_state_dict(state)
        local.step(moved(params, transport.rank, 2))

    run(2, program)
