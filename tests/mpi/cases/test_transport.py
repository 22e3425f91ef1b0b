"""The MPI transport between ranks. Every rank runs this file: ``mpirun -n P python -m pytest tests/mpi/cases``."""

# ruff: noqa: PT012 - what a call raises, it raises on its way out

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

if not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"} & set(os.environ):
    pytest.skip("needs mpirun", allow_module_level=True)

from mpi4py import MPI

from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, TimeoutError, TransportError
from sparsecomm.transport import Transport, mpi, of

WORLD = MPI.COMM_WORLD
P, RANK = WORLD.size, WORLD.rank
NEXT, PREVIOUS = (RANK + 1) % P, (RANK - 1) % P
SECONDS = 60  # also beside programs that take all cores

several = pytest.mark.skipif(P < 2, reason="needs two ranks")


@pytest.fixture(autouse=True)
def together():
    """No test starts before all ranks have left the one before: their timeouts are short."""
    yield
    barrier()


def barrier() -> None:
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(1e-4)


@pytest.fixture
def comm():
    private = WORLD.Dup()
    yield private
    if private != MPI.COMM_NULL:
        private.Free()


@pytest.fixture
def timeout(monkeypatch):
    def set_to(seconds: float) -> None:
        monkeypatch.setenv("SPARSECOMM_TIMEOUT", str(seconds))

    return set_to


@contextmanager
def call(transport: Transport, name: bytes = b"call"):
    """A collective call as the library makes it."""
    transport.begin(name, lambda theirs, rank: CollectiveMismatchError(f"{RANK}:{name!r} {rank}:{theirs!r}"))
    try:
        yield
    except BaseException as error:
        transport.abort(error)
        raise
    transport.end()


def noise(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng([size, seed]).integers(0, 256, size, np.uint8)


def ring(transport: Transport, size: int = 10) -> None:
    """One call that goes round, with contents checked."""
    with call(transport):
        got = transport.exchange(noise(size, RANK), NEXT, PREVIOUS)
    assert np.array_equal(got, noise(size, PREVIOUS))


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 1000, 4096, 10_000, 65_536, 300_000, 1_000_000])
def test_contents(size):
    ring(of(WORLD), size)


def test_order_and_memory():
    transport = of(WORLD)
    with call(transport):
        requests = [transport.isend(noise(100 * i, RANK), NEXT) for i in range(20)]
        got = [transport.receive(PREVIOUS) for _ in range(20)]
        for request in requests:
            request.wait()
    for i, message in enumerate(got):
        assert np.array_equal(message, noise(100 * i, PREVIOUS))
        assert message.flags.writeable


def test_everybody_with_everybody():
    transport = of(WORLD)
    with call(transport):
        requests = [transport.isend(noise(50_000 + to, RANK), to) for to in range(P)]
        for source in reversed(range(P)):
            assert np.array_equal(transport.receive(source), noise(50_000 + RANK, source))
        for request in requests:
            request.wait()


def test_fast_ranks_do_not_overtake():
    transport = of(WORLD)
    for i in range(200):
        with call(transport):
            assert (
                transport.exchange(noise(8, 1000 * i + RANK), NEXT, PREVIOUS).tolist()
                == noise(8, 1000 * i + PREVIOUS).tolist()
            )


@pytest.mark.parametrize("limit", [64, 1000])
def test_messages_in_pieces(comm, monkeypatch, limit):
    monkeypatch.setenv("SPARSECOMM_MAX_MESSAGE_BYTES", str(limit))
    transport = of(comm)
    assert transport.limit == limit
    before = transport.counters.bytes_received
    sizes = [0, 1, limit - 1, limit, limit + 1, 3 * limit - 1, 3 * limit, 3 * limit + 1, 100_000]
    for size in sizes:
        ring(transport, size)
    assert transport.counters.bytes_received - before == sum(sizes)
    assert transport.counters.messages_received == len(sizes)


@several
@pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="needs an MPI of several threads")
def test_threads_of_a_process_meet_those_of_others_in_any_order(timeout):
    """On some ranks the thread of one communicator comes first, on the others that of another: neither waits for it."""
    timeout(SECONDS / 2)
    comms = [WORLD.Dup(), WORLD.Dup()]
    for comm in comms:
        comm.barrier()
    made = []

    def first_use(comm: MPI.Intracomm) -> None:
        ring(of(comm))
        made.append(comm)

    threads = [threading.Thread(target=first_use, args=(comm,)) for comm in (comms if RANK % 2 else comms[::-1])]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    assert len(made) == 2
    for comm in comms:
        comm.Free()


@several
def test_several_threads_may_be_the_first_on_a_communicator(comm):
    made = []
    threads = [threading.Thread(target=lambda: made.append(of(comm))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [of(comm)] * 4


@several
def test_ranks_whose_limits_differ_take_the_smallest(comm, monkeypatch, timeout):
    """A message as long as a rank's own limit would seem to it to be the first piece of a longer one."""
    timeout(SECONDS)
    monkeypatch.setenv("SPARSECOMM_MAX_MESSAGE_BYTES", str(1000 if RANK == 0 else 3000))
    transport = of(comm)
    assert transport.limit == 1000
    for size in (999, 1000, 1001, 2999, 3000, 3001, 9000):
        ring(transport, size)


@several
def test_pieces_are_not_mixed_with_the_next_message(comm, monkeypatch):
    monkeypatch.setenv("SPARSECOMM_MAX_MESSAGE_BYTES", "64")
    transport = of(comm)
    with call(transport):
        requests = [transport.isend(noise(size, RANK), NEXT) for size in (128, 64, 0, 1)]
        assert [transport.receive(PREVIOUS).size for _ in range(4)] == [128, 64, 0, 1]
        for request in requests:
            request.wait()


@several
def test_abort_reaches_everyone_at_once(comm):
    transport = of(comm)
    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, TransportError)) as caught, call(transport):
        if RANK == P - 1:
            raise ZeroDivisionError("on purpose")
        transport.receive((RANK + 1) % P)
    assert time.monotonic() - began < SECONDS  # not the 300 s of the timeout
    if RANK != P - 1:
        assert type(caught.value) is TransportError
        text = f"rank {P - 1} left call 1, which rank {RANK} is in. ZeroDivisionError: on purpose"
        assert text in str(caught.value)
    ring(transport)


@several
def test_a_mismatch_found_by_one_is_a_mismatch_for_all(comm):
    transport = of(comm)
    with pytest.raises(CollectiveMismatchError, match="k = 1 here, k = 2 there"), call(transport):
        if RANK == 0:
            raise CollectiveMismatchError("k = 1 here, k = 2 there")
        transport.receive(PREVIOUS)
    ring(transport)


@several
def test_waiting_in_a_cycle_in_different_calls(comm):
    transport = of(comm)
    began = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught, call(transport, b"tree" if RANK == 0 else b"butterfly"):
        transport.receive(NEXT)
    assert time.monotonic() - began < SECONDS
    assert "tree" in str(caught.value)
    assert "butterfly" in str(caught.value)
    ring(transport)


@several
def test_waiting_in_a_cycle_in_the_same_call_is_no_mismatch(comm, timeout):
    timeout(0.6)  # some pings are sent
    transport = of(comm)
    with pytest.raises(TransportError, match=r"waited 0.6 s for rank"), call(transport):
        transport.receive(NEXT)
    timeout(30)
    ring(transport)


@several
def test_large_sends_that_nobody_takes(comm, timeout):
    """They wait for the receiver, and are taken up by it when the next call begins."""
    timeout(0.2)
    transport = of(comm)
    with pytest.raises(TransportError), call(transport):
        transport.isend(noise(3_000_000, 0), NEXT).wait()
        transport.receive(NEXT)  # only where MPI has let the sender go
    timeout(30)
    barrier()
    for _ in range(20):
        ring(transport)
        time.sleep(0.005)
    assert transport.reap() == 0


@several
def test_a_rank_that_never_calls_is_named(comm, timeout):
    timeout(0.3)
    transport = of(comm)
    if RANK != 0:
        with pytest.raises(TransportError) as caught, call(transport):
            transport.receive(PREVIOUS)
        assert "waited 0.3 s for rank" in str(caught.value)
        if RANK == 1:
            assert isinstance(caught.value, (TimeoutError, TransportError))
            assert "rank 0 in call 1" in str(caught.value) or "left call 1" in str(caught.value)
    barrier()
    if RANK == 0:  # its call comes when the others have given up
        with pytest.raises(TransportError, match=r"rank \d+ left call 1"), call(transport):
            transport.receive(PREVIOUS)
    barrier()
    timeout(30)
    ring(transport)


@several
def test_a_rank_behind_by_one_call_catches_up(comm, timeout):
    timeout(0.3)
    transport = of(comm)
    if RANK:
        with pytest.raises(TransportError), call(transport):
            transport.isend(noise(9, 9), 0)
            transport.receive(0)
    barrier()
    timeout(30)
    if RANK == 0:
        with pytest.raises(TransportError, match="left call 1"), call(transport):
            transport.receive(1)
    ring(transport)


@several
def test_abandoned_bytes_are_not_taken_for_new_ones(comm):
    transport = of(comm)
    for _ in range(5):
        with pytest.raises((KeyError, TransportError)), call(transport):
            transport.isend(noise(100, 77), NEXT)
            if RANK == 0:
                raise KeyError("on purpose")
            transport.receive(PREVIOUS)
            transport.receive(PREVIOUS)  # never comes
        ring(transport, 100)


@several
@pytest.mark.parametrize("raw", [b"", b"abc", b"control" + bytes([0, 200]), b"control" + bytes(5000), b"data"])
def test_what_is_no_message_ends_the_call_and_names_its_sender(comm, monkeypatch, timeout, raw):
    timeout(SECONDS)
    monkeypatch.setenv("SPARSECOMM_MAX_MESSAGE_BYTES", "64")
    transport = of(comm)
    tag = 0
    if raw.startswith(b"control"):
        raw = mpi._CONTROL.pack(transport._token, 1, 200) + raw[7:]
    elif raw == b"data":
        tag, raw = 2, bytes(65)  # of call 1
    if RANK == 1:
        _sent_raw.extend(transport._comm.Isend([raw, MPI.BYTE], to, tag) for to in range(P) if to != RANK)
    barrier()
    with pytest.raises(TransportError, match=r"from rank 1 a (control )?message") as caught, call(transport):
        transport.receive(NEXT if RANK == 1 else 1)
    transport.abort(caught.value)  # where the call did not begin
    barrier()


_sent_raw = []  # some of it nobody receives


@several
def test_a_rank_that_does_not_join_the_first_call(comm, timeout):
    timeout(0.2)
    if RANK:
        with pytest.raises(TimeoutError) as caught:
            of(comm)
        assert f"rank {RANK} waited 0.2 s" in str(caught.value)
        assert ("rank 0 has not called" if P == 2 else "at least one of ranks 0") in str(caught.value)
    barrier()
    timeout(30)
    ring(of(comm))  # the attempt that timed out is taken up


def test_a_slow_rank_is_waited_for():
    transport = of(WORLD)
    with call(transport):
        if RANK == P - 1:
            time.sleep(0.6)  # through all stages of waiting, and some pings
        assert transport.exchange(noise(100_000, RANK), NEXT, PREVIOUS).size == 100_000
    ring(transport)


def test_interrupt_in_a_wait(comm):
    """Ctrl-C on rank 0 ends its wait, and with that the others'."""
    transport = of(comm)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with pytest.raises((KeyboardInterrupt, TransportError)) as caught, call(transport):
        if RANK == 0:
            timer.start()
        transport.receive(NEXT)
    assert time.monotonic() - began < SECONDS
    if RANK == 0:
        timer.join()
        assert caught.type is KeyboardInterrupt
    else:
        assert "rank 0 left call 1" in str(caught.value)
        assert "KeyboardInterrupt" in str(caught.value)
    ring(transport)


def test_the_gil_is_free_during_a_wait(tmp_path):
    """A thread of rank 0 goes on while rank 0 waits: the others come when it has."""
    transport = of(WORLD)
    gone_on = Path(WORLD.bcast(str(tmp_path / "gone on")))

    def tick():
        for _ in range(20):
            time.sleep(0.002)
        gone_on.touch()

    began = time.monotonic()
    with call(transport):
        if RANK == 0:
            threading.Thread(target=tick).start()
        while RANK != 0 and not gone_on.exists():
            assert time.monotonic() - began < SECONDS
            time.sleep(0.01)
        transport.exchange(noise(8, RANK), NEXT, PREVIOUS)


def test_a_freed_communicator(comm):
    transport = of(comm)
    ring(transport)
    comm.Free()
    with pytest.raises(InvalidInputError, match="freed"):
        of(comm)
    with pytest.raises(InvalidInputError, match="closed"):
        ring(transport)


@several
def test_freed_with_sends_under_way(comm):
    transport = of(comm)
    with pytest.raises((KeyError, TransportError)), call(transport):
        transport.isend(noise(2_000_000, 1), NEXT)
        raise KeyError("on purpose")
    comm.Free()
    ring(of(WORLD))


def test_many_communicators():
    for _ in range(20):
        comm = WORLD.Dup()
        ring(of(comm))
        comm.Free()


def test_parts_of_the_world():
    half = WORLD.Split(RANK % 2, -RANK)
    transport = of(half)
    assert (transport.rank, transport.size) == (half.rank, half.size)
    with call(transport):
        got = transport.exchange(np.full(3, RANK, np.uint8), (half.rank + 1) % half.size, (half.rank - 1) % half.size)
    assert got[0] % 2 == RANK % 2
    half.Free()


@several
def test_an_intercommunicator():
    half = WORLD.Split(RANK % 2, RANK)
    inter = half.Create_intercomm(0, WORLD, 1 - RANK % 2)
    with pytest.raises(InvalidInputError, match="Merge"):
        of(inter)
    inter.Free()
    half.Free()


@several
@pytest.mark.parametrize("nbytes", [0, 1, 100_000])
def test_a_broadcast_gives_all_the_bytes_of_one(comm, nbytes, monkeypatch):
    monkeypatch.setattr(mpi, "_BROADCAST_BYTES", 30_000)
    for root in range(P):
        data = np.random.default_rng(RANK).integers(0, 256, nbytes).astype(np.uint8)
        of(comm).broadcast(data, root)
        np.testing.assert_array_equal(data, np.random.default_rng(root).integers(0, 256, nbytes))


@several
def test_a_broadcast_that_does_not_come_times_out(comm, timeout):
    transport, data = of(comm), np.full(2**20, RANK, np.uint8)
    if RANK == 0:
        timeout(0.2)
        with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.2 s for a broadcast from rank 1"):
            transport.broadcast(data, 1)
    barrier()
    if RANK > 0:  # now that of rank 0 can end, too
        transport.broadcast(data, 1)
    barrier()
