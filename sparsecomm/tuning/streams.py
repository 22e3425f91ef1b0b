"""Measures TCP over a link: the rates of one stream and of several, and the loss.

Streams are TCP connections of their own, between addresses over which ranks talk anyway: members send to the next one,
half of them at a time. Losses are the segments that were sent again, as the kernel counts them, by connections that are
kept from filling the link: queues then drop nothing.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["STREAMS", "Streams", "World", "measure"]

STREAMS = 8
_PACED = 0.5  # of the rate, so that a link is not full
_CONNECT = 5.0  # seconds that a connection may take
_SO_MAX_PACING_RATE = 47  # of Linux: bytes per second
_TCP_INFO = 192  # bytes of struct tcp_info that are asked for
_RETRANSMITTED, _SENT = 100, 156  # where tcpi_total_retrans and tcpi_data_segs_out are in it, since Linux 4.6


class World(Protocol):
    """What streams need of the ranks, as mpi4py names it."""

    def Get_rank(self) -> int: ...  # noqa: N802

    def allgather(self, value: Any, /) -> list[Any]: ...


@dataclass(frozen=True)
class Streams:
    """What was found, the same on all ranks.

    Attributes:
        one, several: bits per second of one connection, and of `STREAMS` together; ``None``: they could not be made,
            for the reason ``unseen``.
        loss: the part of segments that were sent again; ``None`` as well where the kernel does not count them.
        control: the congestion control of TCP, such as "cubic".
    """

    one: float | None = None
    several: float | None = None
    loss: float | None = None
    control: str = ""
    unseen: str = ""


def measure(comm: World, members: Sequence[int], addresses: Sequence[str | None], seconds: float) -> Streams:
    """Return what streams between ``members`` are like. Collective over all ranks.

    Args:
        members: ranks, one behind each link.
        addresses: by rank, that at which it can be reached; ``None`` where it is not known.
        seconds: about how long each of six groups of streams is timed.
    """
    if any(addresses[member] is None for member in members):
        return Streams(unseen="no TCP connections between the ranks are seen")
    told: list[list[_Told]] = []
    for count, paced in ((1, False), (STREAMS, False), (STREAMS, True)):
        pace = _PACED * min(its.rate for its in told[1] if its.rate is not None) / count if paced else 0.0
        told.append([])
        for pairs in _one_way(members):
            told[-1] += comm.allgather(_streams(comm, pairs, addresses, count, seconds, pace))
        if reason := next((its.problem for its in told[-1] if its.problem), ""):
            return Streams(unseen=reason)
    one, several, _ = (min(its.rate for its in each if its.rate is not None) for each in told)
    again, sent = (sum(getattr(its, name) for its in told[2]) for name in ("again", "sent"))
    control = next(its.control for its in told[0] if its.control)
    return Streams(one, several, again / sent if sent else None, control)


class _Told(NamedTuple):
    """What a rank has seen of streams.

    Attributes:
        rate: bits per second that came; None: it has sent.
        again, sent: segments that it has sent again, and sent in all.
        control: the congestion control of those that it has sent.
        problem: why there were no streams.
    """

    rate: float | None = None
    again: int = 0
    sent: int = 0
    control: str = ""
    problem: str = ""


def _one_way(members: Sequence[int]) -> list[dict[int, int]]:
    """Return turns in each of which some members send to the next one, and none both sends and receives.

    Where a link is full of data in one direction, the acknowledgements of the other direction wait behind it.
    """
    count = len(members)
    turns: list[dict[int, int]] = [{} for _ in range(2 + count % 2)]
    for i, member in enumerate(members):
        turns[2 if count % 2 and i == count - 1 else i % 2][member] = members[(i + 1) % count]
    return turns


def _streams(
    comm: World,
    pairs: Mapping[int, int],
    addresses: Sequence[str | None],
    count: int,
    seconds: float,
    pace: float = 0.0,
) -> _Told:
    """Send over ``count`` connections from each key of ``pairs`` to its value, all at once. Collective over all ranks.

    ``pace``: bits per second that each may send at most.
    """
    rank, problem, port = comm.Get_rank(), "", 0
    with ExitStack() as sockets:
        server = None
        if rank in pairs.values():
            try:
                server = sockets.enter_context(_listening(str(addresses[rank]), count))
                port = server.getsockname()[1]
            except OSError as error:
                problem = f"rank {rank} cannot listen on {addresses[rank]}: {error}"
        told = comm.allgather((port, problem))
        ways: list[socket.socket] = []
        if not any(its for _, its in told):
            try:
                if rank in pairs:
                    to = pairs[rank]
                    for _ in range(count):
                        way = sockets.enter_context(socket.create_connection((addresses[to], told[to][0]), _CONNECT))
                        if pace:
                            way.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(2**32 - 1, int(pace / 8)))
                        ways.append(way)
                elif server is not None:
                    for _ in range(count):
                        ways.append(sockets.enter_context(server.accept()[0]))  # noqa: PERF401 - closed if one fails
            except OSError as error:
                problem = f"streams cannot be made between rank {rank} and others: {error}; is there a firewall?"
        if problem := next(filter(None, comm.allgather(problem)), ""):
            return _Told(problem=problem)
        end = time.monotonic() + seconds
        if rank in pairs:
            return _sent(ways, end)
        return _Told(_received(ways, end - seconds / 2, end)) if ways else _Told()


def _listening(address: str, count: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=count)
    server.settimeout(2 * _CONNECT)
    return server


def _received(ways: Sequence[socket.socket], begin: float, end: float) -> float:
    """Receive until ``end``; return the bits per second that came after ``begin``, when windows have opened."""
    buffer, nbytes, first, last = bytearray(1 << 18), 0, begin, begin
    with selectors.DefaultSelector() as selector:
        for way in ways:
            way.setblocking(False)
            selector.register(way, selectors.EVENT_READ, way)
        while (now := time.monotonic()) < end:
            for key, _ in selector.select(end - now):
                try:
                    size, now = key.data.recv_into(buffer), time.monotonic()
                except OSError:  # the sender has left
                    selector.unregister(key.fileobj)
                    continue
                if now < begin:
                    first = now
                else:
                    nbytes, last = nbytes + size, now
    return 8 * nbytes / max(last - first, 1e-6)


def _sent(ways: Sequence[socket.socket], end: float) -> _Told:
    """Send until ``end``; return how many segments went out."""
    senders = [threading.Thread(target=_send, args=(way, end), daemon=True) for way in ways]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    counts = [_segments(way) for way in ways]
    control = ways[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    for way in ways:
        way.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what waits need not arrive
    return _Told(None, sum(again for again, _ in counts), sum(sent for _, sent in counts), control)


def _send(way: socket.socket, end: float) -> None:
    data = bytes(1 << 18)
    with suppress(OSError):  # it is full at the end
        while (left := end - time.monotonic()) > 0:
            way.settimeout(left)
            way.send(data)


def _segments(way: socket.socket) -> tuple[int, int]:
    """Return how many segments a connection has sent again, and in all; 0 where the kernel does not say."""
    with suppress(OSError, struct.error):
        info = way.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
        (again,), (sent,) = (struct.unpack_from("=I", info, offset) for offset in (_RETRANSMITTED, _SENT))
        return again, sent
    return 0, 0
