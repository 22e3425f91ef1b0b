"""Cases in which a rank dies, run by name on all ranks under ``mpirun --with-ft ulfm``.

mpirun --with-ft ulfm -n 4 python -m tests.mpi.lost_rank FOLDER everywhere 3

The number is the number of ranks that survive.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from mpi4py import MPI

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.algorithms import ALGORITHMS
from tests.waiting import SOON, until

WORLD = MPI.COMM_WORLD
RANK, P = WORLD.Get_rank(), WORLD.Get_size()
VICTIM = 1
FOLDER, SURVIVORS = Path(sys.argv[1]), int(sys.argv[3])
ones = np.ones(1000, np.float32)


def mark(name: str) -> None:
    (FOLDER / f"{name} {RANK}").touch()


def marked(name: str, count: int) -> None:
    """Wait until ``count`` ranks have marked ``name``, without MPI."""
    until(lambda: len(list(FOLDER.glob(f"{name} *"))) >= count, f"{count} ranks at {name!r}")


def die() -> None:
    mark("dead")
    os.kill(os.getpid(), signal.SIGKILL)


def call(comm: MPI.Comm | None = None, **options: object) -> np.ndarray:
    """Make a call with a different number on each rank, and return the sum."""
    out = np.zeros_like(ones)
    sc.sparse_allreduce(ones * (1 + RANK), 1000, comm=comm, out=out, **options)
    return out


def fails(do: Callable[[], object], lost: tuple[int, ...] = (VICTIM,)) -> None:
    """Check that an action soon raises an error that names the dead ranks."""
    marked("dead", len(lost))
    began = time.monotonic()
    with pytest.raises(sc.RankFailedError) as error:
        do()
    assert error.value.ranks == lost, (error.value.ranks, str(error.value))
    assert f"rank {VICTIM}" in str(error.value)
    assert time.monotonic() - began < SOON


def forever(do: Callable[[], object]) -> NoReturn:
    while True:
        do()


def goes_on(comm: MPI.Intracomm, size: int = 3) -> None:
    assert comm.Get_size() == size
    everyone = sum(1 + rank for rank in comm.allgather(RANK))
    for _ in range(3):
        assert np.array_equal(call(comm), everyone * ones)


# -- calls ------------------------------------------------------------------------------------------------------------


def everywhere() -> None:
    """Survivors wait in a call, in background calls, in a broadcast, and for the first call of the dead rank."""
    comms = [WORLD.Dup() for _ in range(5)]
    for comm in comms[:4]:
        call(comm)
    ranks, data = transport.transport_of(comms[2]), np.zeros(100_000, np.uint8)
    residual, began = np.zeros_like(ones), []
    waits: list[Callable[[], object]] = [
        lambda: call(comms[0], residual=residual, algorithm="tree"),
        lambda: fails_each([sc.isparse_allreduce(ones, 10, comm=comms[1]) for _ in range(3)]),
        lambda: ranks.broadcast(data, VICTIM),
        lambda: call(comms[4]),
    ]
    with ThreadPoolExecutor(len(waits)) as threads:
        waiting = [] if RANK == VICTIM else [threads.submit(wait) for wait in waits]
        if RANK == VICTIM:
            marked("waits", P - 1)
            time.sleep(0.3)
            die()
        mark("waits")
        marked("dead", 1)
        began.append(time.monotonic())
        for future in waiting:
            fails(future.result)
    transport.transport_of(comms[3]).close()
    assert time.monotonic() - began[0] < SOON
    assert np.array_equal(residual, ones * (1 + RANK))
    fails(lambda: call(comms[0]))
    goes_on(sc.shrink(comms[4]))
    goes_on(sc.shrink())


def at_a_random_time() -> None:
    """A step of a reducer is counted on all survivors or on none, and its gradient is applied or in the residual."""
    reducer = sc.Reducer({"x": ones}, 1.0, op="sum", scope="tensor", dense_below=0, algorithm="split")
    done, applied = 0, np.zeros_like(ones)
    call()
    if RANK == VICTIM:
        threading.Timer(random.uniform(0, 0.05), die).start()
    try:
        while True:
            out = ones * (1 + RANK)
            reducer.reduce({"x": out})
            applied += out
            done += 1
    except sc.RankFailedError as error:
        assert error.ranks == (VICTIM,)  # noqa: PT017
    assert (applied == done * 10).all()
    assert (reducer.residual("x") == 1 + RANK).all()
    comm = sc.shrink()
    assert comm.allgather(done) == 3 * [done]
    assert reducer.rebuild(comm).ranks_lost == (VICTIM,)
    out = ones * 0
    reducer.reduce({"x": out})
    assert (out == 1 + 3 + 4).all()
    goes_on(comm)


def fails_each(handles: list[sc.Handle]) -> None:
    """All submitted calls fail in the same way, including those that have not begun."""
    for handle in handles[1:]:
        fails(handle.wait)
    handles[0].wait()


def while_one_computes() -> None:
    """A rank that makes no call learns nothing, and the others wait for its vote until it shrinks its communicator."""
    call()
    if RANK == VICTIM:
        die()
    if RANK == 0:
        marked("dead", 1)
        time.sleep(0.5)
    else:
        fails(call)
    goes_on(sc.shrink())


# -- the vote ---------------------------------------------------------------------------------------------------------


def register_late(name: str, then: Callable[[], object]) -> None:
    """Register an algorithm like "butterfly", in which the victim calls ``then`` once all ranks have the result."""

    def run(*arguments: Any) -> sc.SparseVector:
        result = ALGORITHMS["butterfly"].run(*arguments)
        mark(name)
        marked(name, P)
        if RANK == VICTIM:
            then()
        return result

    sc.register_algorithm(replace(ALGORITHMS["butterfly"], name=name, run=run))


def one_leaves_or_dies_when_all_have_the_result() -> None:
    """No rank counts the call, although all have the result. After the error the next call works."""

    def leave() -> None:
        raise KeyError("of this rank")

    register_late("late to leave", leave)
    register_late("late to die", die)
    for algorithm in ("butterfly", "tree"):
        assert np.array_equal(call(algorithm=algorithm), 10 * ones)
    residual = np.zeros_like(ones)
    with pytest.raises(KeyError if RANK == VICTIM else sc.TransportError, match="of this rank"):
        call(residual=residual, algorithm="late to leave")
    assert np.array_equal(residual, ones * (1 + RANK))
    for _ in range(3):
        with pytest.raises(sc.CollectiveMismatchError):
            sc.sparse_allreduce(ones, 5 + (RANK == 2))
        assert np.array_equal(call(), 10 * ones)
    residual = np.zeros_like(ones)
    with pytest.raises(sc.RankFailedError, match="counts on no rank") as error:
        call(residual=residual, algorithm="late to die")
    assert error.value.ranks == (VICTIM,)
    assert np.array_equal(residual, ones * (1 + RANK))
    goes_on(sc.shrink())


def one_never_makes_the_call() -> None:
    """The others time out, give up the communicator, and tell the late rank."""
    call()
    os.environ["SPARSECOMM_TIMEOUT"] = "0.5"
    if RANK == VICTIM:
        marked("late", 3)
    before = transport.transport_of(WORLD)
    residual = np.zeros_like(ones)
    with pytest.raises(sc.TransportError):
        call(residual=residual)
    mark("late")
    assert np.array_equal(residual, ones * (1 + RANK))
    os.environ["SPARSECOMM_TIMEOUT"] = "60"
    assert transport.transport_of(WORLD) is before
    goes_on(sc.shrink(), 4)


# -- other ranks ------------------------------------------------------------------------------------------------------


def another_dies_meanwhile() -> None:
    """Another rank dies while the survivors shrink the communicator, or 0.2 s later."""
    call()
    if RANK == VICTIM:
        die()
    fails(call)
    if RANK == 2:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(0.009)
    comm = sc.shrink()
    if comm.Get_size() == 3:  # the other rank died after the shrink
        with pytest.raises(sc.RankFailedError):
            forever(lambda: call(comm))
        comm = sc.shrink(comm)
    goes_on(comm, 2)


if __name__ == "__main__":
    done = 1
    try:
        globals()[sys.argv[2]]()
        done = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    print(f"rank {RANK}: {'failed' if done else 'well'}", flush=True)
    mark("ended")
    time.sleep(0.3 if done else 0)
    marked("ended", SURVIVORS)  # ranks that have not heard of the first death take a rank that exits for dead, too
    if done:  # mpirun reports ranks that a signal kills, but not ranks that exit
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)  # MPI's finalization may wait for the dead rank
