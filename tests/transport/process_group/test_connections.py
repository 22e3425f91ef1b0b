"""Connections between ranks of this process, and with peers that are plain sockets and keep to no rule."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsecomm.transport.process_group._connections import (
    DATA,
    DISCONNECTED,
    GOODBYE,
    SENT,
    TOKEN_BYTES,
    UNREADABLE,
    Connections,
)
from tests.waiting import SOON, until

HOST = "127.0.0.1"
HELLO = struct.Struct("<8s16sIHH")  # magic, ticket, rank of the sender, index of the connection, number of them
FRAME = struct.Struct("<IiqQQQII")  # magic, kind, call, sequence, total, offset, piece, length
MAGIC, NOTHING = 0x53435031, -6
SECONDS = float(SOON)


def hello(tokens: tuple[bytes, bytes], sender: int, index: int, streams: int = 1) -> bytes:
    """Return the hello of rank 0 or 1 of two; ``tokens``: theirs."""
    tickets = hashlib.shake_128(b"".join(tokens)).digest(2 * 64 * 16)
    at = 16 * (index + (0 if sender else 64))  # first those of the rank that connects
    return HELLO.pack(b"sparsec2", tickets[at : at + 16], sender, index, streams)


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([size, seed]).integers(0, 256, size, np.uint8)


def following(connections: Connections) -> tuple[int, int, int, Any]:
    """Return the next completion."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if (found := connections.next(1.0)) is not None:
            return found
    raise AssertionError("nothing happens")


@contextmanager
def ranks(P: int, streams: int = 1, limit: int = 2**22, address: str = HOST) -> Iterator[list[Connections]]:
    """Ranks that are connected."""
    made = [Connections(rank, P, limit, streams) for rank in range(P)]
    tokens = [os.urandom(TOKEN_BYTES) for _ in made]
    ports = [each.listen(address, token) for each, token in zip(made, tokens, strict=True)]
    for rank, each in enumerate(made):
        for other in range(P):
            if other != rank:
                each.set_peer(other, address, ports[other], tokens[other])
        each.start(300.0)
    assert all(each.join(SECONDS) for each in made)
    until(lambda: all(a.traffic(b)[-1] == streams for b in range(P) for a in made[:b]))
    try:
        yield made
    finally:
        for each in made:
            each.close(1.0)


@contextmanager
def stranger(
    streams: int = 1, announced: int = 0
) -> Iterator[tuple[Connections, list[socket.socket], tuple[bytes, bytes]]]:
    """Rank 0 of 2, connections to it of a rank 1 that is this test, and the tokens of both.

    ``announced``: the number of connections that rank 0 expects, if it is another one.
    """
    mine, theirs = os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)
    tokens, announced = (theirs, mine), announced or streams
    rank = Connections(0, 2, 2**22, 1)
    port = rank.listen(HOST, theirs)
    rank.set_peer(1, HOST, 1, mine)
    rank.start(300.0)
    peers = [socket.create_connection((HOST, port)) for _ in range(streams)]
    for i, peer in enumerate(peers):
        peer.settimeout(SECONDS)
        peer.sendall(hello(tokens, 1, i, announced))
        assert read(peer, HELLO.size) == hello(tokens, 0, i, announced)
    assert rank.join(SECONDS)
    try:
        yield rank, peers, tokens
    finally:
        for peer in peers:
            peer.close()
        rank.close(0.1)


@contextmanager
def lower_peer(
    streams: int, greets: bool = True
) -> Iterator[tuple[Connections, socket.socket, list[socket.socket], tuple[bytes, bytes]]]:
    """Rank 1 of 2, the listener of a rank 0 that is this test, its first connection, and the tokens of both.

    ``greets``: rank 0 has answered the hello of the first connection.
    """
    mine, theirs = os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)
    tokens = mine, theirs
    rank = Connections(1, 2, 2**22, streams)
    rank.listen(HOST, theirs)
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(SECONDS)
        rank.set_peer(0, HOST, listener.getsockname()[1], mine)
        rank.start(300.0)
        peers = [listener.accept()[0]]
        peers[0].settimeout(SECONDS)
        assert read(peers[0], HELLO.size) == hello(tokens, 1, 0, streams)
        if greets:
            peers[0].sendall(hello(tokens, 0, 0))
        assert rank.join(SECONDS)
        try:
            yield rank, listener, peers, tokens
        finally:
            for peer in peers:
                peer.close()
            rank.close(0.1)


def collect(connections: Connections, messages: int, requests: int) -> tuple[list[Any], list[Any]]:
    """Return so many messages, as (peer, call, data), and so many requests that are out."""
    got, out = [], []
    while len(got) < messages or len(out) < requests:
        kind, rank, number, what = following(connections)
        assert kind in (DATA, SENT), what
        out.append(what) if kind == SENT else got.append((rank, number, what))
    return got, out


def frame(sequence: int, data: bytes, offset: int = 0, piece: int = 0, kind: int = DATA, number: int = 7) -> bytes:
    """Return a piece of a message, with its header."""
    piece = piece or max(len(data), 1)
    part = data[offset : offset + piece]
    return FRAME.pack(MAGIC, kind, number, sequence, len(data), offset, piece, len(part)) + part


def read(peer: socket.socket, nbytes: int) -> bytes:
    """Return so many bytes."""
    found = b""
    while len(found) < nbytes:
        found += (more := peer.recv(nbytes - len(found)))
        assert more, "it has ended"
    return found


def read_frame(peer: socket.socket, *, nothing: bool = False) -> tuple[tuple[int, ...], bytes]:
    """Return the words of a header, and the piece that follows; leave out frames of nothing, or count them, too.

    They may follow in any test: on a busy machine the system may take what comes late for lost.
    """
    while True:
        words = FRAME.unpack(read(peer, FRAME.size))
        assert words[0] == MAGIC
        piece = read(peer, words[-1])
        if nothing or words[1] != NOTHING:
            return words, piece


# -- messages ---------------------------------------------------------------------------------------------------------

sizes = st.one_of(st.integers(0, 70_000), st.sampled_from([13_000, 13_001, 2**16, 2**16 + 1, 10**6]))


@settings(max_examples=25)
@given(
    st.lists(sizes, max_size=12),
    st.lists(sizes, max_size=4),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([1000, 2**22]),
)
@example([0, 3_000_000, 1, 200_000, 0, 0], [1_000_000], 16, 2**22)
@example([0, 1, 63, 64, 65, 6400], [640], 2, 64)
def test_messages_of_any_size_arrive_whole_and_in_order(
    there: list[int], back: list[int], streams: int, limit: int
) -> None:
    with ranks(2, streams, limit) as pair:
        late: list[list[int]] = [[], []]
        for rank, sizes_of in enumerate([there, back]):
            for number, size in enumerate(sizes_of):
                if not pair[rank].send(1 - rank, number, noise(size, number), number):
                    late[rank].append(number)
        for rank, sizes_of in enumerate([back, there]):
            got, out = collect(pair[rank], len(sizes_of), len(late[rank]))
            assert [(peer, number) for peer, number, _ in got] == [(1 - rank, i) for i in range(len(sizes_of))]
            assert sorted(out) == late[rank]
            for (_, number, data), size in zip(got, sizes_of, strict=True):
                assert np.array_equal(data, noise(size, number))
                data[...] = 0  # it is the receiver's


@pytest.mark.parametrize("address", [HOST, "::1"])
def test_all_ranks_are_connected_with_all(address: str) -> None:
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no such address")
    with ranks(5, 2, address=address) as made:
        for a in range(5):
            for b in range(5):
                if a != b:
                    made[a].send(b, a, noise(10, a), None)
        for rank, each in enumerate(made):
            got, _ = collect(each, 4, 0)
            assert sorted(peer for peer, _, _ in got) == [other for other in range(5) if other != rank]
            assert all(number == peer and np.array_equal(data, noise(10, peer)) for peer, number, data in got)


def test_on_a_local_network_one_connection_serves_a_pair() -> None:
    """The number is chosen by the round trip, which is longer where a core is taken away meanwhile."""
    until(one_connection_serves_a_pair)


def one_connection_serves_a_pair() -> bool:
    made = [Connections(rank, 2, 2**22, 0) for rank in range(2)]
    tokens = [os.urandom(TOKEN_BYTES) for _ in made]
    ports = [each.listen(HOST, token) for each, token in zip(made, tokens, strict=True)]
    for rank, each in enumerate(made):
        each.set_peer(1 - rank, HOST, ports[1 - rank], tokens[1 - rank])
        each.start(300.0)
    assert all(each.join(SECONDS) for each in made)
    made[1].send(0, 1, noise(100_000), None)
    collect(made[0], 1, 0)
    return [each.traffic(1 - rank)[-1] for rank, each in enumerate(made)] == [1, 1]


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_pieces_of_a_message_are_spread_over_connections(size: int) -> None:
    """What four fresh connections carry in one trip goes over all of them, evenly."""
    with stranger(streams=4) as (rank, peers, _):
        until(lambda: rank.traffic(1)[-1] == 4)
        done = rank.send(1, 9, noise(size), "request")
        found, carried = bytearray(size), dict.fromkeys(peers, 0)
        while sum(carried.values()) < size:
            for peer in select.select(peers, [], [])[0]:
                (_, kind, number, sequence, total, offset, _, length), part = read_frame(peer)
                if kind == NOTHING:  # TCP has repeated a segment, as it does on a busy machine
                    continue
                assert (kind, number, sequence, total) == (DATA, 9, 0, size)
                found[offset : offset + length] = part
                carried[peer] += length
        assert found == noise(size).tobytes()
        assert min(carried.values()) >= 13_000
        if not done:
            assert following(rank) == (SENT, 1, 0, "request")


def test_a_connection_that_stalls_holds_up_little() -> None:
    """Nobody reads from one of four: the others carry what it has not taken."""
    size = 20_000_000
    with stranger(streams=4) as (rank, peers, _):
        until(lambda: rank.traffic(1)[-1] == 4)
        data = noise(size)
        assert rank.send(1, 9, data, "request") is False
        with ThreadPoolExecutor(3) as threads:
            arrive = [threads.submit(until_goodbye, peer) for peer in peers[1:]]
            assert following(rank) == (SENT, 1, 0, "request")  # the system has the rest
            closing = threading.Thread(target=rank.close, args=(SECONDS,))
            closing.start()
            assert sum(each.result() for each in arrive) > 0.8 * size
        peers[0].close()
        closing.join()


def until_goodbye(peer: socket.socket) -> int:
    """Return how many bytes of messages come before it."""
    arrived = 0
    while True:
        words, part = read_frame(peer)
        if words[1] == GOODBYE:
            return arrived
        arrived += len(part)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=6), st.integers(0, 2**32))
def test_pieces_come_in_any_order_over_any_connection(messages: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    with stranger(streams=3) as (rank, peers, _):
        frames = [
            frame(i, noise(size, i).tobytes(), offset, 64 if size > 64 else 0)
            for i, size in enumerate(messages)
            for offset in range(0, max(size, 1), 64 if size > 64 else 500)
        ]
        queues = [b"", b"", b""]
        for i in random.permutation(len(frames)):
            queues[random.integers(3)] += frames[i]
        while any(queues):
            for i, peer in enumerate(peers):
                take = random.integers(200)
                peer.sendall(queues[i][:take])
                queues[i] = queues[i][take:]
        got, _ = collect(rank, len(messages), 0)
        for i, (_, number, what) in enumerate(got):
            assert number == 7
            assert what.tobytes() == noise(messages[i], i).tobytes()


# -- what is no message -----------------------------------------------------------------------------------------------

word = st.one_of(st.integers(0, 300), st.sampled_from([2**17, 2**17 + 1, 2**62]), st.integers(0, 2**63 - 1))
GOOD = FRAME.pack(MAGIC, DATA, 1, 0, 0, 0, 1, 0)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_frame_of_nothing_follows_where_segments_have_been_lost(lossy: bool) -> None:
    """Where the queue of those who wait to be accepted is full, the system drops what asks for a connection."""
    mine, theirs, data = os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES), noise(20_000)  # two pieces
    rank = Connections(1, 2, 2**22, 2)
    rank.listen(HOST, theirs)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=0 if lossy else None))
        listener.settimeout(SECONDS)
        port = listener.getsockname()[1]
        rank.set_peer(0, HOST, port, mine)
        rank.start(300.0)
        until(lambda: len(connections_to(port)) == 2)  # before the first is accepted
        peers = []
        for i in range(2):
            peers.append(stack.enter_context(listener.accept()[0]))
            peers[i].settimeout(SECONDS)
            assert read(peers[i], HELLO.size) == hello((mine, theirs), 1, i, 2)
            peers[i].sendall(hello((mine, theirs), 0, i))
        until(lambda: rank.traffic(0)[-1] == 2)
        held = [stack.enter_context(held_too(fd)) for fd in of_this_process() if ports(fd)[1] == port]
        assert len(held) == 2
        assert rank.send(0, 1, data, None)
        assert rank.send(0, 2, data, None)
        closing = threading.Thread(target=rank.close, args=(SECONDS,))
        closing.start()
        kinds: list[list[int]] = []
        for peer in peers:
            kinds.append([])
            while GOODBYE not in kinds[-1]:
                kinds[-1].append(read_frame(peer, nothing=True)[0][1])
            peer.close()
        closing.join()
        lost = [each for each in held if segments_lost(each)]
    if lossy:  # it is known when the second connection is looked at, be it after the first
        assert kinds[0] in ([DATA, NOTHING] * 2 + [GOODBYE], [DATA, DATA, NOTHING, GOODBYE])
        assert kinds[1] == [DATA, NOTHING] * 2 + [GOODBYE]
    elif not lost:  # as it may be where this process gets no core
        assert kinds == [[DATA, DATA, GOODBYE]] * 2


def connections_to(port: int) -> list[str]:
    """Return what the system says of those to a port of this machine, also those that nobody has answered."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()
    return [line for line in lines if line.split()[2].endswith(f":{port:04X}")]


def test_frames_of_nothing_are_no_messages() -> None:
    nothing = FRAME.pack(MAGIC, NOTHING, 0, 0, 0, 0, 1, 0)
    first, second = (frame(0, bytes(range(200)), begin, 100) for begin in (0, 100))
    with stranger(2) as (rank, peers, _):
        peers[0].sendall(nothing + first + nothing + nothing)
        peers[1].sendall(second + nothing)
        assert following(rank)[:3] == (DATA, 1, 7)
        peers[1].sendall(frame(1, b"", kind=GOODBYE) + nothing)
        assert following(rank)[:2] == (GOODBYE, 1)
    with stranger() as (rank, peers, _):
        peers[0].sendall(FRAME.pack(MAGIC, NOTHING, 0, 0, 9, 0, 9, 9) + bytes(9))
        assert following(rank)[:2] == (UNREADABLE, 1)


@settings(max_examples=60)
@given(
    st.one_of(
        st.binary(min_size=FRAME.size, max_size=100),
        st.tuples(st.integers(-6, 300), word, word, word, word, st.integers(0, 300), st.integers(0, 300)).map(
            lambda words: FRAME.pack(MAGIC, *words)
        ),
    )
)
@example(FRAME.pack(MAGIC + 1, DATA, 1, 0, 0, 0, 1, 0))  # of another version, or order of bytes
@example(FRAME.pack(MAGIC, SENT, 1, 0, 0, 0, 1, 0))
@example(FRAME.pack(MAGIC, DATA, 2**62, 0, 0, 0, 1, 0))
@example(FRAME.pack(MAGIC, 3, 1, 0, 2**17 + 1, 0, 2**17 + 1, 2**17 + 1))  # a control message is short
@example(FRAME.pack(MAGIC, DATA, 1, 0, 100, 0, 100, 101))
@example(FRAME.pack(MAGIC, DATA, 1, 0, 100, 64, 64, 37))
@example(FRAME.pack(MAGIC, DATA, 1, 0, 100, 10, 64, 64))
@example(FRAME.pack(MAGIC, DATA, 1, 0, 2**40, 0, 1, 1))
@example(FRAME.pack(MAGIC, DATA, 1, 0, 2**48, 0, 2**31, 2**31))
@example(FRAME.pack(MAGIC, DATA, 1, 2**40, 0, 0, 1, 0))
@example(GOOD + GOOD)  # twice
@example(FRAME.pack(MAGIC, GOODBYE, 0, 0, 0, 0, 1, 0) + FRAME.pack(MAGIC, DATA, 1, 1, 0, 0, 1, 0))
@example(FRAME.pack(MAGIC, GOODBYE, 0, 0, 0, 0, 1, 0) + FRAME.pack(MAGIC, GOODBYE, 0, 0, 9, 0, 9, 9) + bytes(9))
def test_random_bytes_are_refused_or_read_in_bounds(raw: bytes) -> None:
    with stranger() as (rank, (peer,), _):
        peer.sendall(raw)
        peer.shutdown(socket.SHUT_WR)
        kind, who, number, what = following(rank)
        while kind in (DATA, *range(256)):
            assert 0 <= number < 2**62
            assert len(what) <= len(raw)
            kind, who, number, what = following(rank)
        assert who == 1
        assert kind in (DISCONNECTED, UNREADABLE, GOODBYE)
        assert kind != UNREADABLE or what.startswith("a message of ")


@pytest.mark.parametrize(
    "raw",
    [
        bytes(FRAME.size),
        FRAME.pack(MAGIC, 300, 1, 0, 0, 0, 1, 0),
        FRAME.pack(MAGIC, DATA, 1, 0, 2**47, 0, 2**20, 2**20),
        GOOD + GOOD,
        frame(1, bytes(300), 64, 64) * 2,
        frame(0, bytes(300), 64, 64) + frame(0, bytes(301), 128, 64),
    ],
)
def test_what_is_no_message_ends_the_connection(raw: bytes) -> None:
    with stranger() as (rank, (peer,), _):
        peer.sendall(raw)
        kind, who, _, what = following(rank)
        if kind == DATA:
            kind, who, _, what = following(rank)
        assert (kind, who) == (UNREADABLE, 1)
        assert what.startswith("a message of ")
        assert rank.send(1, 1, noise(10), None) is None
        assert rank.next(0.1) is None  # it is told once


@pytest.mark.parametrize("piece", [64, 2**20])
def test_a_length_alone_takes_no_memory(piece: int) -> None:
    with stranger() as (rank, (peer,), _):
        announced = [FRAME.pack(MAGIC, DATA, 1, 1 + i, 2**31, 0, piece, piece) + bytes(piece) for i in range(4)]
        raw = frame(0, bytes(2**20)) + b"".join(announced)
        before = resident()
        peer.sendall(raw)
        collect(rank, 1, 0)
        assert resident() - before < 2**24
        peer.close()
        assert following(rank)[:2] == (DISCONNECTED, 1)


def test_what_has_come_of_a_message_is_given_back_when_its_peer_is_lost() -> None:
    with stranger() as (rank, (peer,), _):
        part, before = bytes(2**20), resident()
        peer.sendall(FRAME.pack(MAGIC, DATA, 1, 0, 2**27, 0, 2**27, 2**27))
        for _ in range(64):
            peer.sendall(part)
        until(lambda: resident() - before > 2**25)
        peer.close()
        assert following(rank)[:2] == (DISCONNECTED, 1)
        assert resident() - before < 2**24


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- strangers --------------------------------------------------------------------------------------------------------


def test_a_wrong_or_a_repeated_hello_is_refused() -> None:
    with stranger(announced=3) as (rank, (peer,), tokens):
        right = hello(tokens, 1, 1, 3)
        wrong = {
            "a ticket that is a guess": right[:8] + os.urandom(16) + right[24:],
            "of another version": b"sparsec0" + right[8:],
            "the ticket of another connection": right[:8] + hello(tokens, 1, 2, 3)[8:24] + right[24:],
            "the ticket of the answer": right[:8] + hello(tokens, 0, 1)[8:24] + right[24:],
            "of the lower rank": hello(tokens, 0, 1),
            "of no rank": right[:24] + struct.pack("<IHH", 2, 1, 3),
            "of a rank that is far out": right[:24] + struct.pack("<IHH", 2**32 - 1, 1, 3),
            "of a connection that is far out": right[:24] + struct.pack("<IHH", 1, 2**16 - 1, 3),
            "a token": right[:8] + tokens[0] + right[24:],
            "something else": b"GET / HTTP/1.1\r\nHost: sparsecomm\r\n\r\n",
            "a repetition of the first": hello(tokens, 1, 0, 3),
        }
        for what, raw in wrong.items():
            assert refused(peer.getpeername(), raw), what
        with socket.create_connection(peer.getpeername()) as second:
            second.sendall(right)
            assert read(second, HELLO.size) == hello(tokens, 0, 1, 3)
            assert refused(peer.getpeername(), right), "a repetition of the second"
            peer.sendall(frame(0, b"hello"))
            assert following(rank)[3].tobytes() == b"hello"
            assert rank.send(1, 1, noise(3), None)
            assert read_frame(select.select([peer, second], [], [], SECONDS)[0][0])[1] == noise(3).tobytes()


def refused(address: Any, raw: bytes) -> bool:
    """Return whether a connection that begins with ``raw`` is closed without an answer."""
    with socket.create_connection(address) as other:
        other.settimeout(SECONDS)
        other.sendall(raw)
        with suppress(ConnectionResetError):
            return other.recv(1) == b""
    return True


SENDS = {"silent": b"", "slow": b"s", "garbage": noise(1000).tobytes(), "half a hello": b"sparsec2" + bytes(20)}


@pytest.mark.parametrize("sends", SENDS.values(), ids=SENDS)
def test_a_flood_of_strangers_keeps_nobody_out(sends: bytes) -> None:
    """They come first, take few descriptors, and go on while the ranks connect, which need only a few trips."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    pair = [Connections(rank, 2, 2**22, 3) for rank in range(2)]
    tokens = [os.urandom(TOKEN_BYTES) for _ in pair]
    ports = [each.listen(HOST, token) for each, token in zip(pair, tokens, strict=True)]
    others: list[socket.socket] = []
    connected = threading.Event()

    def connect() -> None:
        other = socket.create_connection((HOST, ports[0]), SECONDS)
        with suppress(OSError):
            other.sendall(sends)
        others.append(other)

    def go_on() -> None:
        while not connected.is_set() and len(others) < 2000:
            for slow in others[-20:]:
                with suppress(OSError):
                    slow.sendall(sends[:1])
            with suppress(ConnectionError):
                connect()

    flood = threading.Thread(target=go_on)
    try:
        for rank, each in enumerate(pair):
            each.set_peer(1 - rank, HOST, ports[1 - rank], tokens[1 - rank])
        before = len(of_this_process())
        pair[0].start(300.0)
        for _ in range(1200):
            connect()
        until(lambda: len(of_this_process()) - before - len(others) < 32)
        flood.start()
        pair[1].start(300.0)
        for rank, each in enumerate(pair):
            assert each.join(SECONDS)
            each.send(1 - rank, 7, noise(100_000, rank), rank)
        for rank, each in enumerate(pair):
            ((_, number, data),), _ = collect(each, 1, 0)
            assert number == 7
            assert np.array_equal(data, noise(100_000, 1 - rank))
        until(lambda: all(each.traffic(1 - rank)[-1] == 3 for rank, each in enumerate(pair)))
        connected.set()
        flood.join()
        until(lambda: nobody_listens(ports[0]))
        assert len(of_this_process()) - before - len(others) <= 6 - 2  # connections, without two listeners
    finally:
        connected.set()
        for each in pair:
            each.close(1.0)
        for other in others:
            other.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_do_not_fill_the_queue_of_the_system_before_ranks_come() -> None:
    """TCP asks a full queue again only after a second."""
    rank = Connections(0, 2, 2**22, 1)
    address = HOST, rank.listen(HOST, bytes(16))

    def is_open() -> bool:
        with socket.socket() as other:
            other.settimeout(0.3)
            return other.connect_ex(address) == 0

    for _ in range(min(4096, int(Path("/proc/sys/net/core/somaxconn").read_text())) + 100):
        with socket.socket() as other:
            other.setblocking(False)
            other.connect_ex(address)
    until(is_open)
    rank.close(0.0)


def nobody_listens(port: int) -> bool:
    with socket.socket() as other:
        return other.connect_ex((HOST, port)) == errno.ECONNREFUSED


@pytest.mark.parametrize("streams", [1, 2])
def test_nobody_listens_when_all_are_connected(streams: int) -> None:
    made = [Connections(rank, 3, 2**22, streams) for rank in range(3)]
    ports = [each.listen(HOST, bytes([rank] * 16)) for rank, each in enumerate(made)]
    for rank, each in enumerate(made):
        for other in {0, 1, 2} - {rank}:
            each.set_peer(other, HOST, ports[other], bytes([other] * 16))
    made[2].start(300.0)
    until(lambda: nobody_listens(ports[2]))  # nobody connects to the last rank
    made[0].start(300.0)
    assert not made[0].join(0.05)
    assert not nobody_listens(ports[0])
    made[1].start(300.0)
    for port in ports:
        until(lambda port=port: nobody_listens(port))
    assert all(each.join(SECONDS) for each in made)
    for each in made:
        each.close(1.0)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sizes", [[0], [1000, 1000], [12_000, 5000, 7], [1_000_000, 10]])
def test_who_is_turned_away_comes_again_and_repeats_what_it_has_sent(sizes: list[int], reset: bool) -> None:
    """As a listener does to the oldest of too many connections, although it is that of a rank."""
    with lower_peer(1, greets=False) as (rank, listener, peers, tokens):
        late = [i for i, size in enumerate(sizes) if not rank.send(0, i, noise(size, i), i)]
        for taken in (0, 40, 900):
            if reset:
                peers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peers[-1].recv(taken + 1)
            peers[-1].close()
            peers.append(listener.accept()[0])
            peers[-1].settimeout(SECONDS)
            assert read(peers[-1], HELLO.size) == hello(tokens, 1, 0)
        used = cpu_seconds(rank.thread_id)
        time.sleep(0.2)
        assert cpu_seconds(rank.thread_id) - used < 0.1  # it waits
        peers[-1].sendall(hello(tokens, 0, 0))
        for i, size in enumerate(sizes):
            found = b""
            while not found or len(found) < size:
                words, part = read_frame(peers[-1])
                assert words[1:6] == (DATA, i, i, size, len(found))
                found += part
                if not size:
                    break
            assert found == noise(size, i).tobytes()
        assert collect(rank, 0, len(late))[1] == late


def test_an_end_waits_until_the_hello_is_answered() -> None:
    """Otherwise a last message would be lost with a connection that is turned away."""
    with lower_peer(1, greets=False) as (rank, listener, peers, tokens):
        assert rank.send(0, 3, noise(10), None)
        closing = threading.Thread(target=rank.close, args=(SECONDS,))
        closing.start()
        time.sleep(0.05)
        peers[0].close()
        peers.append(listener.accept()[0])
        peers[-1].settimeout(SECONDS)
        peers[-1].sendall(hello(tokens, 0, 0))
        assert read(peers[-1], HELLO.size) == hello(tokens, 1, 0)
        assert read_frame(peers[-1])[1] == noise(10).tobytes()
        assert read_frame(peers[-1])[0][1] == GOODBYE
        closing.join()


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3])
def test_a_peer_that_dies_within_a_message(streams: int) -> None:
    """What is whole, and all before it, is delivered; then its death is told, once."""
    with stranger(streams) as (rank, peers, _):
        until(lambda: rank.traffic(1)[-1] == streams)
        peers[0].sendall(frame(0, b"whole") + frame(1, bytes(10_000), 0, 5000)[:3000])
        peers[-1].sendall(frame(2, b"later") if streams > 1 else b"")
        assert following(rank)[3].tobytes() == b"whole"
        peers[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as of a killed process
        peers[0].close()
        kind, who, _, why = following(rank)
        assert (kind, who) == (DISCONNECTED, 1)
        assert "reset" in why or "closed" in why
        assert rank.next(0.1) is None
        assert rank.send(1, 1, noise(10), None) is None


def test_a_peer_that_ends_in_order_is_not_dead() -> None:
    """Its goodbye may come after some of its connections have ended, on each of them."""
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


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("pieces", [0, 1])
def test_a_goodbye_does_not_hide_that_a_message_is_missing(pieces: int, reset: bool) -> None:
    """One connection has said goodbye, and another one ends before what the goodbye came after."""
    with stranger(streams=3) as (rank, peers, _):
        peers[0].sendall(frame(0, bytes(100), 0, 64)[: -1 if pieces == 0 else None])
        for peer in peers[1:]:
            peer.sendall(frame(1, b"", kind=GOODBYE))
            peer.close()
        assert rank.next(0.1) is None
        if reset:
            peers[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peers[0].close()
        assert following(rank)[:2] == (DISCONNECTED, 1)
        assert rank.send(1, 1, noise(10), None) is None
        assert rank.next(0.1) is None


def test_all_connections_say_goodbye_also_those_that_nobody_has_answered() -> None:
    """A peer that hears a hello, and then an end without a goodbye, would take the rank for dead."""
    with lower_peer(streams=3) as (rank, listener, peers, tokens):
        for _ in range(2):
            peers.append(listener.accept()[0])
            assert read(peers[-1], HELLO.size) in [hello(tokens, 1, i, 3) for i in (1, 2)]
        rank.close(SECONDS)
        for peer in peers:
            assert read_frame(peer)[0][1:4] == (GOODBYE, 0, 0)
            assert peer.recv(1) == b""


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_what_was_sent_arrives_although_the_peer_sends_too(late: float) -> None:
    """To what comes for a closed connection the system answers by forgetting what it was still to send."""
    sizes = [60_000] * 30
    with stranger() as (rank, (peer,), _):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        assert all(rank.send(1, i, noise(size, i), i) for i, size in enumerate(sizes))
        closing = threading.Thread(target=rank.close, args=(SECONDS,))
        closing.start()
        time.sleep(late)
        for i, size in enumerate(sizes):
            peer.sendall(frame(i, b"are you there?"))
            time.sleep(0.01)  # it is slow
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


def test_what_comes_with_the_hello_is_counted() -> None:
    mine = os.urandom(TOKEN_BYTES)
    rank = Connections(0, 2, 2**22, 1)
    port = rank.listen(HOST, mine)
    rank.set_peer(1, HOST, 1, mine)
    rank.start(300.0)
    data = hello((mine, mine), 1, 0) + frame(0, bytes(1000))
    with socket.create_connection((HOST, port)) as peer:
        peer.sendall(data)
        collect(rank, 1, 0)
        assert rank.traffic(1)[1] == len(data)
        rank.close(0.0)


def test_a_connection_that_another_process_still_holds_is_closed_for_this_one() -> None:
    """As one does that is just being forked, or that is about to become another program."""
    with stranger() as (rank, (peer,), _):
        held = [os.dup(fd) for fd in of_this_process() if ports(fd)[0] == peer.getpeername()[1]]
        assert held
        peer.close()
        assert following(rank)[:2] == (DISCONNECTED, 1)
        used = cpu_seconds(rank.thread_id)
        time.sleep(0.5)
        assert cpu_seconds(rank.thread_id) - used < 0.25  # it waits, for nothing happens
        for fd in held:
            os.close(fd)


def of_this_process() -> list[int]:
    """Return the descriptors of sockets."""
    return [int(fd) for fd in os.listdir("/proc/self/fd") if stat.S_ISSOCK(mode_of(int(fd)))]


def mode_of(fd: int) -> int:
    try:
        return os.fstat(fd).st_mode
    except OSError:
        return 0


def held_too(fd: int) -> socket.socket:
    """Return the same connection, by a descriptor of its own."""
    return socket.socket(fileno=os.dup(fd))


def ports(fd: int) -> tuple[int, int]:
    """Return the ports of a connection of TCP, this end's first; zeros if it is something else."""
    with held_too(fd) as same:
        try:
            return int(same.getsockname()[1]), int(same.getpeername()[1])
        except (OSError, ValueError, TypeError, IndexError):
            return 0, 0


def segments_lost(connection: socket.socket) -> int:
    """Return how many have been sent again."""
    found: int = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0]
    return found


def cpu_seconds(thread: int) -> float:
    """Return what a thread of this process has used."""
    with open(f"/proc/self/task/{thread}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def test_goodbye_comes_after_all_else() -> None:
    for streams in (1, 5):
        with ranks(2, streams) as (a, b):
            requests = [i for i in range(5) if not a.send(1, i, noise(5_000_000, i), i)]
            a.close(SECONDS)
            got, _ = collect(b, 5, 0)
            assert all(np.array_equal(data, noise(5_000_000, number)) for _, number, data in got)
            assert following(b)[:2] == (GOODBYE, 0)
            assert b.next(0.1) is None
            assert requests


def test_a_reader_that_does_not_read_costs_the_sender_no_memory() -> None:
    with stranger() as (rank, _, _):
        data, before, began = noise(100_000_000), resident(), time.monotonic()
        assert rank.send(1, 1, data, "request") is False
        assert rank.send(1, 2, noise(10), None)  # a short message behind it is copied
        assert time.monotonic() - began < SECONDS / 2
        assert resident() - before < 2**24
        rank.close(0.2)  # does not wait for it
        assert time.monotonic() - began < SECONDS


def test_a_peer_that_does_not_listen_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        rank = Connections(1, 2, 2**22, 1)
        rank.listen(HOST, bytes(16))
        rank.set_peer(0, HOST, taken.getsockname()[1], bytes(16))
        rank.start(300.0)
        assert not rank.join(SECONDS)
        assert "refused" in rank.failure(0)
        assert not rank.is_connected(0)
        rank.close(1.0)
        rank.close(1.0)


def test_what_cannot_be_an_address_is_refused() -> None:
    rank = Connections(0, 2, 2**22, 1)
    with pytest.raises(RuntimeError, match="nowhere is not an address"):
        rank.listen("nowhere", bytes(16))
    with pytest.raises(RuntimeError, match=r"listen on 192\.0\.2\.1: Cannot assign"):
        rank.listen("192.0.2.1", bytes(16))  # that of no machine
    with pytest.raises(ValueError, match="token"):
        rank.listen(HOST, b"short")


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX, where other tests of this process use it, warns of its threads
def test_a_forked_process_holds_no_connection() -> None:
    """Else a peer would not see that the process is dead from which it was forked."""
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
