"""Measures TCP over a link: the rates of one stream and of several, and the packet loss.

Streams are separate TCP connections between the addresses that ranks already use. Each member sends to the next one,
half of the members at a time. The loss is the share of segments that the kernel sent again, on connections that are
paced below the rate of the link, so that queues do not drop packets.
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
from typing import Any, NamedTuple

__all__ = ["STREAMS", "Streams", "measure"]

STREAMS = 8
_PACED = 0.5  # share of the rate, so that the link does not fill
_CONNECT = 5.0  # seconds until a connection attempt fails
_SO_MAX_PACING_RATE = 47  # of Linux: bytes per second
_TCP_INFO = 192  # bytes of struct tcp_info
_RETRANSMITTED, _SENT = 100, 156  # offsets of tcpi_total_retrans and tcpi_data_segs_out in it, since Linux 4.6


@dataclass(frozen=True)
class Streams:
    """Measured streams, the same on all ranks.

    Attributes:
        one, several: bits per second of one connection, and of `STREAMS` together; ``None`` if there were none.
        loss: share of segments that were sent again; ``None`` also if the kernel does not count them.
        control: the congestion control of TCP, such as "cubic".
        problem: why there were no streams.
    """

    one: float | None = None
    several: float | None = None
    loss: float | None = None
    control: str = ""
    problem: str = ""


class Report(NamedTuple):
    """The streams of one rank.

    Attributes:
        rate: bits per second received; ``None`` for a sender.
        retransmitted, sent: segments sent again, and sent in all.
        control: congestion control of the sending connections.
        problem: why there were no streams.
    """

    rate: float | None = None
    retransmitted: int = 0
    sent: int = 0
    control: str = ""
    problem: str = ""


def measure(comm: Any, members: Sequence[int], addresses: Sequence[str | None], seconds: float) -> Streams:
    """Measure streams between ``members``. Collective over all ranks.

    Args:
        comm: a communicator with ``Get_rank`` and ``allgather``, as of mpi4py.
        members: ranks, one behind each link.
        addresses: by rank, the address at which it can be reached; ``None`` if unknown.
        seconds: approximate duration of each of six groups of streams.
    """
    if any(addresses[member] is None for member in members):
        return Streams(problem="no TCP connections between the ranks are seen")
    groups: list[list[Report]] = []
    for count, paced in ((1, False), (STREAMS, False), (STREAMS, True)):
        pace = _PACED * _min_rate(groups[1]) / count if paced else 0.0
        groups.append([])
        for pairs in _one_way(members):
            groups[-1] += comm.allgather(_streams(comm, pairs, addresses, count, seconds, pace))
        if problem := next((report.problem for report in groups[-1] if report.problem), ""):
            return Streams(problem=problem)
    retransmitted, sent = (sum(getattr(each, name) for each in groups[2]) for name in ("retransmitted", "sent"))
    control = next(report.control for report in groups[0] if report.control)
    loss = retransmitted / sent if sent else None
    return Streams(_min_rate(groups[0]), _min_rate(groups[1]), loss, control)


def _min_rate(reports: Sequence[Report]) -> float:
    return min(report.rate for report in reports if report.rate is not None)


def _one_way(members: Sequence[int]) -> list[dict[int, int]]:
    """Return turns in which some members send to the next one, and no member both sends and receives.

    On a link that is full in one direction, the acknowledgements of the other direction would wait behind the data.
    """
    count = len(members)
    turns: list[dict[int, int]] = [{} for _ in range(2 + count % 2)]
    for i, member in enumerate(members):
        turns[2 if count % 2 and i == count - 1 else i % 2][member] = members[(i + 1) % count]
    return turns


def _streams(
    comm: Any, pairs: Mapping[int, int], addresses: Sequence[str | None], count: int, seconds: float, pace: float = 0.0
) -> Report:
    """Send over ``count`` connections from each key of ``pairs`` to its value, all at once. Collective over all ranks.

    ``pace`` limits the bits per second of each connection.
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
        ports = comm.allgather((port, problem))
        connections: list[socket.socket] = []
        if not any(text for _, text in ports):
            try:
                for _ in range(count if rank in pairs else 0):
                    to = addresses[pairs[rank]], ports[pairs[rank]][0]
                    connections.append(sockets.enter_context(socket.create_connection(to, _CONNECT)))
                    if pace:
                        rate = min(2**32 - 1, int(pace / 8))
                        connections[-1].setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
                for _ in range(0 if server is None else count):
                    assert server is not None
                    connections.append(sockets.enter_context(server.accept()[0]))
            except OSError as error:
                problem = f"rank {rank} cannot connect to others: {error}; is there a firewall?"
        if problem := next(filter(None, comm.allgather(problem)), ""):
            return Report(problem=problem)
        end = time.monotonic() + seconds
        if rank in pairs:
            return _send_until(connections, end)
        return Report(_receive_until(connections, end - seconds / 2, end)) if connections else Report()


def _listening(address: str, count: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=count)
    server.settimeout(2 * _CONNECT)
    return server


def _receive_until(connections: Sequence[socket.socket], begin: float, end: float) -> float:
    """Receive until ``end``; return the bits per second from ``begin`` on, when windows have opened."""
    buffer, nbytes, first, last = bytearray(1 << 18), 0, begin, begin
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, connection)
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


def _send_until(connections: Sequence[socket.socket], end: float) -> Report:
    """Send until ``end``; return the number of segments."""
    senders = [threading.Thread(target=_send, args=(connection, end), daemon=True) for connection in connections]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    counts = [_segments(connection) for connection in connections]
    control = connections[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # discard unsent data
    return Report(None, sum(again for again, _ in counts), sum(sent for _, sent in counts), control)


def _send(connection: socket.socket, end: float) -> None:
    data = bytes(1 << 18)
    with suppress(OSError):  # the buffer is full at the end
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            connection.send(data)


def _segments(connection: socket.socket) -> tuple[int, int]:
    """Return the number of segments that a connection sent again, and in all; 0 if the kernel does not count them."""
    with suppress(OSError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
        (again,), (sent,) = (struct.unpack_from("=I", info, offset) for offset in (_RETRANSMITTED, _SENT))
        return again, sent
    return 0, 0
