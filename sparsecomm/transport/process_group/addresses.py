"""The address at which other ranks reach this machine, chosen as gloo does."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from ipaddress import IPv6Address
from pathlib import Path

from sparsecomm.errors import TransportError

__all__ = ["own_address"]

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_IPV6 = Path("/proc/net/if_inet6")


def own_address() -> str:
    """Return the address of the interface ``GLOO_SOCKET_IFNAME``; by default, the address of this host's name.

    If the host name does not resolve to an address of this host, return 127.0.0.1, which serves a single machine.

    Raises:
        TransportError: there is no such interface, or it has no address.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip():
        return _of_interface(name)
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((str(address[0]), 0))
            except OSError:
                continue
            return str(address[0])
    return "127.0.0.1"


def _of_interface(name: str) -> str:
    """Return the first address of an interface, preferably IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass
    lines = [line.split() for line in (_IPV6.read_text().splitlines() if _IPV6.exists() else [])]
    for address, _, _, scope, _, interface in lines:
        if interface == name:
            return str(IPv6Address(bytes.fromhex(address))) + (f"%{name}" if scope == "20" else "")
    known = ", ".join(sorted(interface for _, interface in socket.if_nameindex()))
    raise TransportError(
        f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']!r}: there is no network interface {name!r} with an "
        f"address on {socket.gethostname()}; expected one of {known}"
    )
