"""Local steps between ranks, over MPI, with exchanges beside them: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

import sparsecomm as sc
from tests.local_steps.programs import PLAIN, Oracle, bits, initial, train
from tests.mpi.ranks import MPI, RANK, WORLD, P


def test_the_whole_algorithm_with_exchanges_in_the_background() -> None:
    settings = {"sync_every": 6, "fragments": 3, "fragment_sync_delay": 4, "fragment_update_alpha": 0.25}
    parameters = initial()
    local = sc.LocalSteps(parameters, 0.1, outer=sc.NesterovSGD(), **settings, **PLAIN)
    train(local, parameters, RANK, 1, 18)
    oracle = Oracle(P, local.fragments, 6, 4, 0.25, sgd=(0.7, 0.9, True))
    oracle.train(18)
    for name, held in local.global_parameters().items():  # sums of more than two ranks may have another order
        np.testing.assert_allclose(held, oracle.globals[name].reshape(held.shape), rtol=1e-5, atol=1e-5)
    assert len({str(b) for b in WORLD.allgather(bits(local.global_parameters()))}) == 1
    local.finish(parameters)


def test_one_rank_takes_other_rounds_and_all_know() -> None:
    parameters = initial()
    local = sc.LocalSteps(parameters, 0.1, sync_every=2 + (RANK == 1), fragment_sync_delay=1, **PLAIN)
    train(local, parameters, RANK, 1, 1 + (RANK == 1))
    if P == 1:
        train(local, parameters, RANK, 2, 2)
        return
    with pytest.raises(sc.CollectiveMismatchError, match=r"rank 1 has taken 2 local steps"):
        train(local, parameters, RANK, 9, 9)
    for name, held in local.global_parameters().items():
        np.testing.assert_array_equal(held, initial()[name])


@pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="no thread may make calls")
@pytest.mark.parametrize("delay", [0, 1])
def test_a_rank_that_is_late_is_left_out_and_nothing_is_lost(delay: int, caplog: pytest.LogCaptureFixture) -> None:
    """A local step of rank 0 ends when all others are some rounds further."""
    caplog.set_level(logging.WARNING, "sparsecomm")
    random = np.random.default_rng(RANK)
    x = {"x": np.zeros(50)}
    local = sc.LocalSteps(x, 0.2, sync_every=4, fragment_sync_delay=delay, deadline=1.5, **(PLAIN | {"decay": 1.0}))
    moved, seen, step = np.zeros(50), set[int](), 0
    while local.round < 8:
        step += 1
        time.sleep(0.01)
        if RANK == 0 and step == 10:
            for rank in range(1, P):
                WORLD.recv(source=rank)
        change = random.integers(-8, 8, 50)
        x["x"] += change
        moved += change
        before = local.round
        local.step(x)
        if RANK > 0 and before < 5 <= local.round:
            WORLD.send(None, 0)
        seen.update(local.left_out)
    local.finish(x)
    held = local.global_parameters()["x"]
    assert len({held.tobytes() for held in WORLD.allgather(held)}) == 1
    assert P == 1 or 0 in seen
    assert ("has not come to the exchange" in caplog.text) >= (RANK == 0 < P - 1)
    if delay == 0:
        whole = P * held + WORLD.allreduce(x["x"] - held - local.reducers[0].residual("x"))
        np.testing.assert_allclose(whole, WORLD.allreduce(moved), atol=1e-9)
