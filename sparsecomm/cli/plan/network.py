"""Measures the network between ranks for `sparsecomm plan --measure`, after checking that the ranks belong together.

It measures messages of the library, and TCP streams: separate connections between the addresses that ranks already use.
The members of the measurement are one rank of each node, or all ranks of a single node. Each member sends to the next
one, half of them at a time. The loss is the share of segments that the kernel sent again, on connections that send so
slowly that queues do not drop packets.
"""

from __future__ import annotations

import os
import platform
import re
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import sparsecomm as sc
from sparsecomm.calls.measurement import measured_links
from sparsecomm.errors import InvalidInputError
from sparsecomm.quantities import rate_text
from sparsecomm.tools import machine
from sparsecomm.tools.world import World
from sparsecomm.transport import Transport
from sparsecomm.transport.job import ipv4_address
from sparsecomm.tuning.links import Links
from sparsecomm.tuning.utilisation import PACKET, SEGMENT

Address: TypeAlias = tuple[str, int]  # host and port
_VIRTUAL = re.compile(r"docker|br-|virbr|veth|podman|cni|flannel|cali|lxc|lxd")  # interfaces inside a machine


# -- the ranks --------------------------------------------------------------------------------------------------------


def versions(comm: World) -> list[tuple[str, dict[str, str]]]:
    """Return each rank's host name, and its versions and settings. Collective."""
    own = {"sparsecomm": sc.__version__, "Python": platform.python_version()}
    own |= {name: version for name in ("numpy", "mpi4py", "torch") if (version := machine.version_of(name))}
    own |= {name: value for name, value in sorted(os.environ.items()) if name.startswith("SPARSECOMM_")}
    return comm.allgather((socket.gethostname(), own))


def check_alike(versions: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Raise `InvalidInputError` unless all ranks have the same `versions`."""
    first_host, first = versions[0]
    for rank, (host, own) in enumerate(versions):
        for name in dict.fromkeys((*first, *own)):
            if own.get(name) != first.get(name):
                value, first_value = (values.get(name, "missing") for values in (own, first))
                raise InvalidInputError(
                    f"{name} is {value} on rank {rank} ({host}) and {first_value} on rank 0 ({first_host}): start all "
                    "ranks in the same environment"
                )


def check_several(transport: Transport) -> None:
    """Raise `InvalidInputError` if there is only one rank."""
    if transport.size == 1:
        raise InvalidInputError(
            "there is one rank, and no link to measure: start the command with mpirun, srun or torchrun on the "
            "machines that train, or pass --rate and --rtt instead of --measure"
        )


def placement(transport: Transport, hosts: Sequence[str]) -> str:
    """Describe which ranks run on which machines. ``hosts`` are the host names by rank."""
    nodes = list(transport.node_of_rank)
    names = ", ".join(f"{hosts[nodes.index(node)]} ({nodes.count(node)})" for node in range(transport.num_nodes))
    return f"{transport.size} on {transport.num_nodes} machine{'s' * (transport.num_nodes > 1)}: {names}"


def warnings(transport: Transport) -> list[str]:
    """Return warnings about the placement of the ranks."""
    if transport.num_nodes == 1:
        return ["all ranks are on one machine: these are not measurements of a network"]
    counts = Counter(transport.node_of_rank)
    if len(set(counts.values())) > 1:
        return [f"machines have different numbers of ranks: {', '.join(str(counts[node]) for node in sorted(counts))}"]
    return []


# -- the links between them -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The network between ranks, the same on all of them."""

    links: Links  # measured with messages of the library
    interfaces: Sequence[str] = ()  # network interfaces that ranks use
    warnings: Sequence[str] = ()  # problems with these interfaces
    one_stream: float | None = None  # bits per second of one TCP stream; None: there were none
    streams: float | None = None  # bits per second of `STREAMS` TCP streams together
    loss: float | None = None  # share of segments that were sent again; None also if the kernel does not count them
    control: str = ""  # the congestion control of TCP, such as "cubic"
    problem: str = ""  # why there were no streams

    @property
    def options(self) -> dict[str, Any]:
        """The options of `sparsecomm plan` that describe the network, by name; ``None``: unknown."""
        rates = 8 / self.links.slowest.beta, self.one_stream or 0.0, self.streams or 0.0
        return {
            "rate": max(rates) * PACKET / SEGMENT,  # including packet headers
            "rtt": self.links.round_trip,
            "loss": self.loss,
            "congestion": "bbr" if self.control.startswith("bbr") else "cubic",
        }

    @property
    def rates_text(self) -> str:
        """All rates, in words."""
        texts = [f"{rate_text(8 / self.links.slowest.beta)} in messages of the library"]
        for name, rate in (("one TCP stream", self.one_stream), (f"{STREAMS} TCP streams", self.streams)):
            texts += [] if rate is None else [f"{rate_text(rate)} in {name}"]
        return ", ".join(texts)


def measure(transport: Transport, comm: World, seconds: float) -> Measured:
    """Measure the links between nodes, or between ranks if there is one node. Collective.

    ``seconds``: approximate duration of the messages, and of each of six groups of streams.
    """
    nodes = list(transport.node_of_rank)
    members = list(dict.fromkeys(nodes.index(node) for node in nodes)) if transport.num_nodes > 1 else range(len(nodes))
    links = measured_links(transport, seconds)
    own_addresses, interfaces, problems = addresses(comm, members)
    return Measured(links, interfaces, problems, **_measured_streams(comm, members, own_addresses, seconds))


# -- addresses --------------------------------------------------------------------------------------------------------


def addresses(comm: World, members: Sequence[int]) -> tuple[list[str | None], list[str], list[str]]:
    """Find the addresses over which ``members`` communicate, from the TCP connections of their processes.

    Collective, after messages between all members. Return the address of each rank, or ``None`` if it has no connection
    to other members; all addresses with the names of their interfaces; and warnings.
    """
    own = {name: address for _, name in socket.if_nameindex() if (address := ipv4_address(name)) is not None}
    gathered = comm.allgather((_connections(), own))  # `own`: addresses by name of the interface
    by_rank: list[str | None] = []
    interfaces: list[str] = []
    problems = []
    for rank, (connections, names) in enumerate(gathered):
        ends = {(remote, local) for other in members if other != rank for local, remote in gathered[other][0]}
        hosts = [local[0] for local, remote in connections if (local, remote) in ends] if rank in members else []
        address = max(hosts, key=hosts.count, default=None)
        by_rank.append(address)
        if address is not None:
            name = next((name for name, other in names.items() if other == address), "an unnamed interface")
            interfaces.append(f"{name} ({address})")
            if _VIRTUAL.match(name):
                problems.append(
                    f"rank {rank} communicates over {interfaces[-1]}, an interface inside its machine: name the "
                    "interface to the other machines with GLOO_SOCKET_IFNAME (torchrun) or --mca btl_tcp_if_include "
                    "(mpirun)"
                )
    return by_rank, list(dict.fromkeys(interfaces)), problems


def _connections() -> list[tuple[Address, Address]]:
    """Return the local and remote addresses of this process's TCP connections, except to the store of torchrun."""
    store = os.environ.get("MASTER_PORT", "")
    pairs: list[tuple[Address, Address]] = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is not connected, or already closed
            if not os.readlink(file).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    local, remote = _address(copy.getsockname()), _address(copy.getpeername())
                    if store not in (str(local[1]), str(remote[1])):
                        pairs.append((local, remote))
    return pairs


def _address(name: Any) -> Address:
    host, port = name[:2]
    return host.removeprefix("::ffff:"), port  # an IPv4 address in IPv6 notation


# -- streams of TCP ---------------------------------------------------------------------------------------------------

STREAMS = 8
_PACED = 0.5  # share of the rate at which paced streams send
_CONNECT = 5.0  # seconds until a connection attempt fails
_SO_MAX_PACING_RATE = 47  # of Linux: bytes per second
_TCP_INFO = 192  # bytes of struct tcp_info
_RETRANSMITTED, _SENT = 100, 156  # offsets of tcpi_total_retrans and tcpi_data_segs_out in it, since Linux 4.6


class Report(NamedTuple):
    """The measurement of one rank's streams."""

    rate: float | None = None  # bits per second received; None for a sender
    retransmitted: int = 0  # segments
    sent: int = 0  # segments in all
    control: str = ""  # the congestion control of a sender
    problem: str = ""  # why there were no streams


def _measured_streams(
    comm: World, members: Sequence[int], addresses: Sequence[str | None], seconds: float
) -> dict[str, Any]:
    """Return the fields of `Measured` for streams between ``members``. Collective over all ranks."""
    if any(addresses[member] is None for member in members):
        return {"problem": "no TCP connections between the ranks are seen"}
    groups: list[list[Report]] = []
    rates: list[float] = []  # the lowest of each group
    for count, paced in ((1, False), (STREAMS, False), (STREAMS, True)):
        pace = _PACED * rates[1] / count if paced else 0.0
        groups.append([])
        for pairs in _one_way(members):
            groups[-1] += comm.allgather(_streams(comm, pairs, addresses, count, seconds, pace))
        if problem := next((report.problem for report in groups[-1] if report.problem), ""):
            return {"problem": problem}
        rates.append(min(report.rate for report in groups[-1] if report.rate is not None))
    retransmitted, sent = sum(report.retransmitted for report in groups[2]), sum(report.sent for report in groups[2])
    control = next(report.control for report in groups[0] if report.control)
    loss = retransmitted / sent if sent else None
    return {"one_stream": rates[0], "streams": rates[1], "loss": loss, "control": control}


def _one_way(members: Sequence[int]) -> list[dict[int, int]]:
    """Return turns in which some members send to the next one. In a turn, no member both sends and receives.

    If it did, acknowledgements would wait behind its data.
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
                own = str(addresses[rank])
                family = socket.AF_INET6 if ":" in own else socket.AF_INET
                server = sockets.enter_context(socket.create_server((own, 0), family=family, backlog=count))
                server.settimeout(2 * _CONNECT)
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
                if server is not None:
                    connections += [sockets.enter_context(server.accept()[0]) for _ in range(count)]
            except OSError as error:
                problem = f"rank {rank} cannot connect to others: {error}; is there a firewall?"
        if problem := next(filter(None, comm.allgather(problem)), ""):
            return Report(problem=problem)
        end = time.monotonic() + seconds
        if rank in pairs:
            return _send_until(connections, end)
        return Report(_receive_until(connections, end - seconds / 2, end)) if connections else Report()


def _receive_until(connections: Sequence[socket.socket], begin: float, end: float) -> float:
    """Receive until ``end``; return the bits per second since ``begin``, when slow start has ended."""
    buffer, nbytes, first, last = bytearray(1 << 18), 0, begin, begin

    def receive(connection: socket.socket) -> None:
        nonlocal nbytes, first, last
        size, now = connection.recv_into(buffer), time.monotonic()
        if now < begin:
            first = now
        else:
            nbytes, last = nbytes + size, now

    _repeat_until(end, connections, selectors.EVENT_READ, receive)
    return 8 * nbytes / max(last - first, 1e-6)


def _send_until(connections: Sequence[socket.socket], end: float) -> Report:
    """Send until ``end``; return the number of segments."""
    data = bytes(1 << 18)
    _repeat_until(end, connections, selectors.EVENT_WRITE, lambda connection: connection.send(data))
    counts = [_segments(connection) for connection in connections]
    control = connections[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # discard unsent data
    return Report(None, sum(retransmitted for retransmitted, _ in counts), sum(sent for _, sent in counts), control)


def _repeat_until(
    end: float, connections: Sequence[socket.socket], event: int, action: Callable[[socket.socket], object]
) -> None:
    """Call ``action`` for each connection whenever it is ready for an event, until ``end``."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, event, connection)
        while (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                with suppress(OSError):
                    action(key.data)
                    continue
                selector.unregister(key.fileobj)  # the peer has left


def _segments(connection: socket.socket) -> tuple[int, int]:
    """Return the number of segments that a connection sent again, and in all; 0 if the kernel does not count them."""
    with suppress(OSError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
        (retransmitted,), (sent,) = (struct.unpack_from("=I", info, offset) for offset in (_RETRANSMITTED, _SENT))
        return retransmitted, sent
    return 0, 0
