"""Local steps between ranks, over MPI, with exchanges beside them: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import sparsecomm as sc
from tests.local_steps.programs import PLAIN, Oracle, bits, comes_late, initial, nothing_is_lost, train
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


@pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="no thread may make calls")
@pytest.mark.parametrize(("delay", "by_speed"), [(0, True), (1, False)])
def test_a_rank_that_is_late_is_left_out_and_nothing_is_lost(
    delay: int, by_speed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def rendezvous() -> None:
        if RANK > 0:
            WORLD.send(None, 0)
        else:
            for rank in range(1, P):
                WORLD.recv(source=rank)

    caplog.set_level(logging.WARNING, "sparsecomm")
    _, mine = comes_late(RANK, rendezvous, fragment_sync_delay=delay, by_speed=by_speed)
    outcomes = WORLD.allgather(mine)
    assert len({each["held"].tobytes() for each in outcomes}) == 1
    assert P == 1 or all(each["seen"] >= {0} for each in outcomes)
    assert ("is late for the exchange" in caplog.text) >= (RANK == 0 < P - 1)
    if delay == 0:
        nothing_is_lost(outcomes)
    if by_speed and P > 1:
        assert any(steps[0] > steps[1] for steps in mine["divisions"])
