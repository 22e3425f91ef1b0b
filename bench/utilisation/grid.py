"""The cells of the grid: networks, methods, local steps of a round; and what was published of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsecomm.quantities import percent_text, rate_text

RANKS, STEP = 4, 0.03  # seconds of a local step
_DIM, _HIDDEN, _LAYERS, _VOCABULARY = 256, 768, 6, 50_257
# Of the model of 30,846,720 parameters that was measured elsewhere: a tensor's elements, by its name.
SHAPES = {
    "embedding": _VOCABULARY * _DIM,
    **{
        f"{layer}.{name}": size
        for layer in range(_LAYERS)
        for name, size in {
            "norm1": _DIM, "q": _DIM**2, "k": _DIM**2, "v": _DIM**2, "o": _DIM**2,
            "norm2": _DIM, "w1": _HIDDEN * _DIM, "w2": _HIDDEN * _DIM, "w3": _HIDDEN * _DIM,
        }.items()
    },
    "norm": _DIM,
    "output": _VOCABULARY * _DIM,
}  # fmt: skip

# What a rank does at the end of a round, or of each step; arguments are of the classes of `bench.utilisation.worker`.
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "blocking": {"kind": "local"},
    "delayed": {"kind": "local"},
    "per-step 0.01": {"kind": "per-step", "density": 0.01},
    "per-step 0.001": {"kind": "per-step", "density": 0.001},
}

# Adnan082/diloco-measured, August 2026: four L40S, NCCL, TCP shaped by tc, steps of 26 ms, dense DiLoCo. Utilisation,
# median of three runs, from its RESULTS.md; seconds of an exchange, from sync_blocked_s of the first run.
PUBLISHED = {
    (1, 50e6): 0.0007, (8, 50e6): 0.0055, (32, 50e6): 0.0241, (128, 50e6): 0.1155,
    (1, 200e6): 0.0032, (8, 200e6): 0.0248, (32, 200e6): 0.1001, (128, 200e6): 0.3609,
    (1, 1e9): 0.0174, (8, 1e9): 0.1235, (32, 1e9): 0.3601, (128, 1e9): 0.7152,
}  # fmt: skip
EXCHANGE = {
    (1, 50e6): 38.21, (8, 50e6): 37.42, (32, 50e6): 36.96, (128, 50e6): 35.99,
    (1, 200e6): 8.277, (8, 200e6): 8.308, (32, 200e6): 8.241, (128, 200e6): 8.351,
    (1, 1e9): 1.506, (8, 1e9): 1.509, (32, 1e9): 1.616, (128, 1e9): 1.851,
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A link behind each rank."""

    rate: float  # bits per second, each way
    rtt: float = 0.0  # seconds of a round trip between two ranks
    loss: float = 0.0  # part of the packets that is lost

    @property
    def ahead(self) -> float:
        """Seconds until a common start: enough to inform all ranks."""
        return 0.05 if self == HERE else 0.3 + 10 * self.rtt + bool(self.loss)

    def __str__(self) -> str:
        if self == HERE:
            return "this machine"
        return f"{rate_text(self.rate)}, {self.rtt * 1e3:g} ms, {percent_text(self.loss)} lost"


HERE = Network(0.0)  # no links: processes of this machine


@dataclass(frozen=True)
class Cell:
    """A method on a network, with rounds of ``H`` local steps."""

    network: Network
    method: str
    H: int

    @property
    def plan(self) -> dict[str, Any]:
        """The cell in the plan of the worker."""
        content = {"method": self.method, "H": self.H, **METHODS[self.method]}
        if self.method == "delayed":
            content |= {"options": {"fragment_sync_delay": self.H // 2, "fragment_update_alpha": 0.5}}
        return content


def key(row: dict[str, Any]) -> Cell:
    """Return the cell of a result."""
    return Cell(Network(row["rate"], row["rtt"], row["loss"]), row["method"], row["H"])


def networks(rates: Sequence[float], rtts: Sequence[float], losses: Sequence[float]) -> list[Network]:
    """Return every combination, the kindest first."""
    return [Network(rate, rtt, loss) for loss in losses for rtt in rtts for rate in rates]


QUICK = [Network(50e6), Network(1e9), Network(200e6, 0.08, 0.001)]  # a grid that takes minutes


def cells(network: Network, methods: Sequence[str], every: Sequence[int]) -> Iterator[Cell]:
    """Return the cells of a network. A delay needs rounds of two steps, and steps of their own are rounds of one."""
    for method in methods:
        for H in every:
            if (H > 1 or method != "delayed") and (H == 1 or not method.startswith("per-step")):
                yield Cell(network, method, H)


ROOT = Path(__file__).parents[2]


def run(network: Network, P: int, command: Sequence[str], link: Path) -> int:
    """Run Python with ``command`` on P ranks, one behind each link; return the exit status.

    Args:
        network: `HERE` for processes of this machine, without links.
        link: the file to which the measurement of the links is written.
    """
    environment = {"SPARSECOMM_THREADS": "1", "OMP_NUM_THREADS": "1", "SPARSECOMM_TIMEOUT": "600", **os.environ}
    if network == HERE:
        return _here(P, command, environment)
    options = ["--ranks", str(P), "--launcher", "torchrun", "--rate", f"{network.rate / 1e6:g}mbit"]
    options += ["--rtt", f"{1e3 * network.rtt:g}ms"] if network.rtt else []
    options += ["--loss", f"{100 * network.loss:g}%"] if network.loss else []
    options += ["--link-json", str(link)]
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
