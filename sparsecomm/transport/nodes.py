"""Which ranks are on one machine: every rank sends the others a mark of its own, and equal marks are one machine."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MARK", "mark", "numbered"]

MARK = 8  # bytes of a mark


def mark() -> bytes:
    """What tells this machine from others: the name of the host, and when its kernel started."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        booted = ""
    return hashlib.sha256(f"{socket.gethostname()} {booted}".encode()).digest()[:MARK]


def numbered(marks: Sequence[bytes]) -> list[int]:
    """For each rank, the number of its machine, counted from 0 as they appear."""
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(marks))}
    return [numbers[machine] for machine in marks]
