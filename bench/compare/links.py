"""The cost of the links between the ranks: alpha and beta, in the same run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mpi4py import MPI

from sparsecomm import transport
from sparsecomm.calls.measurement import measured_links
from sparsecomm.primitives.costs import Link


def measured_link(comm: MPI.Intracomm, seconds: float = 2.0) -> Link:
    """Return the slowest link between ranks, as messages of the library find it in so many seconds. Collective."""
    return Link(0.0, 0.0) if comm.size == 1 else measured_links(transport.transport_of(comm), seconds).slowest


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
