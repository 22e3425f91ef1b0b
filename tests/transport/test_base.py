"""Objects that upper layers attach to a transport."""

from __future__ import annotations

import gc
import weakref

import numpy as np

import sparsecomm as sc
from sparsecomm.calls.queue import queue_of
from sparsecomm.transport import simulated
from tests.ranks import run


def test_a_transport_is_collected_with_its_queue_and_plans() -> None:
    def program(transport: simulated.SimulatedTransport) -> list[weakref.ref[object]]:
        x = {"x": np.ones(40, np.float32)}
        sc.sparse_allreduce(x["x"], 4, comm=transport)
        sc.Reducer(x, 0.1, comm=transport).reduce(x)
        return [weakref.ref(transport), weakref.ref(queue_of(transport))]

    references = [reference for pair in run(2, program) for reference in pair]
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_close_makes_the_last_calls_first() -> None:
    def program(transport: simulated.SimulatedTransport) -> tuple[bool, bool]:
        handle = sc.isparse_allreduce(np.ones(40, np.float32), 4, comm=transport)
        before = handle._outcome is not None
        transport.close()
        return before, handle.test()

    assert run(2, program) == [(False, True)] * 2
