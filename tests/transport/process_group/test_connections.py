"""Messages between connected ranks, and the ends of connections."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from sparsecomm.transport.process_group._connections import DATA, DISCONNECTED, GOODBYE, SENT
from tests.transport.process_group.peers import (
    HOST,
    NOTHING,
    SECONDS,
    LowerPeer,
    collect,
    cpu_seconds,
    following,
    frame,
    hello,
    noise,
    of_this_process,
    ports,
    ranks,
    read_frame,
    reset_at_close,
    resident,
    stranger,
)
from tests.waiting import until


def test_on_a_local_network_one_connection_serves_a_pair() -> None:
    """The number depends on the round trip, which is longer if the process loses its core meanwhile."""
    until(one_connection_serves_a_pair)


def one_connection_serves_a_pair() -> bool:
    with ranks(2, streams=0) as by_rank:
        by_rank[1].send(0, 1, noise(100_000), None)
        collect(by_rank[0], 1, 0)
        return [connections.traffic(1 - rank)[-1] for rank, connections in enumerate(by_rank)] == [1, 1]


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_pieces_of_a_message_are_spread_over_connections(size: int) -> None:
    """Four fresh connections share evenly what they can carry in one round trip."""
    with stranger(streams=4) as (rank, peers, _):
        done = rank.send(1, 9, noise(size), "request")
        content, carried = bytearray(size), dict.fromkeys(peers, 0)
        receive_pieces(peers, content, carried, size)
        assert content == noise(size).tobytes()
        assert min(carried.values()) >= 13_000
        if not done:
            assert following(rank) == (SENT, 1, 0, "request")


def test_a_connection_that_stalls_holds_up_little() -> None:
    """While nobody reads from one of four connections, the others carry all that it has not taken."""
    size = 20_000_000
    with stranger(streams=4) as (rank, peers, _):
        peers[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        assert rank.send(1, 9, noise(size), "request") is False
        content, carried = bytearray(size), dict.fromkeys(peers, 0)
        receive_pieces(peers[1:], content, carried, int(0.8 * size))
        receive_pieces(peers, content, carried, size)
        assert content == noise(size).tobytes()
        assert following(rank) == (SENT, 1, 0, "request")


def receive_pieces(
    peers: Sequence[socket.socket], content: bytearray, carried: dict[socket.socket, int], enough: int
) -> None:
    """Receive pieces of message 9 from ``peers`` into ``content`` until ``carried`` sums to ``enough`` bytes."""
    while sum(carried.values()) < enough:
        readable = select.select(peers, [], [], SECONDS)[0]
        assert readable, f"no connection carries the rest after {sum(carried.values())} of {enough} bytes"
        for peer in readable:
            (_, kind, number, sequence, total, offset, _, length), part = read_frame(peer, nothing=True)
            if kind == NOTHING:  # TCP repeated a segment, as on a busy machine
                continue
            assert (kind, number, sequence, total) == (DATA, 9, 0, len(content))
            content[offset : offset + length] = part
            carried[peer] += length


@pytest.mark.parametrize("streams", [1, 3])
def test_a_peer_that_dies_within_a_message(streams: int) -> None:
    """Complete messages are delivered, then its death is reported once."""
    with stranger(streams) as (rank, peers, _):
        peers[0].sendall(frame(0, b"whole") + frame(1, bytes(10_000), 0, 5000)[:3000])
        peers[-1].sendall(frame(2, b"later") if streams > 1 else b"")
        assert following(rank)[3].tobytes() == b"whole"
        reset_at_close(peers[0])
        peers[0].close()
        kind, who, _, why = following(rank)
        assert (kind, who) == (DISCONNECTED, 1)
        assert "reset" in why or "closed" in why
        assert rank.next(0.1) is None
        assert rank.send(1, 1, noise(10), None) is None


def test_a_peer_that_ends_in_order_is_not_dead() -> None:
    """Its goodbye may come on any connection, after others have ended."""
    with stranger(streams=3) as (rank, peers, _):
        goodbye = frame(2, b"", kind=GOODBYE)
        peers[0].sendall(frame(0, bytes(100), 0, 64))
        for peer in peers[1:]:
            peer.sendall(goodbye)
            peer.close()
        time.sleep(0.05)
        peers[0].sendall(frame(1, b"last") + frame(0, bytes(100), 64, 64) + goodbye)
        peers[0].close()
        assert [following(rank)[3].tobytes() for _ in range(3)] == [bytes(100), b"last", b""]
        assert rank.next(0.1) is None


@pytest.mark.parametrize("ends", ["closed", "reset", "goodbye"])
@pytest.mark.parametrize("pieces", [0, 1])
def test_a_goodbye_does_not_hide_that_a_message_is_missing(pieces: int, ends: str) -> None:
    """Some connections end with a goodbye. Another one ends within a message, with or without a goodbye."""
    with stranger(streams=3) as (rank, peers, _):
        goodbye = frame(1, b"", kind=GOODBYE)
        peers[0].sendall(frame(0, bytes(100), 0, 64)[: -1 if pieces == 0 else None])
        for peer in peers[1:]:
            peer.sendall(goodbye)
            peer.close()
        assert rank.next(0.1) is None
        if ends == "goodbye" and pieces:
            peers[0].sendall(goodbye)
        elif ends == "reset":
            reset_at_close(peers[0])
        peers[0].close()
        assert following(rank)[:2] == (DISCONNECTED, 1)
        assert rank.send(1, 1, noise(10), None) is None
        assert rank.next(0.1) is None


def test_all_connections_say_goodbye_also_those_that_nobody_has_answered() -> None:
    """If a connection ends after its hello without a goodbye, the peer takes the rank for dead."""
    with LowerPeer(streams=3) as lower:
        lower.accept(0).sendall(hello(lower.tokens, 0, 0))
        for _ in range(2):
            lower.accept(1, 2)
        lower.rank.close(SECONDS)
        for peer in lower.peers:
            assert read_frame(peer)[0][1:4] == (GOODBYE, 0, 0)
            assert peer.recv(1) == b""


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_what_was_sent_arrives_although_the_peer_sends_too(late: float) -> None:
    """If data arrives on a closed connection, the system drops data that it has not sent yet."""
    sizes = [60_000] * 30
    with stranger() as (rank, (peer,), _):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        assert all(rank.send(1, i, noise(size, i), i) for i, size in enumerate(sizes))
        closing = threading.Thread(target=rank.close, args=(SECONDS,))
        closing.start()
        time.sleep(late)
        for i, size in enumerate(sizes):
            with suppress(ConnectionError):  # all is in the peer's buffer, and the rank has ended
                peer.sendall(frame(i, b"are you there?"))
            time.sleep(0.01)
            assert read_frame(peer)[1] == noise(size, i).tobytes()
        assert read_frame(peer)[0][1] == GOODBYE
        closing.join()


def test_an_end_waits_for_nobody_who_is_gone() -> None:
    with stranger() as (rank, (peer,), _):
        data = noise(50_000_000)
        assert rank.send(1, 1, data, "request") is False
        closing = threading.Thread(target=rank.close, args=(10 * SECONDS,))
        began = time.monotonic()
        closing.start()
        time.sleep(0.1)
        peer.sendall(frame(0, b"", kind=GOODBYE))
        peer.close()
        closing.join()
        assert time.monotonic() - began < SECONDS


def test_memory_that_cannot_be_read_ends_the_connection(tmp_path: Path) -> None:
    with stranger() as (rank, _, _):
        (tmp_path / "file").write_bytes(bytes(2**20))
        data = np.memmap(tmp_path / "file", np.uint8, "r")
        os.truncate(tmp_path / "file", 0)
        assert not rank.send(1, 1, data, "request")
        assert following(rank)[:2] == (DISCONNECTED, 1)


def test_a_connection_that_another_process_still_holds_is_closed_for_this_one() -> None:
    """The other process has just been forked, or is about to execute another program."""
    with stranger() as (rank, (peer,), _):
        duplicates = [os.dup(fd) for fd in of_this_process() if ports(fd)[0] == peer.getpeername()[1]]
        assert duplicates
        peer.close()
        assert following(rank)[:2] == (DISCONNECTED, 1)
        used = cpu_seconds(rank.thread_id)
        time.sleep(0.5)
        assert cpu_seconds(rank.thread_id) - used < 0.25  # it waits without using the CPU
        for fd in duplicates:
            os.close(fd)


@pytest.mark.parametrize(("streams", "address"), [(1, HOST), (5, "::1")])
def test_goodbye_comes_after_all_else(streams: int, address: str) -> None:
    addresses = Path("/proc/net/if_inet6")
    if address != HOST and not (addresses.exists() and "0" * 31 + "1 " in addresses.read_text()):
        pytest.skip("this machine has no such address")
    size = 6_000_000  # more than one call of `send` writes to five connections
    with ranks(2, streams, address=address) as (a, b):
        requests = [i for i in range(5) if not a.send(1, i, noise(size, i), i)]
        a.close(SECONDS)
        got, _ = collect(b, 5, 0)
        assert all(np.array_equal(data, noise(size, number)) for _, number, data in got)
        assert following(b)[:2] == (GOODBYE, 0)
        assert b.next(0.1) is None
        assert requests


def test_a_reader_that_does_not_read_costs_the_sender_no_memory() -> None:
    with stranger() as (rank, _, _):
        data, before, began = noise(100_000_000), resident(), time.monotonic()
        assert rank.send(1, 1, data, "request") is False
        assert rank.send(1, 2, noise(10), None)  # a short message behind the long one is copied
        assert time.monotonic() - began < SECONDS / 2
        assert resident() - before < 2**24
        rank.close(0.2)  # does not wait for the long message
        assert time.monotonic() - began < SECONDS


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX warns of its threads if other tests have imported it
def test_a_forked_process_holds_no_connection() -> None:
    """Otherwise a peer would not notice the death of the parent process."""
    with stranger() as (rank, (peer,), _):
        child = os.fork()
        if child == 0:
            time.sleep(SECONDS)
            os._exit(0)
        rank.close(0.0)
        began = time.monotonic()
        assert read_frame(peer)[0][1] == GOODBYE
        assert peer.recv(1) == b""
        assert time.monotonic() - began < SECONDS / 2
        os.kill(child, 9)
        os.waitpid(child, 0)
