"""Starts the ranks of a program of PyTorch: on hosts with links between them, or on this machine as it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.utilisation.grid import HERE, Network

ROOT = Path(__file__).parents[2]


def run(
    network: Network, P: int, command: Sequence[str], link: Path | None = None, more: Mapping[str, str] | None = None
) -> int:
    """Run Python with ``command`` on P ranks, one behind each link; return the exit status.

    Args:
        network: `grid.HERE` for processes of this machine, without links.
        link: where to write what the links are found to be.
        more: of the environment.
    """
    environment = {"SPARSECOMM_THREADS": "1", "OMP_NUM_THREADS": "1", "SPARSECOMM_TIMEOUT": "600", **os.environ}
    environment |= more or {}
    if network == HERE:
        return _here(P, command, environment)
    options = ["--ranks", str(P), "--launcher", "torchrun", "--rate", f"{network.rate / 1e6:g}mbit"]
    options += ["--rtt", f"{1e3 * network.rtt:g}ms"] if network.rtt else []
    options += ["--loss", f"{100 * network.loss:g}%"] if network.loss else []
    options += ["--link-json", str(link)] if link else []
    start = [sys.executable, "-m", "bench.slow_network", "run", *options, "--", sys.executable, *command]
    return subprocess.run(start, env=environment, cwd=ROOT, check=False).returncode


def _here(P: int, command: Sequence[str], environment: dict[str, str]) -> int:
    with socket.socket() as reserved:  # so that the system gives its port to nobody else; rank 0 may listen beside it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        port = str(reserved.getsockname()[1])
        common = {"WORLD_SIZE": str(P), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([sys.executable, *command], env=environment | common | {"RANK": str(rank)})
            for rank in range(P)
        ]
        try:
            statuses = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return max(map(abs, statuses))
