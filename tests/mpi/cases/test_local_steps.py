"""Local steps between ranks, over MPI, with exchanges beside them: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import logging

import pytest

from tests.local_steps.programs import comes_late, nothing_is_lost
from tests.mpi.ranks import MPI, RANK, WORLD, P


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
