"""The figures as they are shown: the table and the JSON file."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import sparsecomm as sc
from sparsecomm.cli import info
from sparsecomm.cli.bench.clocks import PARTS
from sparsecomm.cli.bench.measure import Row
from sparsecomm.cli.bench.sweep import Sweep
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.outputs import json_text
from sparsecomm.cli.world import World, library

__all__ = ["SCHEMA", "as_json", "header", "table_head", "table_line"]

SCHEMA = 1  # of the JSON file: higher when a field changes its meaning or leaves

# -- the table --------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    name: str
    unit: str
    width: int
    cell: Callable[[Row], str]


def _columns(sweep: Sweep) -> list[_Column]:
    algorithm = max(len(_taken(name, "butterfly")) for name in sweep.algorithms)
    wire = max(len(_taken(name, "packed")) for name in sweep.wires)
    columns = [
        _Column("size", "B", 12, lambda row: str(row.size_bytes)),
        _Column("count", "", 12, lambda row: str(row.count)),
        _Column("k", "", 10, lambda row: str(row.k)),
        _Column("algorithm", "", max(11, algorithm + 2), lambda row: _taken(row.algorithm, row.algorithm_taken)),
        _Column("wire", "", wire + 2, lambda row: _taken(row.wire, row.wire_taken)),
        _Column("min", "us", 11, lambda row: f"{row.time_min_us:.1f}"),
        _Column("median", "us", 11, lambda row: f"{row.time_median_us:.1f}"),
        _Column("p99", "us", 11, lambda row: f"{row.time_p99_us:.1f}"),
        _Column("max", "us", 11, lambda row: f"{row.time_max_us:.1f}"),
        _Column("bytes", "B/rank", 12, lambda row: str(row.wire_bytes_per_rank)),
        _Column("algbw", "GB/s", 9, lambda row: f"{row.algbw_gb_per_s:.3f}"),
        _Column("busbw", "GB/s", 9, lambda row: f"{row.busbw_gb_per_s:.3f}"),
        _Column("#wrong", "", 8, lambda row: "-" if row.wrong is None else str(row.wrong)),
    ]
    parts = (*PARTS, "other") if sweep.breakdown else ()
    return columns + [_Column(part, "us", 11, partial(_part, part)) for part in parts]


def _part(part: str, row: Row) -> str:
    assert row.breakdown_us is not None
    return f"{row.breakdown_us[part]:.1f}"


def _taken(asked: str, taken: str) -> str:
    return f"auto={taken}" if asked == "auto" else asked


def header(command: Sequence[str], sweep: Sweep, comm: World) -> dict[str, Any]:
    """Return where and how it was measured. Collective; the same on all ranks."""
    nodes = sorted(set(comm.allgather(platform.node())))
    cores = f"{info._usable_cores()} of {os.cpu_count()} cores usable"
    return {
        "sparsecomm": sc.__version__,
        "command": " ".join(["sparsecomm", "bench", *command]),
        "machine": f"{', '.join(nodes)}; {info._cpu_model()}, {cores}",
        "platform": platform.platform(),
        "mpi": library(comm),
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}, mpi4py {info._version('mpi4py')}",
        "ranks": comm.Get_size(),
        "machines": len(nodes),
        "kernels": info._kernels() + " per rank",
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPARSECOMM_")},
        "dtype": sweep.dtype.name,
        "device": DEVICES[sweep.device]().name,
        "iterations": sweep.iterations,
        "warmup": sweep.warmup,
        "complete": sweep.complete,
    }


def table_head(header: dict[str, Any], sweep: Sweep) -> str:
    settings = " ".join(f"{k}={v}" for k, v in header["settings"].items())
    lines = [
        f"sparsecomm {header['sparsecomm']}: {header['command']}",
        f"machine   {header['machine']}",
        f"platform  {header['platform']}",
        f"MPI       {header['mpi']}; {header['versions']}",
        f"ranks     {header['ranks']} on {header['machines']} machine(s)",
        f"kernels   {header['kernels']}" + f"; {settings}" * bool(settings),
        f"calls     {header['iterations']} timed after {header['warmup']}, with residual and out"
        + ", complete" * sweep.complete,
        f"gradient  {header['dtype']} on {header['device']}",
        "time      of each call that of the slowest rank; bytes: payload that the busiest rank sends or receives",
        "",
    ]
    columns = _columns(sweep)
    lines.append("".join(f"{column.name:>{column.width}}" for column in columns)[2:])
    lines.append("".join(f"{column.unit:>{column.width}}" for column in columns)[2:].rstrip())
    return "\n".join(f"# {line}".rstrip() for line in lines)


def table_line(row: Row, sweep: Sweep) -> str:
    return "".join(f" {column.cell(row):>{column.width - 1}}" for column in _columns(sweep))


# -- files ------------------------------------------------------------------------------------------------------------


def as_json(header: dict[str, Any], rows: Sequence[Row]) -> str:
    return json_text({"schema": SCHEMA, "header": header, "rows": list(map(asdict, rows))})
