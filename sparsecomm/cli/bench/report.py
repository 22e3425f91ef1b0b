"""The table of `sparsecomm bench`: what stands above it, and its columns.

Bytes are those that the busiest rank sends or receives.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.cli import info
from sparsecomm.cli.bench.clocks import PARTS
from sparsecomm.cli.bench.measure import Row
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.outputs import Column
from sparsecomm.cli.world import World, comm_of

__all__ = ["columns", "header"]


def columns(asked: argparse.Namespace) -> list[Column]:
    """Return the columns of the table, whose rows are of type `Row`."""
    algorithm = max(len(_taken(name, "butterfly")) for name in asked.algorithms)
    wire = max(len(_taken(name, "packed")) for name in asked.wires)
    parts = (*PARTS, "other") if asked.breakdown else ()
    return [
        Column("size", "B", 12, itemgetter("size_bytes")),
        Column("count", "", 12, itemgetter("count")),
        Column("k", "", 10, itemgetter("k")),
        Column("algorithm", "", max(11, algorithm + 2), lambda row: _taken(row["algorithm"], row["algorithm_taken"])),
        Column("wire", "", wire + 2, lambda row: _taken(row["wire"], row["wire_taken"])),
        *(Column(name, "us", 11, _decimals(f"time_{name}_us", 1)) for name in ("min", "median", "p99", "max")),
        Column("bytes", "B/rank", 12, itemgetter("wire_bytes_per_rank")),
        *(Column(name, "GB/s", 9, _decimals(f"{name}_gb_per_s", 3)) for name in ("algbw", "busbw")),
        Column("#wrong", "", 8, lambda row: "-" if row["wrong"] is None else row["wrong"]),
        *(Column(part, "us", 11, _part(part)) for part in parts),
    ]


def _decimals(key: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.{digits}f}"


def _part(part: str) -> Callable[[Row], str]:
    return lambda row: f"{row['breakdown_us'][part]:.1f}"


def _taken(asked: str, taken: str) -> str:
    return f"auto={taken}" if asked == "auto" else asked


def header(asked: argparse.Namespace, comm: World) -> dict[str, Any]:
    """Return where and how it was measured. Collective; the same on all ranks."""
    nodes = sorted(set(comm.allgather(platform.node())))
    return {
        "sparsecomm": sc.__version__,
        "command": shlex.join(["sparsecomm", *asked.line]),
        "machine": f"{', '.join(nodes)}; {info._processor()}",
        "platform": platform.platform(),
        "mpi": transport.of(comm_of(comm)).library,
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}, mpi4py {info._version('mpi4py')}",
        "ranks": comm.Get_size(),
        "machines": len(nodes),
        "kernels": info._kernels() + " per rank",
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPARSECOMM_")},
        "dtype": asked.dtype.name,
        "device": DEVICES[asked.device]().name,
        "iterations": asked.iterations,
        "warmup": asked.warmup,
    }
