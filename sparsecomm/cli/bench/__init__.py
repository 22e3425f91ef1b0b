"""Measure sparse_allreduce over sizes, densities and algorithms; under a launcher, or with --ranks N.

  sparsecomm bench --ranks 4 -b 64Ki -e 64Mi --plot curves.png
  mpirun -n 4 python -m mpi4py -m sparsecomm bench -c
  torchrun --nproc-per-node 4 -m sparsecomm bench            without MPI

A timed call is a step of training: sparse_allreduce with a residual and a dense result in `out`. Before each call, and
outside its time, the residual is restored. All ranks begin together, and the time of a call is the time of its slowest
rank. The transport counts the bytes. Rank 0 prints each row once it is measured. The exit status is 0 if all calls
succeeded and, with -c, no element was wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import traceback
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.calls.arguments import count_of
from sparsecomm.cli import info, options
from sparsecomm.cli.bench import launch, plot, sweep
from sparsecomm.cli.bench.rows import Bench, Row
from sparsecomm.cli.bench.sweep import add_arguments
from sparsecomm.cli.bench.timing import CommonStart
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.outputs import Column, json_text, table_head, table_line
from sparsecomm.cli.world import World, agreed, comm_of, world
from sparsecomm.errors import InvalidInputError, SparseCommError
from sparsecomm.tracing.observers import PARTS

__all__ = ["HELP", "add_arguments", "run"]

HELP = "time, bytes and correctness of every algorithm over a range of sizes"
SCHEMA = 2  # of the JSON file: it rises when a field changes its meaning or is removed

_ONE_RANK = "sparsecomm: one rank, which sends nothing: start N with --ranks N, or under mpirun, srun or torchrun"


def run(arguments: argparse.Namespace) -> int:
    """Measure all rows, or start the ranks that do; return the exit status."""
    if (launcher := launch.launcher()) is None:
        grid, ranks = sweep.parse(arguments), arguments.ranks or 1  # without MPI, so that errors do not need MPI either
        sweep.check_memory(grid, ranks, ranks, sweep.available_bytes())
        options.check_writable(grid.json, grid.plot)
        if arguments.ranks:
            return launch.start(ranks, arguments.line)
        print(_ONE_RANK, file=sys.stderr, flush=True)
    comm = world()
    grid = agreed(comm, lambda: _checked(arguments, comm, launcher))
    try:
        return _measure(grid, comm)
    except BaseException as error:
        if comm.Get_size() == 1:
            raise
        text = f"{type(error).__name__}: {error}" if isinstance(error, SparseCommError) else traceback.format_exc()
        print(f"sparsecomm: rank {comm.Get_rank()}: {text}", file=sys.stderr, flush=True)
        comm.Abort(1)  # the other ranks wait for this one
        raise


def _checked(arguments: argparse.Namespace, comm: World, launcher: str | None) -> argparse.Namespace:
    """Return the parsed options after checking that this rank can run them."""
    if arguments.ranks:
        raise InvalidInputError(
            f"--ranks {arguments.ranks}: this process is already a rank, started by {launcher}; leave --ranks out"
        )
    nodes, rank = transport.transport_of(comm_of(comm)).node_of_rank, comm.Get_rank()
    is_first_of_node = nodes.index(nodes[rank]) == rank
    grid = sweep.parse(arguments)
    available = sweep.available_bytes() if is_first_of_node else None
    sweep.check_memory(grid, comm.Get_size(), nodes.count(nodes[rank]), available)
    if rank == 0:
        options.check_writable(grid.json, grid.plot)
    return grid


def _measure(grid: argparse.Namespace, comm: World) -> int:
    is_first = comm.Get_rank() == 0
    header, columns = _header(grid, comm), _columns(grid)
    if is_first:
        print(table_head(header, columns), flush=True)
    rows: list[Row] = []
    start = CommonStart(comm, transport.transport_of(comm_of(comm)))
    for n in grid.counts:
        bench = None  # free the vectors first: two sizes at once may not fit in memory
        bench = Bench(grid, n, comm, start)
        for density, algorithm, wire in product(grid.densities, grid.algorithms, grid.wires):
            rows.append(bench.measure(count_of(density, n), density, algorithm, wire))
            if is_first:
                print(table_line(rows[-1], columns), flush=True)
    wrong = sum(row["wrong"] or 0 for row in rows)
    if is_first:
        if grid.check:
            print(f"# {f'FAILED: {wrong} elements are wrong' if wrong else 'every element is right'}", flush=True)
        if grid.json is not None:
            with options.writing(grid.json):
                grid.json.write_text(json_text({"schema": SCHEMA, "header": header, "rows": rows}))
        if grid.plot is not None:
            with options.writing(grid.plot):
                plot.write(grid.plot, header, rows)
    comm.Barrier()
    comm.Free()
    return 1 if wrong else 0


def _columns(grid: argparse.Namespace) -> list[Column]:
    """Return the columns of the table of `Row`."""

    def decimals(key: str, digits: int) -> Any:
        return lambda row: f"{row[key]:.{digits}f}"

    def part(name: str) -> Any:
        return lambda row: f"{row['breakdown_us'][name]:.1f}"

    algorithm = max(len(_choice_text(name, "butterfly")) for name in grid.algorithms)
    wire = max(len(_choice_text(name, "packed")) for name in grid.wires)
    return [
        Column("size", "B", 12, itemgetter("size_bytes")),
        Column("count", "", 12, itemgetter("count")),
        Column("k", "", 10, itemgetter("k")),
        Column(
            "algorithm", "", max(11, algorithm + 2), lambda row: _choice_text(row["algorithm"], row["algorithm_taken"])
        ),
        Column("wire", "", wire + 2, lambda row: _choice_text(row["wire"], row["wire_taken"])),
        *(Column(name, "us", 11, decimals(f"time_{name}_us", 1)) for name in ("min", "median", "p99", "max")),
        Column("bytes", "B/rank", 12, itemgetter("wire_bytes_per_rank")),
        *(Column(name, "GB/s", 9, decimals(f"{name}_gb_per_s", 3)) for name in ("algbw", "busbw")),
        Column("#wrong", "", 8, lambda row: "-" if row["wrong"] is None else row["wrong"]),
        *(Column(name, "us", 11, part(name)) for name in ((*PARTS, "other") if grid.breakdown else ())),
    ]


def _choice_text(name: str, choice: str) -> str:
    return f"auto={choice}" if name == "auto" else name


def _header(grid: argparse.Namespace, comm: World) -> dict[str, Any]:
    """Describe the run. Collective; the same on all ranks."""
    hosts = sorted(set(comm.allgather(platform.node())))
    return {
        "sparsecomm": sc.__version__,
        "command": shlex.join(["sparsecomm", *grid.line]),
        "machine": f"{', '.join(hosts)}; {info.processor()}",
        "platform": platform.platform(),
        "mpi": transport.transport_of(comm_of(comm)).library,
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}, mpi4py {info.version_of('mpi4py')}",
        "ranks": comm.Get_size(),
        "machines": len(hosts),
        "kernels": info.kernels() + " per rank",
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPARSECOMM_")},
        "dtype": grid.dtype.name,
        "device": DEVICES[grid.device]().name,
        "iterations": grid.iterations,
        "warmup": grid.warmup,
    }
