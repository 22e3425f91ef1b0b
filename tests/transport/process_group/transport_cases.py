"""What `test_transport.py` beside it runs on every rank: ``transport_cases.py RANK SIZE FOLDER NAME ...``."""

# ruff: noqa: PT012 - what a call raises, it raises on its way out

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparsecomm as sc
from sparsecomm.transport.process_group import ProcessGroupTransport, of
from sparsecomm.transport.process_group import transport as module
from sparsecomm.wire import WIRES
from tests import data, reference

RANK, P = int(sys.argv[1]), int(sys.argv[2])
FOLDER = Path(sys.argv[3])
NEXT, PREVIOUS = (RANK + 1) % P, (RANK - 1) % P
ODD = 1  # the rank that does something else
SOON = 60  # seconds, far from the 300 of the timeout


@contextmanager
def call(transport: ProcessGroupTransport, name: bytes = b"call") -> Iterator[None]:
    """A collective call as the library makes it."""
    transport.begin(name, lambda theirs, rank: sc.CollectiveMismatchError(f"{RANK}:{name!r} {rank}:{theirs!r}"))
    try:
        yield
    except BaseException as error:
        transport.abort(error)
        raise
    transport.end()


@contextmanager
def setting(name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, str(value))
        yield


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


def all_gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * P
    dist.all_gather_object(found, value)
    return found


def new_group(ranks: list[int] | None = None) -> Any:
    return dist.new_group(ranks, backend="gloo")


def noise(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng([size, seed]).integers(0, 256, size, np.uint8)


def ring(transport: ProcessGroupTransport, size: int = 10) -> None:
    """One call that goes round, with contents checked."""
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    with call(transport):
        got = transport.exchange(noise(size, transport.rank), after, before)
    assert np.array_equal(got, noise(size, before))


# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_travel() -> None:
    transport = of()
    assert (transport.rank, transport.size, transport.num_nodes) == (RANK, P, 1)
    assert list(transport.node_of_rank) == [0] * P
    assert transport.library == f"gloo of torch {torch.__version__}"
    assert of() is transport is of(dist.group.WORLD)
    before = transport.counters.bytes_received
    sizes = [0, 1, 16_000, 16_384, 16_385, 300_000, 5_000_000]
    for size in sizes:
        ring(transport, size)
    assert transport.counters.bytes_received - before == sum(sizes)
    for i in range(200):  # fast ranks do not overtake
        with call(transport):
            got = transport.exchange(noise(8, 1000 * i + RANK), NEXT, PREVIOUS)
            assert np.array_equal(got, noise(8, 1000 * i + PREVIOUS))


def messages_keep_their_order() -> None:
    transport = of()
    sizes = [0, 20_000, 1, 5_000_000, 0, 16_384, 16_385, 3] + [100 * i for i in range(300)]
    with call(transport):
        sendings = [transport.isend(noise(size, RANK), to) for size in sizes for to in range(P)]
        for source in reversed(range(P)):
            for size in sizes:
                got = transport.receive(source)
                assert np.array_equal(got, noise(size, source))
                assert got.flags.writeable
        for request in sendings:
            request.wait()
            request.wait()


def messages_in_pieces() -> None:
    for limit in (64, 1000):
        with setting("SPARSECOMM_MAX_MESSAGE_BYTES", limit if RANK == 0 else 3 * limit):
            transport = of(new_group())
        assert transport.limit == (limit if RANK == 0 else 3 * limit)
        sizes = [0, 1, limit - 1, limit, limit + 1, 3 * limit, 3 * limit + 1, 9 * limit, 100_000]
        for size in sizes:
            ring(transport, size)
        counters = transport.counters
        assert (counters.bytes_sent, counters.messages_sent) == (sum(sizes), len(sizes))
        assert (counters.bytes_received, counters.messages_received) == (sum(sizes), len(sizes))
        frozen = noise(5000, RANK)
        frozen.flags.writeable = False
        with call(transport):
            assert np.array_equal(transport.exchange(frozen, NEXT, PREVIOUS), noise(5000, PREVIOUS))


# -- allreduce --------------------------------------------------------------------------------------------------------


def gradients_are_summed() -> None:
    transport, n, k = of(), 5000, 100
    for seed, (algorithm, wire, dtype) in enumerate(
        product(sc.algorithms(), ["plain", "packed"], ["float32", "float64"])
    ):
        xs = [data.integers(n, dtype, P * seed + rank) for rank in range(P)]
        held = [data.integers(n, dtype, 1000 + P * seed + rank) for rank in range(P)]
        residual, out = torch.from_numpy(held[RANK].copy()), torch.empty(n, dtype=torch.from_numpy(xs[0]).dtype)
        result = sc.sparse_allreduce(
            torch.from_numpy(xs[RANK]), k, comm=transport, algorithm=algorithm, wire=wire, residual=residual, out=out
        )
        indices, values = reference.allreduce(
            algorithm, [x + r for x, r in zip(xs, held, strict=True)], k, transport.node_of_rank
        )
        found = all_gather((result.indices, result.values, residual.numpy(), out.numpy()))
        for theirs in found:
            assert np.array_equal(theirs[0], indices), algorithm
            assert data.same_bits(theirs[1], values.astype(theirs[1].dtype)), algorithm
            assert data.same_bits(theirs[3], found[0][3])
        after = sum(theirs[2].astype(np.float64) for theirs in found) + found[0][3]
        assert np.array_equal(after, sum(x.astype(np.float64) for x in xs + held)), algorithm


def works(comm: ProcessGroupTransport) -> None:
    """A call whose result is known."""
    result = sc.sparse_allreduce(np.arange(50, dtype=np.float32), 3, comm=comm, algorithm="butterfly")
    assert result.indices.tolist() == [47, 48, 49]
    assert result.values.tolist() == [47 * comm.size, 48 * comm.size, 49 * comm.size]


def every_format_and_option() -> None:
    x = np.arange(-500, 500, dtype=np.float32)
    for wire, op in product(WIRES, ["sum", "mean"]):
        residual = np.zeros(1000, np.float32)
        result = sc.sparse_allreduce(x, 10, comm=of(), residual=residual, wire=wire, op=op, algorithm="butterfly")
        assert len(set(all_gather(result.values.tobytes()))) == 1
    print(sc.explain(10_000, 100, comm=of()))


# -- calls that fail --------------------------------------------------------------------------------------------------


def calls_that_do_not_match() -> None:
    transport = of(new_group())
    for algorithm in sc.algorithms():
        with soon(), pytest.raises(sc.CollectiveMismatchError):
            k = 4 if RANK == ODD else 3
            sc.sparse_allreduce(np.ones(30, np.float32), k, comm=transport, algorithm=algorithm)
        works(transport)
    with soon(), pytest.raises(sc.CollectiveMismatchError, match="tree"), call(transport, b"tree" if RANK else b"free"):
        transport.receive(NEXT)  # a circle of ranks that wait: only an enquiry finds it
    works(transport)


def a_rank_that_leaves_its_call() -> None:
    transport = of(new_group())
    for i in range(5):
        kind = KeyError if i % 2 else KeyboardInterrupt
        with soon(), pytest.raises((kind, sc.TransportError)) as caught, call(transport):
            sendings = [transport.isend(noise(size, 77), NEXT) for size in (100, 3_000_000)]  # left behind
            if RANK == ODD:
                raise kind("on purpose")
            for request in sendings:
                request.wait()
            transport.receive((RANK + 2) % P if P > 2 else NEXT)
            transport.receive(ODD)
            transport.receive(ODD)
            transport.receive(ODD)  # never comes
        if RANK != ODD:
            assert type(caught.value) is sc.TransportError
            assert f"left call {2 * i + 1}, which rank {RANK} is in. " in str(caught.value)
            assert kind.__name__ in str(caught.value)
        ring(transport, 100)


def a_rank_that_never_calls() -> None:
    transport, residual, ones = of(new_group()), np.ones(50, np.float32), np.ones(50, np.float32)
    works(transport)
    error = None
    if RANK != ODD:
        seconds = 0.4 if RANK == 0 else 60.0  # it waits for ODD, and the others for it: any of them could be the first
        with setting("SPARSECOMM_TIMEOUT", seconds), pytest.raises(sc.TransportError, match=r"waited 0.4 s") as caught:
            sc.sparse_allreduce(ones, 5, comm=transport, algorithm="butterfly", residual=residual)
        error = caught.value
        assert np.array_equal(residual, 2 * ones)
    errors = all_gather(error)
    assert any(isinstance(e, sc.TimeoutError) and f"for rank {ODD} in call 2" in str(e) for e in errors), errors
    if RANK == ODD:
        with pytest.raises(sc.TransportError, match=r"rank \d left call 2"):
            works(transport)
    works(transport)


def a_slow_rank_is_waited_for() -> None:
    transport = of()
    for ping in (module._PING, 1e-9):  # the second is long due whenever this process is given a core
        with pytest.MonkeyPatch.context() as patch, call(transport):
            patch.setattr(module, "_PING", ping)
            if RANK == P - 1:
                time.sleep(0.6)  # through some enquiries
            assert transport.exchange(noise(100_000, RANK), NEXT, PREVIOUS).size == 100_000


def a_rank_that_is_stopped() -> None:
    """What is sent to it is not taken."""
    transport = of(new_group())
    pids = all_gather(os.getpid())
    works(transport)
    if RANK == 0:
        os.kill(pids[ODD], signal.SIGSTOP)
        try:
            stuck = pytest.raises(sc.TimeoutError, match="for rank 1 in call")
            with setting("SPARSECOMM_TIMEOUT", 0.4), soon(), stuck, call(transport):
                for _ in range(100):
                    transport.isend(noise(10, 0), ODD).wait()
                transport.isend(noise(50_000_000, 0), ODD).wait()
        finally:
            os.kill(pids[ODD], signal.SIGCONT)
    dist.barrier()
    if RANK != 0:
        with pytest.raises(sc.TransportError, match="rank 0 left call 2"), call(transport):
            while True:
                transport.receive(0)
    ring(transport, 1_000_000)


def a_rank_that_does_not_come_at_first() -> None:
    group = new_group()
    for _ in range(2):
        if RANK != ODD:
            with setting("SPARSECOMM_TIMEOUT", 0.3), pytest.raises(sc.TimeoutError, match=r"waited 0.3 s") as caught:
                of(group)
            assert f"rank {ODD} has not called" in str(caught.value) or P > 2
            assert f"{ODD}" in str(caught.value)
        dist.barrier()
    ring(of(group))


def threads_that_join_groups_in_any_order() -> None:
    """On some ranks the thread of one group comes first, on the others that of another: neither waits for it."""
    groups = [new_group(), new_group()]
    made: list[ProcessGroupTransport] = []

    def first_use(group: Any) -> None:
        ring(of(group))
        made.extend([of(group)])

    order = [*groups, *groups] if RANK % 2 else [*groups[::-1], *groups]
    with setting("SPARSECOMM_TIMEOUT", SOON / 2):
        threads = [threading.Thread(target=first_use, args=(group,)) for group in order[:2]]
        threads += [threading.Thread(target=of, args=(group,)) for group in order[2:]]
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        for thread in threads:
            thread.join()
    assert len(set(map(id, made))) == 2
    assert {id(of(group)) for group in groups} == set(map(id, made))


def ctrl_c_in_a_wait() -> None:
    transport = of(new_group())
    works(transport)
    with soon(), pytest.raises((KeyboardInterrupt, sc.TransportError)) as caught, call(transport):
        if RANK == ODD:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        transport.receive(NEXT)
    assert RANK != ODD or caught.type is KeyboardInterrupt
    assert RANK == ODD or "KeyboardInterrupt" in str(caught.value)
    works(transport)


def ctrl_c_divides_no_message() -> None:
    """Wherever it comes in a call, the next one works."""
    with setting("SPARSECOMM_MAX_MESSAGE_BYTES", 64):
        transport = of(new_group())
    mine, theirs = noise(2000, RANK), noise(2000, PREVIOUS)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for i in range(25):
        with soon(), pytest.raises((KeyboardInterrupt, sc.TransportError)), call(transport):
            if RANK == ODD:
                signal.setitimer(signal.ITIMER_REAL, 5e-4 * (i + 1))
            while True:
                assert np.array_equal(transport.exchange(mine, NEXT, PREVIOUS), theirs)
        ring(transport, 2000)


# -- groups -----------------------------------------------------------------------------------------------------------


def parts_of_the_world() -> None:
    sides = [new_group(list(range(side, P, 2))) for side in range(2)]
    half, world = of(sides[RANK % 2]), of()
    assert half is not world
    assert (half.rank, half.size) == (RANK // 2, P // 2)
    with pytest.raises(sc.InvalidInputError, match="not a member"):
        of(sides[1 - RANK % 2])
    ring(half, 300_000)
    for _ in range(10):
        works(half)
        works(world)
    found = []
    thread = threading.Thread(target=lambda: found.append(works(half)))  # two at once
    thread.start()
    works(world)
    thread.join()
    assert found == [None]


def what_is_no_group() -> None:
    for wrong in ("gloo", 7, object()):
        with pytest.raises(sc.InvalidInputError, match=r"expected a torch.distributed.ProcessGroup"):
            of(wrong)
    group = new_group()
    transport = of(group)
    works(transport)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(sc.InvalidInputError, match="destroyed"):
        of(group)
    with pytest.raises(sc.InvalidInputError, match="destroyed"):
        works(transport)
    del group
    gc.collect()
    assert not transport._open
    with pytest.raises(sc.InvalidInputError, match="destroyed"):
        works(transport)
    transport.close()
    refused = {"k": 0}
    if RANK == ODD:
        with pytest.raises(sc.InvalidInputError, match=f"^rank {ODD}: "):
            sc.sparse_allreduce(**{"x": np.ones(4, np.float32), "k": 1, "comm": of()} | refused)
    works(of())


def a_peer_that_has_ended() -> None:
    group = new_group()
    transport = of(group)
    works(transport)
    if RANK == ODD:
        transport.close()
    dist.barrier()
    if RANK != ODD:
        for _ in range(2):
            with soon(), pytest.raises(sc.TransportError, match=f"rank {ODD} has ended") as caught:
                while True:
                    works(transport)
            assert type(caught.value) is sc.TransportError


def a_peer_that_sends_what_is_no_message() -> None:
    """Each ends the transport, with an error that names the peer; a control message ends the call."""
    words = np.array([[-1, 1, -5, 0], [-1, 1, 2**32, -1], [-3, 1, 0, 0], [99, 1, 0, 0]], np.int64)
    for raw in (b"abc", *(row.tobytes() for row in words)):
        transport = of(new_group())
        works(transport)
        dist.barrier()  # what comes next must find nobody in that call
        if RANK == ODD:
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            for handle in [transport._connections._gloo.send([data], to, 0) for to in range(P) if to != ODD]:
                handle.wait()
        else:
            named = pytest.raises(sc.TransportError, match=rf"received from rank {ODD} a (control )?message of")
            with soon(), named, call(transport):
                transport.receive(ODD)
        dist.barrier()


def many_groups() -> None:
    threads = threading.active_count()
    for _ in range(4):
        group = new_group()
        ring(of(group), 100_000)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
    assert threading.active_count() <= threads


def a_forked_process() -> None:
    transport = of()
    works(transport)
    child = os.fork()
    if child == 0:
        try:
            works(transport)
        except sc.InvalidInputError as error:
            print(error, flush=True)
            os._exit(0 if "fork" in str(error) else 1)
        except BaseException as error:
            print(type(error), error, flush=True)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    works(transport)


def calls_from_other_threads() -> None:
    def calls() -> None:
        for _ in range(20):
            works(of())
        done.append(True)

    done: list[bool] = []
    for _ in range(3):
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    assert done == [True] * 3


# -- ends -------------------------------------------------------------------------------------------------------------


def a_rank_ends_in_a_call() -> None:
    """The others make their calls without it from now on."""
    kept.append(new_group(SURVIVORS))
    works(of())
    if RANK == ODD:
        time.sleep(0.3)
        sys.exit(0)
    with soon(), pytest.raises(sc.TransportError, match=f"rank {ODD} has ended"):
        sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=of(), algorithm="allgather")


def a_rank_is_killed() -> None:
    transport, victim = of(kept[-1]), 1
    ring(transport, 100_000)
    works(transport)
    if transport.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    residual = np.ones(50, np.float32)
    for algorithm in sc.algorithms():
        with soon(), pytest.raises(sc.RankFailedError, match=f"rank {victim} died"):
            sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=transport, algorithm=algorithm, residual=residual)
    with soon(), pytest.raises(sc.RankFailedError, match=f"rank {victim} died"), call(transport):
        transport.isend(noise(100, 0), victim).wait()
    assert residual.sum() == 50 * (1 + len(sc.algorithms()))  # nothing is lost


def ranks_end_one_after_another() -> None:
    """And destroy nothing."""
    works(of())
    kept.append(of(new_group()))
    ring(kept[-1], 1_000_000)
    time.sleep(0.4 * RANK)


def groups_are_destroyed_and_made_again() -> None:
    transport = of()
    works(transport)
    dist.barrier()
    dist.destroy_process_group()
    for function in (of, lambda: works(transport)):
        with pytest.raises(sc.InvalidInputError, match="destroyed"):
            function()
    start("again")
    assert of() is not transport
    works(of())


SURVIVORS = [rank for rank in range(P) if rank != ODD]
kept: list[Any] = []


def start(store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(FOLDER / store), P), rank=RANK, world_size=P)


def main(names: list[str]) -> None:
    with pytest.raises(sc.InvalidInputError, match="not initialised"):
        of()
    start("first")
    for name in names:
        function: Callable[[], None] = globals()[name]
        began = time.monotonic()
        function()
        if function not in LAST:
            dist.barrier()
        print(f"{name}: {time.monotonic() - began:.2f} s", flush=True)
    assert module._joinings


LAST = (a_rank_ends_in_a_call, a_rank_is_killed, ranks_end_one_after_another)

if __name__ == "__main__":
    main(sys.argv[4:])
