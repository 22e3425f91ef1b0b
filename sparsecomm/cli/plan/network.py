"""Measures the network between ranks for `sparsecomm plan --measure`, after checking that the ranks belong together."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.calls.measurement import measured_links
from sparsecomm.cli.world import World
from sparsecomm.errors import InvalidInputError
from sparsecomm.quantities import rate_text
from sparsecomm.tuning import streams
from sparsecomm.tuning.links import Links
from sparsecomm.tuning.streams import STREAMS, Streams
from sparsecomm.tuning.utilisation import PACKET, SEGMENT

__all__ = ["Measured", "addresses", "check_alike", "check_several", "measure", "placement", "versions", "warnings"]

Address: TypeAlias = tuple[str, int]  # host and port
_VIRTUAL = re.compile(r"docker|br-|virbr|veth|podman|cni|flannel|cali|lxc|lxd")  # interfaces inside a machine
_SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface


# -- the ranks --------------------------------------------------------------------------------------------------------


def versions(comm: World) -> list[tuple[str, dict[str, str]]]:
    """Return each rank's host name, and its versions and settings. Collective."""
    mine = {"sparsecomm": sc.__version__, "Python": platform.python_version()}
    for name in ("numpy", "mpi4py", "torch"):
        with suppress(PackageNotFoundError):
            mine[name] = version(name)
    mine |= {name: value for name, value in sorted(os.environ.items()) if name.startswith("SPARSECOMM_")}
    return comm.allgather((socket.gethostname(), mine))


def check_alike(versions: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Check that all ranks have the same `versions`.

    Raises:
        InvalidInputError: they differ.
    """
    first_host, first = versions[0]
    for rank, (host, own) in enumerate(versions):
        for name in dict.fromkeys((*first, *own)):
            if own.get(name) != first.get(name):
                here, there = (each.get(name, "missing") for each in (own, first))
                raise InvalidInputError(
                    f"{name} is {here} on rank {rank} ({host}) and {there} on rank 0 ({first_host}): start all ranks "
                    "in the same environment"
                )


def check_several(transport: transport.Transport) -> None:
    """Check that there is a link to measure.

    Raises:
        InvalidInputError: there is one rank.
    """
    if transport.size == 1:
        raise InvalidInputError(
            "there is one rank, and no link to measure: start the command with mpirun, srun or torchrun on the "
            "machines that train, or pass --rate and --rtt instead of --measure"
        )


def placement(transport: transport.Transport, hosts: Sequence[str]) -> str:
    """Describe which ranks run on which machines. ``hosts`` are the host names by rank."""
    nodes = list(transport.node_of_rank)
    names = ", ".join(f"{hosts[nodes.index(node)]} ({nodes.count(node)})" for node in range(transport.num_nodes))
    return f"{transport.size} on {transport.num_nodes} machine{'s' * (transport.num_nodes > 1)}: {names}"


def warnings(transport: transport.Transport) -> list[str]:
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
    """The network between ranks, the same on all of them.

    Attributes:
        links: measured with messages of the library.
        streams: measured with TCP connections.
        interfaces, warnings: the network interfaces that ranks use, and problems with them, in words.
    """

    links: Links
    streams: Streams
    interfaces: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The options of `sparsecomm plan` that describe the network, by name; ``None``: unknown."""
        rates = 8 / self.links.slowest.beta, self.streams.one or 0.0, self.streams.several or 0.0
        return {
            "rate": max(rates) * PACKET / SEGMENT,  # including packet headers
            "rtt": self.links.round_trip,
            "loss": self.streams.loss,
            "congestion": "bbr" if self.streams.control.startswith("bbr") else "cubic",
        }

    @property
    def rates_text(self) -> str:
        """All rates, in words."""
        texts = [f"{rate_text(8 / self.links.slowest.beta)} in messages of the library"]
        for name, rate in (("one TCP stream", self.streams.one), (f"{STREAMS} TCP streams", self.streams.several)):
            texts += [] if rate is None else [f"{rate_text(rate)} in {name}"]
        return ", ".join(texts)


def measure(transport: transport.Transport, comm: World, seconds: float) -> Measured:
    """Measure the links between nodes, or between ranks if there is one node. Collective.

    Args:
        seconds: approximate duration of the messages, and of each of six groups of streams.
    """
    nodes = list(transport.node_of_rank)
    members = list(dict.fromkeys(nodes.index(node) for node in nodes)) if transport.num_nodes > 1 else range(len(nodes))
    links = measured_links(transport, seconds)
    own_addresses, interfaces, problems = addresses(comm, members)
    return Measured(links, streams.measure(comm, members, own_addresses, seconds), interfaces, problems)


def addresses(comm: World, members: Sequence[int]) -> tuple[list[str | None], list[str], list[str]]:
    """Find the addresses over which ``members`` communicate, from the TCP connections of their processes.

    Collective, after messages between all members.

    Returns:
        The address of each rank, or ``None`` if it has no connection to other members; all addresses with the names of
        their interfaces; and warnings.
    """
    every = comm.allgather((_connections(), _interfaces()))
    by_rank: list[str | None] = []
    interfaces: list[str] = []
    problems = []
    for rank, (connections, names) in enumerate(every):
        remote = {(there, here) for other in members if other != rank for here, there in every[other][0]}
        local = [here[0] for here, there in connections if (here, there) in remote] if rank in members else []
        address = max(local, key=local.count, default=None)
        by_rank.append(address)
        if address is not None:
            name = next((name for name, its in names.items() if its == address), "an unnamed interface")
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
                    here, there = _address(copy.getsockname()), _address(copy.getpeername())
                    if store not in (str(here[1]), str(there[1])):
                        pairs.append((here, there))
    return pairs


def _address(name: Any) -> Address:
    host, port = name[:2]
    return host.removeprefix("::ffff:"), port  # an IPv4 address in IPv6 notation


def _interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface, by the interface's name."""
    by_name = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                by_name[name] = socket.inet_ntoa(answer[20:24])
    return by_name
