"""States that are loaded between ranks, over MPI, and interrupts of it. Every rank runs this file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from tests.interrupts import InterruptError, interrupted
from tests.mpi.ranks import RANK, WORLD, P

STRIDE = 1 if os.environ.get("SPARSECOMM_TEST_ALL") else 9


def trained(kind: str) -> Any:
    made: Any
    parameters = {"a": np.ones(40, np.float32), "b": np.zeros((3, 2))}
    if kind == "Reducer":
        made = sc.Reducer(parameters, 0.1, momentum=0.5)
        for _ in range(2):
            made.reduce({name: a + RANK for name, a in parameters.items()})
    else:
        made = sc.LocalSteps(parameters, sync_every=4, fragments=2, fragment_sync_delay=1, outer=sc.NesterovSGD())
        for _ in range(5):
            parameters["a"] += RANK
            made.step(parameters)
        made.finish(parameters)
    return made


def bits(state: Any) -> str:
    return repr(state) if not isinstance(state, dict) else str({key: bits(each) for key, each in state.items()})


@pytest.mark.parametrize("kind", ["Reducer", "LocalSteps"])
def test_an_interrupt_anywhere_parts_no_ranks(kind: str) -> None:
    """Rank 0 is interrupted, at every point in turn, also while it waits for the comparison."""
    it = trained(kind)
    new, number, done, loads = it.state_dict(), 0, False, 0
    if kind == "Reducer":
        it.discard()
        old = {**it.state_dict(), "step": 0}
    else:
        old = {**new, "round": 0, "local_step": 0, "passed": 0}
    while not done:
        it.load_state_dict(old)
        raised = None
        try:
            with interrupted(*[number] * (RANK == 0)):
                it.load_state_dict(new)
        except (InterruptError, sc.SparseCommError) as error:
            raised = error
        held = bits(it.state_dict())
        loaded = WORLD.allreduce(held == bits(new))
        assert loaded in (0, P), (number, raised)
        assert held == bits(new if loaded else old), (number, raised)
        loads += loaded > 0
        done = WORLD.bcast(raised is None)
        number += STRIDE
    assert number > STRIDE  # there were interrupts
    assert loads >= 1


@pytest.mark.parametrize("error", [OSError, MemoryError, KeyboardInterrupt])
def test_a_state_that_cannot_be_read_on_one_rank_is_loaded_by_none(error: type[BaseException]) -> None:
    class Damaged(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            if key == "residuals":
                raise error("Input/output error")
            return super().__getitem__(key)

    it = trained("Reducer")
    before = bits(it.state_dict())
    state = it.state_dict() | {"step": 9}
    with pytest.raises(error if error is KeyboardInterrupt and RANK == P - 1 else sc.InvalidInputError):
        it.load_state_dict(Damaged(state) if RANK == P - 1 else state)
    assert bits(it.state_dict()) == before
