"""Interrupts of ranks over MPI: while states are loaded, and while other ranks are waited for in steps.

Every rank runs this file.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
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


# -- steps in which an interrupted rank waits for the others ----------------------------------------------------------


class RaisedByHandlerError(Exception):
    pass


def of_arrays(comm: Any) -> tuple[Callable[[int], object], Callable[[], list[bytes]]]:
    weights = {"a": np.ones(400, np.float32)}
    optimizer = sc.SparseAdamW(weights, comm=comm, check_weights_every=2)
    return lambda i: optimizer.step({"a": gradient(i)}), lambda: [weights["a"].tobytes()]


def of_torch(comm: Any, kind: str) -> tuple[Callable[[int], object], Callable[[], list[bytes]]]:
    torch = pytest.importorskip("torch")
    import sparsecomm.torch as sct

    model = torch.nn.Linear(20, 20)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    options = {"comm": comm, "check_weights_every": 2}
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "SparseAdamW":
        optimizer = sct.SparseAdamW(model.named_parameters(), **options)
    else:
        optimizer = sct.DistributedOptimizer(optimizer, model.named_parameters(), 0.5, **options)
    made = -1

    def act(i: int) -> None:
        nonlocal made
        if made < i:  # the means go to where gradients were in the beginning
            model.weight.grad, model.bias.grad, made = torch.from_numpy(gradient(i)).view(20, 20), torch.ones(20), i
        optimizer.step()

    return act, lambda: [p.detach().numpy().tobytes() for p in model.parameters()]


OPERATIONS: dict[str, Any] = {
    "arrays": of_arrays,
    "torch": lambda comm: of_torch(comm, "SparseAdamW"),
    "DistributedOptimizer": lambda comm: of_torch(comm, "DistributedOptimizer"),
}


def gradient(step: int) -> np.ndarray:
    return np.random.default_rng((RANK, step)).integers(-9, 10, 400).astype(np.float32)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_step_interrupted_where_it_waits_goes_on(operation: str) -> None:
    """Rank 0, and then the last one, is interrupted in a step before which weights are compared, and calls it again."""
    found = []
    previous = signal.signal(signal.SIGALRM, raises)
    try:
        for interrupts in (False, True):
            comm = WORLD.Dup()
            step, held = OPERATIONS[operation](comm)
            for i in range(3):
                late = interrupts and (0 if i else P - 1) == RANK
                WORLD.Barrier()
                if interrupts and not late:
                    time.sleep(0.15)
                raised = False
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.05 if late and P > 1 else 0)
                    step(i)
                except RaisedByHandlerError:
                    raised = True
                signal.setitimer(signal.ITIMER_REAL, 0)
                if raised:
                    step(i)
                assert raised == (late and P > 1)
            found.append(held())
            assert WORLD.allgather(found[-1]) == [found[0]] * P
            WORLD.Barrier()
            comm.Free()
    finally:
        signal.signal(signal.SIGALRM, previous)


def raises(*_: object) -> None:
    raise RaisedByHandlerError
