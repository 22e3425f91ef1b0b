"""Measure sparse_allreduce over sizes, densities and algorithms; under a launcher, or with --ranks N.

  sparsecomm bench --ranks 4 -b 64Ki -e 64Mi --plot curves.png
  mpirun -n 4 python -m mpi4py -m sparsecomm bench -c
  torchrun --nproc-per-node 4 -m sparsecomm bench            without MPI

A timed call is a step of training: sparse_allreduce with a residual and a dense result in `out`. The residual is
put back to what it was before every call, outside the time. All ranks begin together; a call takes as long as its
slowest rank. Bytes are those that the transport has counted. Rank 0 prints a row when it is measured. The exit
status is 0 if all calls succeeded and, with -c, no element was wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Callable
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.calls.arguments import count_of
from sparsecomm.cli import info, options
from sparsecomm.cli.bench import launch, plot, sweep
from sparsecomm.cli.bench.measure import Bench, Row
from sparsecomm.cli.bench.sweep import add_arguments
from sparsecomm.cli.bench.timing import CommonStart
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.outputs import Column, json_text, table_head, table_line
from sparsecomm.cli.world import World, agreed, comm_of, world
from sparsecomm.errors import InvalidInputError, SparseCommError
from sparsecomm.tracing.observers import PARTS

__all__ = ["HELP", "add_arguments", "run"]

_ALONE = "sparsecomm: one rank, which sends nothing: start N with --ranks N, or under mpirun, srun or torchrun"

HELP = "time, bytes and correctness of every algorithm over a range of sizes"
SCHEMA = 2  # of the JSON file: higher when a field changes its meaning or leaves


def run(arguments: argparse.Namespace) -> int:
    if (by := launch.launcher()) is None:
        asked, ranks = sweep.parse(arguments), arguments.ranks or 1  # needs no MPI, and so neither does its refusal
        sweep.check_memory(asked, ranks, ranks, sweep.available_bytes())
        options.check_writable(asked.json, asked.plot)
        if arguments.ranks:
            return launch.start(ranks, arguments.line)
        print(_ALONE, file=sys.stderr, flush=True)
    comm = world()
    asked = agreed(comm, lambda: _fitting(arguments, comm, by))
    try:
        return _measure(asked, comm)
    except BaseException as error:
        if comm.Get_size() == 1:
            raise
        text = f"{type(error).__name__}: {error}" if isinstance(error, SparseCommError) else traceback.format_exc()
        print(f"sparsecomm: rank {comm.Get_rank()}: {text}", file=sys.stderr, flush=True)
        comm.Abort(1)  # the others wait for this rank
        raise


def _fitting(arguments: argparse.Namespace, comm: World, launcher: str | None) -> argparse.Namespace:
    """Return the options, if this rank can do what they ask for."""
    if arguments.ranks:
        raise InvalidInputError(
            f"--ranks {arguments.ranks}: this process is a rank already, of {launcher}; leave --ranks out"
        )
    nodes, rank = transport.transport_of(comm_of(comm)).node_of_rank, comm.Get_rank()
    local, first = nodes.count(nodes[rank]), nodes.index(nodes[rank]) == rank
    asked = sweep.parse(arguments)
    sweep.check_memory(asked, comm.Get_size(), local, sweep.available_bytes() if first else None)
    if rank == 0:
        options.check_writable(asked.json, asked.plot)
    return asked


def _measure(asked: argparse.Namespace, comm: World) -> int:
    shown = comm.Get_rank() == 0
    header, columns = _header(asked, comm), _columns(asked)
    if shown:
        print(table_head(header, columns), flush=True)
    rows: list[Row] = []
    start = CommonStart(comm, transport.transport_of(comm_of(comm)))
    for n in asked.counts:
        bench = None  # two sizes at once need not fit in memory
        bench = Bench(asked, n, comm, start)
        for density, algorithm, wire in product(asked.densities, asked.algorithms, asked.wires):
            rows.append(bench.measure(count_of(density, n), density, algorithm, wire))
            if shown:
                print(table_line(rows[-1], columns), flush=True)
    wrong = sum(row["wrong"] or 0 for row in rows)
    if shown:
        if asked.check:
            print(f"# {f'FAILED: {wrong} elements are wrong' if wrong else 'every element is right'}", flush=True)
        if asked.json is not None:
            with options.writing(asked.json):
                asked.json.write_text(json_text({"schema": SCHEMA, "header": header, "rows": rows}))
        if asked.plot is not None:
            with options.writing(asked.plot):
                plot.write(asked.plot, header, rows)
    comm.Barrier()
    comm.Free()
    return 1 if wrong else 0


# -- the table --------------------------------------------------------------------------------------------------------


def _columns(asked: argparse.Namespace) -> list[Column]:
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


def _header(asked: argparse.Namespace, comm: World) -> dict[str, Any]:
    """Return where and how it was measured. Collective; the same on all ranks."""
    nodes = sorted(set(comm.allgather(platform.node())))
    return {
        "sparsecomm": sc.__version__,
        "command": shlex.join(["sparsecomm", *asked.line]),
        "machine": f"{', '.join(nodes)}; {info._processor()}",
        "platform": platform.platform(),
        "mpi": transport.transport_of(comm_of(comm)).library,
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
