"""Local steps of pytrees, besides what `tests/local_steps/test_contract.py` tests."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import sparsecomm as sc  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.local_steps.adapters import OnJax  # noqa: E402
from tests.local_steps.programs import bits  # noqa: E402
from tests.ranks import run  # noqa: E402


@pytest.fixture(autouse=True)
def _with_float64() -> Any:
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


def test_trees_are_replaced_and_never_written() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OnJax(transport, sync_every=4, fragments=2)
        mine.count = lambda: None  # type: ignore[method-assign]
        for step in range(1, 10):
            mine.step(transport.rank, step)
            trained, before = mine.parameters, bits(mine.values())
            mine.parameters = mine.local.step(trained)
            assert (mine.parameters is trained) == (step not in (2, 4, 6, 8))
            assert bits(mine.named(trained)) == before

    run(2, program)


def test_what_is_refused() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OnJax(transport)
        params, local = mine.parameters, mine.local
        with pytest.raises(sc.InvalidInputError, match="expected PyTreeDef"):
            local.step(params["rest"])
        with pytest.raises(sc.InvalidInputError, match=r"params\['first'\]: got ndarray; expected a JAX array"):
            local.step(params | {"first": np.zeros((20, 30), np.float32)})
        with pytest.raises(sc.InvalidInputError, match=r"got a traced array; call LocalSteps outside of jax\.jit"):
            jax.jit(local.step)(params)
        assert local.step(params) is params

    run(1, program)


def test_a_damaged_optax_state_is_loaded_by_no_rank() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OnJax(transport, sgd=(0.5, 0.5, True), sync_every=1)
        mine.step(transport.rank, 1)
        state = mine.local.state_dict()
        leaves = dict(state["outer"]["leaves"])
        name, many = next(iter(leaves.items()))
        damages: list[dict[str, Any]] = [
            {name: [np.zeros(3, np.float32) for _ in many]},
            {name: [np.asarray(leaf).astype(np.float16) for leaf in many]},
            {name: []},
            {"z": many},
            {name: 3},
            {name: [np.array("x") for _ in many]},
        ]
        for damage in damages:
            damaged = state | {"outer": {"leaves": leaves | damage}}
            with pytest.raises(sc.InvalidInputError, match=r"outer|rank 1"):
                mine.local.load_state_dict(damaged if transport.rank == 1 else state)
        mine.local.load_state_dict(state)
        mine.step(transport.rank, 2)

    run(2, program)
