"""The cost of the links between the ranks: alpha and beta, in the same run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from sparsecomm.cli.bench.timing import quiet_barrier
from sparsecomm.primitives.costs import Link


def measured_link(comm: MPI.Intracomm, trips: int = 200) -> Link:
    """Measure alpha, half a round trip of 8 bytes, and beta, seconds per further byte of long messages.

    Both are medians over pairs of ranks. Collective.
    """
    P = comm.size
    if P == 1:
        return Link(0.0, 0.0)
    messages = {size: np.zeros(size, np.uint8) for size in (8, 1 << 20, 1 << 22, 1 << 24)}
    found = []
    for a, b in sorted({(0, 1), (0, P - 1), (P // 2 - 1, P // 2)}):
        alpha = half_trip(comm, messages[8], a, b, trips)
        fast = comm.bcast(half_trip(comm, messages[1 << 22], a, b, 1), a) < 0.1
        sizes = (1 << 22, 1 << 24) if fast else (1 << 20, 1 << 22)
        times = [half_trip(comm, messages[size], a, b, 5 if fast else 3) for size in sizes]
        slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
        quiet_barrier(comm)
        found.append(comm.bcast((alpha, slope), a))
    alpha, beta = np.median(found, axis=0)
    return Link(float(alpha), float(beta))


def message_time(comm: MPI.Intracomm, nbytes: int) -> float:
    """Return the seconds in which one message of so many bytes goes from rank to rank, with nothing else under way."""
    return float(comm.bcast(half_trip(comm, np.zeros(nbytes, np.uint8), 0, comm.size - 1, 7) if comm.size > 1 else 0.0))


def half_trip(comm: MPI.Intracomm, message: np.ndarray[Any, Any], a: int, b: int, trips: int) -> float:
    took = []
    quiet_barrier(comm)
    for _ in range(trips + trips // 10 + 1):
        start = time.perf_counter()
        if comm.rank == a:
            comm.Send(message, b)
            comm.Recv(message, b)
        elif comm.rank == b:
            comm.Recv(message, a)
            comm.Send(message, a)
        took.append((time.perf_counter() - start) / 2)
    quiet_barrier(comm)
    return float(np.median(took[-trips:]))


def given_link() -> Link | None:
    """Return the link that a slow network says it has, from the JSON file named by SLOW_NETWORK_LINK."""
    path = os.environ.get("SLOW_NETWORK_LINK")
    if not path:
        return None
    try:
        said = json.loads(Path(path).read_text())
        return Link(float(said["alpha"]), float(said["beta"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"SLOW_NETWORK_LINK={path}: {error!r}; expected a JSON file with alpha and beta") from error


def link_text(links: dict[str, Link]) -> str:
    return "; ".join(
        f"{s}: alpha = {v.alpha * 1e6:.1f} us, beta = {v.beta * 1e9:.3f} ns/byte" for s, v in links.items()
    )


def message_lines(results: dict[str, Any]) -> list[str]:
    """Return what shows whether bursts make short messages cheaper than alpha and beta say."""
    if "message" not in results:
        return []
    link, nbytes, ms = results["links"]["measured"], results["message"]["bytes"], results["message"]["ms"]
    says = (link["alpha"] + nbytes * link["beta"]) * 1e3
    return [
        f"# one message of k entries, {nbytes:,} bytes: {ms:.3f} ms; alpha and beta say {says:.3f}",
        f"# before each timing all send {results['drain']:,} bytes, to use up bursts",
    ]
