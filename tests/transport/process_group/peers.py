"""Connected ranks in one process, and peers that are plain sockets."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparsecomm.transport.process_group._connections import DATA, SENT, TOKEN_BYTES, Connections
from tests.transport.conformance import noise as noise
from tests.waiting import SOON, until

HOST = "127.0.0.1"
HELLO = struct.Struct("<8s16sIHH")  # magic, ticket, sender's rank, index of the connection, number of connections
FRAME = struct.Struct("<IiqQQQII")  # magic, kind, call, sequence, total, offset, piece, length
MAGIC, NOTHING = 0x53435031, -6
SECONDS = float(SOON)
Tokens = tuple[bytes, bytes]  # of ranks 0 and 1


def hello(tokens: Tokens, sender: int, index: int, streams: int = 1) -> bytes:
    tickets = hashlib.shake_128(b"".join(tokens)).digest(2 * 64 * 16)
    at = 16 * (index + (0 if sender else 64))  # tickets of the connecting rank come first
    return HELLO.pack(b"sparsec2", tickets[at : at + 16], sender, index, streams)


def frame(sequence: int, data: bytes, offset: int = 0, piece: int = 0, kind: int = DATA, number: int = 7) -> bytes:
    piece = piece or max(len(data), 1)
    part = data[offset : offset + piece]
    return FRAME.pack(MAGIC, kind, number, sequence, len(data), offset, piece, len(part)) + part


def read(peer: socket.socket, nbytes: int) -> bytes:
    content = b""
    while len(content) < nbytes:
        content += (more := peer.recv(nbytes - len(content)))
        assert more, "it has ended"
    return content


def read_frame(peer: socket.socket, *, nothing: bool = False) -> tuple[tuple[int, ...], bytes]:
    """Return a frame's header and piece. Empty frames are skipped unless ``nothing``.

    Empty frames may arrive in any test: on a busy machine TCP may take late segments for lost.
    """
    while True:
        words = FRAME.unpack(read(peer, FRAME.size))
        assert words[0] == MAGIC
        piece = read(peer, words[-1])
        if nothing or words[1] != NOTHING:
            return words, piece


def reset_at_close(peer: socket.socket) -> None:
    """Reset the connection on close, as the system does for a killed process."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# -- ranks ------------------------------------------------------------------------------------------------------------


def following(connections: Connections) -> tuple[int, int, int, Any]:
    return until(lambda: connections.next(1.0), "a completion")


def collect(connections: Connections, messages: int, requests: int) -> tuple[list[Any], list[Any]]:
    """Return ``messages`` messages as (peer, call, data), and ``requests`` sent requests."""
    got, out = [], []
    while len(got) < messages or len(out) < requests:
        kind, rank, number, what = following(connections)
        assert kind in (DATA, SENT), what
        out.append(what) if kind == SENT else got.append((rank, number, what))
    return got, out


def listen(by_rank: Sequence[Connections], address: str = HOST) -> list[int]:
    """Let ranks listen, exchange their addresses, and return their ports."""
    tokens = [os.urandom(TOKEN_BYTES) for _ in by_rank]
    ports = [connections.listen(address, token) for connections, token in zip(by_rank, tokens, strict=True)]
    for rank, connections in enumerate(by_rank):
        for other in range(len(by_rank)):
            if other != rank:
                connections.set_peer(other, address, ports[other], tokens[other])
    return ports


@contextmanager
def ranks(P: int, streams: int = 1, limit: int = 2**22, address: str = HOST) -> Iterator[list[Connections]]:
    by_rank = [Connections(rank, P, limit, streams) for rank in range(P)]
    listen(by_rank, address)
    for connections in by_rank:
        connections.start(300.0)
    assert all(connections.join(SECONDS) for connections in by_rank)
    if streams:
        until(lambda: all(a.traffic(b)[-1] == streams for b in range(P) for a in by_rank[:b]))
    try:
        yield by_rank
    finally:
        for connections in by_rank:
            connections.close(1.0)


@contextmanager
def stranger(streams: int = 1, announced: int = 0) -> Iterator[tuple[Connections, list[socket.socket], Tokens]]:
    """Yield rank 0 of 2, connections to it from the test, which acts as rank 1, and the tokens of both.

    ``announced``: the number of connections that rank 0 expects, if it differs.
    """
    tokens, announced = (os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)), announced or streams
    rank = Connections(0, 2, 2**22, 1)
    port = rank.listen(HOST, tokens[0])
    rank.set_peer(1, HOST, 1, tokens[1])
    rank.start(300.0)
    peers = [socket.create_connection((HOST, port), SECONDS) for _ in range(streams)]
    for i, peer in enumerate(peers):
        peer.sendall(hello(tokens, 1, i, announced))
        assert read(peer, HELLO.size) == hello(tokens, 0, i, announced)
    assert rank.join(SECONDS)
    until(lambda: rank.traffic(1)[-1] == streams)
    try:
        yield rank, peers, tokens
    finally:
        for peer in peers:
            peer.close()
        rank.close(0.1)


class LowerPeer:
    """The test acts as rank 0 of 2: its listener, and connections from rank 1, which is ``rank``."""

    def __init__(self, streams: int = 1, backlog: int | None = None) -> None:
        self.tokens, self.streams = (os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)), streams
        self.listener = socket.create_server((HOST, 0), backlog=backlog)
        self.listener.settimeout(SECONDS)
        self.port = int(self.listener.getsockname()[1])
        self.peers: list[socket.socket] = []
        self.rank = Connections(1, 2, 2**22, streams)
        self.rank.listen(HOST, self.tokens[1])
        self.rank.set_peer(0, HOST, self.port, self.tokens[0])
        self.rank.start(300.0)

    def __enter__(self) -> LowerPeer:
        return self

    def __exit__(self, *_: object) -> None:
        for open_socket in (self.listener, *self.peers):
            open_socket.close()
        self.rank.close(0.1)

    def accept(self, *indices: int) -> socket.socket:
        """Accept a connection whose hello has one of ``indices``."""
        peer, _ = self.listener.accept()
        peer.settimeout(SECONDS)
        self.peers.append(peer)
        assert read(peer, HELLO.size) in [hello(self.tokens, 1, i, self.streams) for i in indices]
        return peer


# -- this process -----------------------------------------------------------------------------------------------------


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def of_this_process() -> list[int]:
    return [int(fd) for fd in os.listdir("/proc/self/fd") if stat.S_ISSOCK(mode_of(int(fd)))]


def mode_of(fd: int) -> int:
    try:
        return os.fstat(fd).st_mode
    except OSError:
        return 0


def held_too(fd: int) -> socket.socket:
    """Return a duplicate descriptor of a connection."""
    return socket.socket(fileno=os.dup(fd))


def ports(fd: int) -> tuple[int, int]:
    """Return the local and remote ports of a TCP connection; zeros for other descriptors."""
    with held_too(fd) as same:
        try:
            return int(same.getsockname()[1]), int(same.getpeername()[1])
        except (OSError, ValueError, TypeError, IndexError):
            return 0, 0


def cpu_seconds(thread: int) -> float:
    with open(f"/proc/self/task/{thread}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9
