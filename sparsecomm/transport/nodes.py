"""Node discovery: every rank sends the others an identifier of its node, and equal identifiers are one node.

The identifier is made of the host name and the boot id of the kernel, and travels with messages that can time out.
``MPI_Comm_split_type`` would find the same, but it is a blocking collective: a rank that never makes the first call on
a communicator would hang the others, where `sparsecomm.transport.of` must raise `TimeoutError`.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NODE_ID_BYTES", "node_id", "number_nodes"]

NODE_ID_BYTES = 8


def node_id() -> bytes:
    """Return `NODE_ID_BYTES` that tell this node from others: a hash of its host name and of its kernel's boot id."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot_id = ""
    return hashlib.sha256(f"{socket.gethostname()} {boot_id}".encode()).digest()[:NODE_ID_BYTES]


def number_nodes(node_ids: Sequence[bytes]) -> list[int]:
    """Return, for each rank, the number of its node, counted from 0 in order of rank. ``node_ids``: by rank."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(node_ids))}
    return [numbers[node] for node in node_ids]
