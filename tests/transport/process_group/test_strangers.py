"""Set-up of connections while strangers connect, too: hellos, the listener, and rejected ranks."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sparsecomm.transport.process_group._connections import DATA, GOODBYE, Connections
from tests.transport.process_group.peers import (
    HELLO,
    HOST,
    SECONDS,
    LowerPeer,
    collect,
    cpu_seconds,
    following,
    frame,
    hello,
    listen,
    noise,
    read,
    read_frame,
    reset_at_close,
    stranger,
)
from tests.waiting import until


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


def test_strangers_do_not_fill_the_queue_of_the_system_before_ranks_come() -> None:
    """TCP retries a full queue only after a second."""
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
    by_rank = [Connections(rank, 3, 2**22, streams) for rank in range(3)]
    ports = listen(by_rank)
    by_rank[2].start(300.0)
    until(lambda: nobody_listens(ports[2]))  # the last rank needs no listener
    by_rank[0].start(300.0)
    assert not by_rank[0].join(0.05)
    assert not nobody_listens(ports[0])
    by_rank[1].start(300.0)
    for port in ports:
        until(lambda port=port: nobody_listens(port))
    assert all(connections.join(SECONDS) for connections in by_rank)
    for connections in by_rank:
        connections.close(1.0)


# Makes connections to some ports without end, and sends less than a hello, a wrong one, or a reset. Prints a line now
# and then.
FLOOD = """
import collections, random, resource, socket, struct, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
choose, held, number = random.Random(1), collections.deque(), 0
while True:
    for port in map(int, sys.argv[1:]):
        if len(held) == min(2000, hard - 100):
            held.popleft().close()
        other = socket.socket()
        other.setblocking(False)
        other.connect_ex(("127.0.0.1", port))
        kind = choose.choice(["silent", "slow", "half", "guess", "garbage", "reset"])
        try:
            if kind == "slow" and held:
                choose.choice(held).send(b"s")
            elif kind == "half":
                other.send(b"sparsec2" + choose.randbytes(choose.randrange(24)))
            elif kind == "guess":
                other.send(b"sparsec2" + choose.randbytes(16) + struct.pack("<IHH", 2, 0, 1))
            elif kind == "garbage":
                other.send(choose.randbytes(choose.randrange(1, 5000)))
            elif kind == "reset":
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                other.close()
        except OSError:
            pass
        held.append(other)
        number += 1
        if number % 4000 == 0:
            print(number, flush=True)
"""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ranks_connect_during_a_flood_with_few_descriptors() -> None:
    by_rank = [Connections(rank, 3, 2**22, 1) for rank in range(3)]
    ports = listen(by_rank)
    for connections in by_rank[:2]:
        connections.start(300.0)
    before, (soft, hard) = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 80, hard))
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, *map(str, ports[:2])], stdout=subprocess.PIPE)
    try:
        assert flood.stdout is not None
        taken = []
        for _ in range(3):
            flood.stdout.readline()
            taken.append(descriptors() - before)
        assert max(taken) < 2 * 32
        by_rank[2].start(300.0)
        assert all(connections.join(SECONDS) for connections in by_rank)
        for port in ports:
            until(lambda port=port: nobody_listens(port))
        for a, b in ((0, 1), (1, 2), (2, 0)):
            by_rank[a].send(b, 0, noise(100, a), None)
            assert collect(by_rank[b], 1, 0)[0][0][2].tobytes() == noise(100, a).tobytes()
        flood.stdout.readline()
        assert descriptors() - before < 16
    finally:
        flood.kill()
        flood.communicate()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for connections in by_rank:
            connections.close(1.0)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sizes", [[0], [1000, 1000], [12_000, 5000, 7], [1_000_000, 10]])
def test_who_is_turned_away_comes_again_and_repeats_what_it_has_sent(sizes: list[int], reset: bool) -> None:
    """A listener closes the oldest of too many connections, even if it is a rank's."""
    with LowerPeer() as lower:
        rank, peer = lower.rank, lower.accept(0)
        assert rank.join(SECONDS)
        late = [i for i, size in enumerate(sizes) if not rank.send(0, i, noise(size, i), i)]
        for taken in (0, 40, 900):
            if reset:
                reset_at_close(peer)
            peer.recv(taken + 1)
            peer.close()
            peer = lower.accept(0)
        used = cpu_seconds(rank.thread_id)
        time.sleep(0.2)
        assert cpu_seconds(rank.thread_id) - used < 0.1
        peer.sendall(hello(lower.tokens, 0, 0))
        for i, size in enumerate(sizes):
            content, complete = b"", False
            while not complete:
                words, part = read_frame(peer)
                assert words[1:6] == (DATA, i, i, size, len(content))
                content += part
                complete = len(content) == size
            assert content == noise(size, i).tobytes()
        assert collect(rank, 0, len(late))[1] == late


def test_an_end_waits_until_the_hello_is_answered() -> None:
    """Otherwise the last message would be lost if the connection is rejected."""
    with LowerPeer() as lower:
        peer = lower.accept(0)
        assert lower.rank.join(SECONDS)
        assert lower.rank.send(0, 3, noise(10), None)
        closing = threading.Thread(target=lower.rank.close, args=(SECONDS,))
        closing.start()
        time.sleep(0.05)
        peer.close()
        peer = lower.accept(0)
        peer.sendall(hello(lower.tokens, 0, 0))
        assert read_frame(peer)[1] == noise(10).tobytes()
        assert read_frame(peer)[0][1] == GOODBYE
        closing.join()


def test_what_cannot_be_an_address_is_refused() -> None:
    rank = Connections(0, 2, 2**22, 1)
    with pytest.raises(RuntimeError, match="nowhere is not an address"):
        rank.listen("nowhere", bytes(16))
    with pytest.raises(RuntimeError, match=r"listen on 192\.0\.2\.1: Cannot assign"):
        rank.listen("192.0.2.1", bytes(16))  # no machine has this address
    with pytest.raises(ValueError, match="token"):
        rank.listen(HOST, b"short")
