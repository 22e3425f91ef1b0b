"""Local steps of pytrees, besides what `tests/local_steps/test_contract.py` tests."""

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
from tests.local_steps.programs import PLAIN, Arrays, bits, initial, move  # noqa: E402
from tests.reducer.programs import run  # noqa: E402


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
    move(arrays, rank, step)
    return tree(arrays)


def test_trees_are_replaced_and_never_written() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        params = tree(initial())
        local = sj.LocalSteps(params, 0.1, comm=transport, sync_every=4, fragments=2, **PLAIN)
        for step in range(1, 10):
            trained = moved(params, transport.rank, step)
            before = bits(untree(trained))
            params = local.step(trained)
            assert (params is trained) == (step not in (2, 4, 6, 8))
            assert bits(untree(trained)) == before

    run(2, program)


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
