"""Cases that `test_transport.py` runs on every rank: ``main(FOLDER)``."""

# ruff: noqa: PT012 - what a call raises, it raises on its way out

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import sparsecomm as sc
from sparsecomm.transport import control as sc_control
from sparsecomm.transport import transport_of
from sparsecomm.transport.process_group import joining
from sparsecomm.transport.process_group.transport import timeout_of
from tests.transport import conformance
from tests.transport.conformance import CASES, ODD, call, noise, ring, setting, soon
from tests.waiting import SOON, until, until_awaited

RANK, P = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path()  # set by `main`
NEXT, PREVIOUS = (RANK + 1) % P, (RANK - 1) % P


class GroupRanks(conformance.Ranks):
    rank, size = RANK, P

    def comm(self) -> Any:
        return new_group()

    def half(self) -> Any:
        return [new_group(list(range(side, P, 2))) for side in range(2)][RANK % 2]

    def barrier(self) -> None:
        dist.barrier()


def all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * P
    dist.all_gather_object(values, value)
    return values


def new_group(ranks: list[int] | None = None) -> Any:
    return dist.new_group(ranks, backend="gloo")


def what_a_transport_says_of_itself() -> None:
    transport = transport_of()
    assert (transport.rank, transport.size, list(transport.node_of_rank)) == (RANK, P, [0] * P)
    assert transport_of() is transport is transport_of(dist.group.WORLD)
    ring(transport, 100_000)
    peers = {peer.rank: peer for peer in transport.peers()}
    assert list(peers) == [rank for rank in range(P) if rank != RANK]
    assert sum(peer.bytes_sent for peer in peers.values()) > transport.counters.bytes_sent >= 100_000
    assert sum(peer.bytes_received for peer in peers.values()) > transport.counters.bytes_received >= 100_000
    assert all(peer.connections >= 1 and 0 <= peer.round_trip < SOON and peer.rate >= 0 for peer in peers.values())


def links_are_measured_at_the_first_call() -> None:
    """The measurements vary. The choice of "auto" is the same on all ranks, and nothing is lost."""
    group, x, residual = new_group(), np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    result = sc.sparse_allreduce(x, 3, comm=group, residual=residual)
    results = all_gather((result.indices, result.values, residual, sc.explain(100, 3, comm=group).source))
    total = sum(other[2] for other in results)
    total[result.indices] += result.values
    assert np.array_equal(total, P * x)
    for other in results:
        assert np.array_equal(other[0], result.indices)
        assert np.array_equal(other[1], result.values)
        assert other[3] == results[0][3]
        assert other[3].startswith("measured at set-up: ")


def works(comm: Any) -> None:
    result = sc.sparse_allreduce(np.arange(50, dtype=np.float32), 3, comm=comm, algorithm="butterfly")
    assert result.indices.tolist() == [47, 48, 49]
    assert result.values.tolist() == [value * transport_of(comm).size for value in (47, 48, 49)]


# -- groups -----------------------------------------------------------------------------------------------------------


def what_is_no_group() -> None:
    for wrong in ("gloo", 7, object()):
        with pytest.raises(sc.InvalidInputError, match=r"a process group of torch.distributed"):
            transport_of(wrong)
    others = [new_group([rank]) for rank in range(P)][RANK - 1]
    with pytest.raises(sc.InvalidInputError, match="not a member"):
        transport_of(others)
    group = new_group()
    transport = transport_of(group)
    works(transport)
    dist.barrier()
    dist.destroy_process_group(group)
    for comm in (group, transport):
        with pytest.raises(sc.InvalidInputError, match="destroyed"):
            works(comm)
    del comm, group
    gc.collect()
    assert not transport._open
    with pytest.raises(sc.InvalidInputError, match="destroyed"):
        works(transport)
    transport.close()
    works(transport_of())


def _send_control_to_all_but(left_out: int, send: Any, to: int, kind: int, text: bytes) -> None:
    if to != left_out:
        send(to, kind, text)


def ranks_that_leave_a_call_and_end_at_once() -> None:
    """The last rank notices the end before it asks for the reason, which rank 0 has not sent."""
    last = P - 1
    for _ in range(5):
        transport = transport_of(new_group())
        works(transport)
        with soon(), pytest.raises(sc.CollectiveMismatchError, match="k = 1 here, k = 2 there"), call(transport):
            dist.barrier()
            if RANK == 0:
                if last > 1:
                    transport._send_control = partial(_send_control_to_all_but, last, transport._send_control)
                raise sc.CollectiveMismatchError("k = 1 here, k = 2 there")
            if last == RANK:
                dist.barrier()
                time.sleep(0.1)
            transport.receive(1 if last == RANK > 1 else 0)
        if last != RANK:
            transport.close()
            dist.barrier()


def a_peer_that_sends_what_is_no_message() -> None:
    """Invalid messages end the transport with an error that names the peer; unknown control messages end the call."""
    for kind, number, nbytes in [(300, 1, 0), (sc_control.WAITING, -5, 0), (sc_control.LEFT, 1, 2**17 + 1), (99, 1, 0)]:
        transport = transport_of(new_group())
        works(transport)
        dist.barrier()  # all ranks must have left the call
        if RANK == ODD:
            for to in range(P):
                if to != ODD:
                    transport._connections.send_control(to, kind, number, bytes(nbytes))
        else:
            named = pytest.raises(sc.TransportError, match=rf"received from rank {ODD} a (control )?message of")
            with soon(), named, call(transport):
                transport.receive(ODD)
        dist.barrier()


def the_timeout_is_that_of_the_group() -> None:
    """This holds for all calls, and after a change of the timeout. ``SPARSECOMM_TIMEOUT`` overrides it."""

    def alone(act: Callable[[], Any], seconds: float) -> None:
        if RANK == 0:
            why = rf"waited {seconds} s for .*increase the timeout= of the process group, which SPARSECOMM_TIMEOUT"
            with soon(), pytest.raises(sc.TimeoutError, match=why):
                act()
        dist.barrier()

    def wait() -> None:
        with call(transport_of(group)):
            transport_of(group).receive(NEXT)

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=77))
    assert timeout_of(group) == 77.0
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    alone(lambda: transport_of(group), 0.3)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), group)
    works(group)
    assert transport_of(group).timeout == 77.0
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), group)
    alone(wait, 0.2)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), group)
    with setting("SPARSECOMM_TIMEOUT", 0.1):
        alone(wait, 0.1)
    sc.realign(group)
    works(group)


def ranks_of_another_version() -> None:
    """The first call raises an error on all ranks, and may be repeated."""
    group = new_group()
    with pytest.MonkeyPatch.context() as patch:
        if RANK == ODD:
            patch.setattr(joining, "_VERSION", "another")
        with soon(), pytest.raises(sc.TransportError, match=r"rank \d has another version of sparsecomm"):
            transport_of(group)
    works(transport_of(group))


def an_address_that_leads_nowhere() -> None:
    """The rank that cannot connect names the address, and the rank that waits names its peer."""
    group, real = new_group(), joining._find_members
    with pytest.MonkeyPatch.context() as patch, setting("SPARSECOMM_TIMEOUT", 5):
        if RANK == P - 1:
            patch.setattr(joining, "_find_members", lambda *arguments: [m._replace(port=1) for m in real(*arguments)])
            with soon(), pytest.raises(sc.TransportError, match=r"cannot connect to rank \d at 127.0.0.1, port 1: "):
                transport_of(group)
        else:
            with soon(), pytest.raises(sc.TransportError, match=rf"waited 5 s for connections with rank {P - 1}, at"):
                transport_of(group)


def many_groups() -> None:
    """Destroyed groups leave no threads or descriptors. Gloo takes a while to free its own."""
    transport_of()
    gc.collect()  # remains of other cases
    before = threads_of_connections(), len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        group = new_group()
        ring(transport_of(group), 100_000)
        assert threads_of_connections() > 0
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
    until(lambda: threads_of_connections() <= before[0] and len(os.listdir("/proc/self/fd")) <= before[1])


def threads_of_connections() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            count += (task / "comm").read_text() == "sparsecomm\n"
    return count


def a_forked_process() -> None:
    transport = transport_of()
    works(transport)
    child = os.fork()
    if child == 0:
        try:
            assert transport.peers() == []
            works(transport)
        except sc.InvalidInputError as error:
            print(error, flush=True)
            os._exit(0 if "fork" in str(error) else 1)
        except BaseException as error:
            print(type(error), error, flush=True)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    works(transport)


def a_group_is_destroyed_in_a_call() -> None:
    """Another thread destroys it. The call, which waits for absent ranks, ends."""
    for by_transport in (True, False):
        group = new_group()
        works(group)
        dist.barrier()
        if RANK == 0:
            errors: list[str] = []
            residual = np.ones(50, np.float32)
            comm = transport_of(group) if by_transport else group
            thread = threading.Thread(target=note_error, args=(errors, comm, residual))
            del comm
            with soon():
                thread.start()
                time.sleep(0.1)
                dist.destroy_process_group(group)
                del group
                thread.join()
            assert "rank 0: the process group was destroyed while call" in errors[0]
            assert residual.sum() == 100  # nothing is lost
        dist.barrier()


def note_error(errors: list[str], comm: Any, residual: Any) -> None:
    try:
        sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=comm, residual=residual)
    except sc.TransportError as error:
        errors.append(str(error))


# -- ends -------------------------------------------------------------------------------------------------------------


def a_rank_ends_in_a_call() -> None:
    """The other ranks continue without it."""
    survivors.append(new_group(SURVIVORS))
    works(transport_of())
    if RANK == ODD:
        until_awaited(transport_of())
        sys.exit(0)
    with soon(), pytest.raises(sc.TransportError, match=f"rank {ODD} has ended"):
        sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=transport_of(), algorithm="allgather")


def a_rank_is_killed() -> None:
    transport, victim = transport_of(survivors[-1]), 1
    ring(transport, 100_000)
    works(transport)
    if transport.rank == victim:
        until_awaited(transport)
        os.kill(os.getpid(), signal.SIGKILL)
    residual = np.ones(50, np.float32)
    for algorithm in sc.algorithms():
        with soon(), pytest.raises(sc.RankFailedError, match=f"rank {victim} died"):
            sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=transport, algorithm=algorithm, residual=residual)
    with soon(), pytest.raises(sc.RankFailedError, match=f"rank {victim} died"), call(transport):
        while True:  # a rank may hear of the end from another rank, and send before its own connection breaks
            transport.isend(noise(100, 0), victim).wait()
    assert residual.sum() == 50 * (1 + len(sc.algorithms()))  # nothing is lost
    # Ranks that still make calls would name a rank that has ended instead.
    store = dist.FileStore(str(FOLDER / "survivors"), transport.size - 1)
    store.add("here", 1)
    until(lambda: store.add("here", 0) == transport.size - 1)


def ranks_end_one_after_another() -> None:
    """Ranks end in any order, without destroying their groups."""
    works(transport_of())
    survivors.append(transport_of(new_group()))
    ring(survivors[-1], 1_000_000)
    time.sleep(0.4 * RANK)


def groups_are_destroyed_and_made_again() -> None:
    world, transport = dist.group.WORLD, transport_of()
    works(transport)
    dist.barrier()
    dist.destroy_process_group()
    for comm in (world, transport):
        with pytest.raises(sc.InvalidInputError, match="destroyed"):
            works(comm)
    with pytest.raises(sc.InvalidInputError, match="destroyed"):
        transport_of(world)
    start("again")
    assert transport_of() is not transport
    works(transport_of())


SURVIVORS = [rank for rank in range(P) if rank != ODD]
survivors: list[Any] = []


def start(store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(FOLDER / store), P), rank=RANK, world_size=P)


# Starting a process takes seconds, so one job runs all cases, some of them in smaller groups.
CASES_OF_THIS = [
    what_a_transport_says_of_itself,
    links_are_measured_at_the_first_call,
    what_is_no_group,
    the_timeout_is_that_of_the_group,
    ranks_of_another_version,
    an_address_that_leads_nowhere,
    many_groups,
    a_forked_process,
    ranks_that_leave_a_call_and_end_at_once,
    a_peer_that_sends_what_is_no_message,
    a_group_is_destroyed_in_a_call,
    groups_are_destroyed_and_made_again,
]
ENDS = {
    2: [ranks_end_one_after_another],
    4: [a_rank_ends_in_a_call, a_rank_is_killed],
}  # after these, no case waits for all ranks


def main(folder: str) -> None:
    global FOLDER
    FOLDER = Path(folder)
    os.dup2(os.open(FOLDER / f"stderr{RANK}", os.O_WRONLY | os.O_CREAT), 2)
    warnings.simplefilter("error")
    os.environ.pop("SPARSECOMM_PROFILE", None)  # links are measured
    start("first")
    for case in [*(partial(run, GroupRanks()) for run in CASES.values()), *CASES_OF_THIS]:
        case()
        dist.barrier()
        print(f"{case}: made\n", end="", flush=True)
    for end in ENDS[P]:
        end()
    assert joining._joinings
    print(f"rank {RANK}: finished\n", end="", flush=True)
