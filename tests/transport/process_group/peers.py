"""Connections between ranks of this process, and peers that are plain sockets, for the tests of connections."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sparsecomm.transport.process_group._connections import DATA, SENT, TOKEN_BYTES, Connections
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


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


def cpu_seconds(thread: int) -> float:
    """Return what a thread of this process has used."""
    with open(f"/proc/self/task/{thread}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9
