"""Frames on a connection: pieces in any order, empty frames, and invalid frames."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsecomm.transport.process_group._connections import DATA, DISCONNECTED, GOODBYE, UNREADABLE
from tests.transport.process_group.peers import (
    FRAME,
    MAGIC,
    NOTHING,
    SECONDS,
    LowerPeer,
    collect,
    following,
    frame,
    held_too,
    hello,
    noise,
    of_this_process,
    ports,
    read_frame,
    resident,
    stranger,
)
from tests.waiting import until


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


word = st.one_of(st.integers(0, 300), st.sampled_from([2**17, 2**17 + 1, 2**62]), st.integers(0, 2**63 - 1))
GOOD = FRAME.pack(MAGIC, DATA, 1, 0, 0, 0, 1, 0)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_frame_of_nothing_follows_where_segments_have_been_lost(lossy: bool) -> None:
    """A full accept queue makes the system drop connection requests, so segments are lost."""
    data = noise(20_000)  # two pieces
    with ExitStack() as stack:
        lower = stack.enter_context(LowerPeer(2, backlog=0 if lossy else None))
        # Accept none before both have asked, and the second one in vain.
        until(lambda: len(retransmits_to(lower.port)) == 2 and any(retransmits_to(lower.port)) >= lossy)
        for i in range(2):
            lower.accept(i).sendall(hello(lower.tokens, 0, i))
        until(lambda: lower.rank.traffic(0)[-1] == 2)
        connections = [stack.enter_context(held_too(fd)) for fd in of_this_process() if ports(fd)[1] == lower.port]
        assert len(connections) == 2
        for number in (1, 2):
            assert lower.rank.send(0, number, data, None)
        closing = threading.Thread(target=lower.rank.close, args=(SECONDS,))
        closing.start()
        kinds: list[list[int]] = []
        for peer in lower.peers:
            kinds.append([])
            while GOODBYE not in kinds[-1]:
                kinds[-1].append(read_frame(peer, nothing=True)[0][1])
            peer.close()
        closing.join()
        lost = [connection for connection in connections if segments_lost(connection)]
    if lossy:  # the loss is known when the second connection is checked
        assert kinds[0] in ([DATA, NOTHING] * 2 + [GOODBYE], [DATA, DATA, NOTHING, GOODBYE])
        assert kinds[1] == [DATA, NOTHING] * 2 + [GOODBYE]
    elif not lost:  # segments may be lost if this process gets no core
        assert kinds == [[DATA, DATA, GOODBYE]] * 2


def retransmits_to(port: int) -> list[int]:
    """Return how often each connection to a local port, answered or not, repeats its last segment now."""
    entries = map(str.split, Path("/proc/self/net/tcp").read_text().splitlines())
    return [int(entry[6], 16) for entry in entries if entry[2].endswith(f":{port:04X}")]


def test_frames_of_nothing_are_no_messages() -> None:
    nothing = FRAME.pack(MAGIC, NOTHING, 0, 0, 0, 0, 1, 0)
    first, second = (frame(0, bytes(range(200)), begin, 100) for begin in (0, 100))
    with stranger(2) as (rank, peers, _):
        peers[0].sendall(nothing + first + nothing + nothing)
        peers[1].sendall(second + nothing)
        assert following(rank)[:3] == (DATA, 1, 7)
        peers[1].sendall(frame(1, b"", kind=GOODBYE) + nothing)
        assert following(rank)[:2] == (GOODBYE, 1)


@settings(max_examples=60)
@given(
    st.one_of(
        st.binary(min_size=FRAME.size, max_size=100),
        st.tuples(st.integers(-6, 300), word, word, word, word, st.integers(0, 300), st.integers(0, 300)).map(
            lambda words: FRAME.pack(MAGIC, *words)
        ),
    )
)
@example(FRAME.pack(MAGIC + 1, DATA, 1, 0, 0, 0, 1, 0))  # another version, or byte order
@example(FRAME.pack(MAGIC, DATA, 2**62, 0, 0, 0, 1, 0))
@example(FRAME.pack(MAGIC, 3, 1, 0, 2**17 + 1, 0, 2**17 + 1, 2**17 + 1))  # a control message is short
@example(FRAME.pack(MAGIC, DATA, 1, 0, 100, 64, 64, 37))
@example(FRAME.pack(MAGIC, DATA, 1, 0, 2**48, 0, 2**31, 2**31))
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
        FRAME.pack(MAGIC, NOTHING, 0, 0, 9, 0, 9, 9) + bytes(9),
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
        assert rank.next(0.1) is None  # reported once


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


def segments_lost(connection: socket.socket) -> int:
    segments: int = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0]
    return segments
