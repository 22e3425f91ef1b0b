"""Checks before ranks measure: that they belong to one job, that versions agree, and which interfaces they use."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.cli.world import World
from sparsecomm.errors import InvalidInputError

__all__ = ["check_alike", "check_several", "paths", "placement", "versions", "warnings"]

End: TypeAlias = tuple[str, int]  # an address and a port
_VIRTUAL = re.compile(r"docker|br-|virbr|veth|podman|cni|flannel|cali|lxc|lxd")  # interfaces inside a machine
_SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface
_ESTABLISHED = "01"


# -- the ranks --------------------------------------------------------------------------------------------------------


def versions(comm: World) -> list[tuple[str, dict[str, str]]]:
    """Return each rank's host, and its versions and settings. Collective."""
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
    for rank, (host, its) in enumerate(versions):
        for name in dict.fromkeys((*first, *its)):
            if its.get(name) != first.get(name):
                here, there = (each.get(name, "missing") for each in (its, first))
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
    """Describe which ranks run on which machines. ``hosts``: by rank."""
    nodes = list(transport.node_of_rank)
    names = ", ".join(f"{hosts[nodes.index(node)]} ({nodes.count(node)})" for node in range(transport.num_nodes))
    return f"{transport.size} on {transport.num_nodes} machine{'s' * (transport.num_nodes > 1)}: {names}"


def warnings(transport: transport.Transport) -> list[str]:
    """Return warnings about the placement of the ranks."""
    counts = Counter(transport.node_of_rank)
    found = []
    if transport.num_nodes == 1:
        found.append("all ranks are on one machine: these are not measurements of a network")
    elif len(set(counts.values())) > 1:
        text = ", ".join(str(counts[node]) for node in sorted(counts))
        found.append(f"machines have different numbers of ranks: {text}")
    return found


# -- the connections between them -------------------------------------------------------------------------------------


def paths(comm: World, members: Sequence[int]) -> tuple[list[str | None], list[str], list[str]]:
    """Return the addresses over which ``members`` talk to each other, from the TCP connections of their processes.

    Collective, after messages between all members.

    Returns:
        For each rank, the address over which it talks to other members, or None; all addresses with the names of their
        interfaces; and warnings.
    """
    everyone = comm.allgather((_connections(), _interfaces()))
    found: list[str | None] = []
    shown: list[str] = []
    wrong = []
    for rank, (ends, interfaces) in enumerate(everyone):
        others = {(there, here) for other in members if other != rank for here, there in everyone[other][0]}
        mine = [here[0] for here, there in ends if (here, there) in others] if rank in members else []
        address = max(mine, key=mine.count, default=None)
        found.append(address)
        if address is not None:
            name = next((name for name, its in interfaces.items() if its == address), "an unnamed interface")
            shown.append(f"{name} ({address})")
            if _VIRTUAL.match(name):
                wrong.append(
                    f"rank {rank} talks over {shown[-1]}, which is an interface inside its machine: name the interface "
                    "to the other machines with GLOO_SOCKET_IFNAME (torchrun) or --mca btl_tcp_if_include (mpirun)"
                )
    return found, list(dict.fromkeys(shown)), wrong


def _connections() -> list[tuple[End, End]]:
    """Return the local and remote ends of this process's connections, except to the store of torchrun."""
    inodes = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                inodes.add(found[1])
    store = os.environ.get("MASTER_PORT", "")
    ends: list[tuple[End, End]] = []
    for table, read in (("tcp", _ipv4), ("tcp6", _ipv6)):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _ESTABLISHED and words[9] in inodes:
                    here, there = (_end(word, read) for word in words[1:3])
                    if store not in (str(here[1]), str(there[1])):
                        ends.append((here, there))
    return ends


def _end(text: str, read: Callable[[str], str]) -> End:
    address, _, port = text.partition(":")
    return read(address), int(port, 16)


def _ipv4(text: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(text, 16)))  # the kernel prints words as the machine has them


def _ipv6(text: str) -> str:
    packed = b"".join(struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, 32, 8))
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


def _interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
