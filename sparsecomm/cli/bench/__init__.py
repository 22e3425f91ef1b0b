"""Measure sparse_allreduce over sizes, densities and algorithms; under a launcher, or with --ranks N.

  sparsecomm bench --ranks 4 -b 64Ki -e 64Mi --plot curves.png
  mpirun -n 4 python -m mpi4py -m sparsecomm bench -c
  torchrun --nproc-per-node 4 -m sparsecomm bench            without MPI

A timed call is a step of training: sparse_allreduce with a residual and a dense result in `out`. The residual is
restored before each call, outside its time. All ranks begin together, and the time of a call is the time of its slowest
rank. The transport counts the bytes. Rank 0 prints each row as soon as it is measured. The exit status is 0 if all
calls succeeded and, with -c, no element was wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.calls.arguments import count_of
from sparsecomm.cli.bench.rows import Bench, Row
from sparsecomm.cli.launch import agreed, launcher, start
from sparsecomm.errors import InvalidInputError, SparseCommError, pip_install
from sparsecomm.quantities import number_text, size_text, time_text
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.tools import devices, options, outputs
from sparsecomm.tools.machine import available_bytes, kernels, processor, version_of
from sparsecomm.tools.outputs import Column, json_text, log_axis, panels, save, size_axis, style, table_head, table_line
from sparsecomm.tools.timing import CommonStart
from sparsecomm.tools.world import World, transport_of, world
from sparsecomm.tracing.observers import PARTS
from sparsecomm.wire import EXACT, WIRES

HELP = "time, bytes and correctness of every algorithm over a range of sizes"
SCHEMA = 2  # of the JSON file: increase it when a field changes its meaning or is removed

_ONE_RANK = "sparsecomm: one rank, which sends nothing: start N with --ranks N, or under mpirun, srun or torchrun"
_DEFAULT_ALGORITHMS = "butterfly,tree,split,dense,allgather"
_PROCESS = 64 << 20  # bytes of Python, NumPy and MPI, before any vector

# -- options ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what to measure")
    size = "smallest dense gradient, in bytes: K, M and G are decimal, Ki, Mi and Gi binary (%(default)s)"
    what.add_argument("-b", "--min-bytes", type=options.nbytes, default="64Ki", metavar="SIZE", help=size)
    size = "largest dense gradient (%(default)s)"
    what.add_argument("-e", "--max-bytes", type=options.nbytes, default="64Mi", metavar="SIZE", help=size)
    factor, ratio = options.number(1.01, 2**53, "a number from 1.01 on"), "ratio of successive sizes (%(default)s)"
    what.add_argument("-f", "--factor", type=factor, default="4", help=ratio)
    part, parts = options.listed(options.density), "k/n, one value or several (%(default)s)"
    what.add_argument("--density", dest="densities", type=part, default="0.001,0.01", metavar="LIST", help=parts)
    names = f"some of {', '.join(options.ALGORITHM_NAMES)}; or all (%(default)s)"
    what.add_argument("--algorithms", type=options.algorithms, default=_DEFAULT_ALGORITHMS, metavar="LIST", help=names)
    names = f"some of {', '.join(options.WIRE_NAMES)}; or all (%(default)s)"
    what.add_argument("--wire", dest="wires", type=options.wires, default="auto", metavar="LIST", help=names)
    what.add_argument("--dtype", default="float32", choices=DTYPES, help="dtype of the gradient (%(default)s)")
    devices.add_argument(what)
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "-n", "--iterations", type=options.count, default=20, metavar="N", help="timed calls per row (%(default)s)"
    )
    warmup = "untimed calls before them (%(default)s)"
    how.add_argument("-w", "--warmup", type=options.count_or_0, default=5, metavar="N", help=warmup)
    how.add_argument("-c", "--check", action="store_true", help="check every result: column #wrong")
    how.add_argument("--breakdown", action="store_true", help="add the time of each part: select, exchange, merge, ...")
    ranks = "start N ranks on this machine, with mpirun; without MPI, with torchrun"
    how.add_argument("--ranks", type=options.count, metavar="N", help=ranks)
    options.add_files(parser, "time against size")


def parse(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `add_arguments` with ``counts``, the sizes in elements, and ``dtype`` as a `DType`.

    Raise `InvalidInputError` if options contradict each other, or need a package that is not installed.
    """
    dtype, wires = DTYPES[arguments.dtype], arguments.wires
    if dtype.name == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401 - teaches NumPy the name
        except ImportError as error:
            raise InvalidInputError(f"--dtype bfloat16: needs ml_dtypes: {pip_install('bench')}") from error
    if arguments.plot is not None:
        outputs.pyplot()  # raises before the measurement if matplotlib is missing
    devices.check(arguments.device, dtype.name)
    if dtype.name == "float64":
        exact = tuple(name for name in wires if name == "auto" or WIRES[name].kind is EXACT)
        if wires not in (exact, tuple(WIRES)):
            raise InvalidInputError(
                "--wire: expected auto, plain or packed with --dtype float64; the other formats carry only float32 sums"
            )
        wires = exact
    b, e = arguments.min_bytes, arguments.max_bytes
    if not dtype.itemsize <= b <= e:
        raise InvalidInputError(f"-b {b} -e {e}: expected -b to be at least {dtype.itemsize}, and at most -e")
    steps = int(math.log(e / b) / math.log(arguments.factor) + 1e-9)
    sizes = (min(round(b * arguments.factor**step), e) for step in range(steps + 1))
    counts = tuple(dict.fromkeys(size // dtype.itemsize for size in sizes))
    return argparse.Namespace(**vars(arguments) | {"dtype": dtype, "wires": wires, "counts": counts})


def check_memory(grid: argparse.Namespace, ranks: int, local: int, available: int | None) -> None:
    """Raise `InvalidInputError` if the largest size needs more than the ``available`` bytes of this machine.

    ``local``: the number of ranks on this machine. ``available``: ``None`` if unknown.
    """
    n, itemsize, accumulator = max(grid.counts), grid.dtype.itemsize, grid.dtype.accumulator.itemsize
    # Gradient, out, residual and a copy of it; a dense sum and its segments in flight, or the entries of all ranks.
    entries = 4 * ranks * count_of(max(grid.densities), n)
    needed = _PROCESS + 2 * n * (itemsize + accumulator) + max(3 * n * accumulator, entries * (8 + accumulator))
    total = local * needed
    if grid.check:  # expected result, sums in float64, entries of a dense sum; on rank 0 the gradients of all ranks
        needed += n * (5 * accumulator + 48)
        total = local * needed + 3 * ranks * n * accumulator
    if available is not None and total > available:
        raise InvalidInputError(
            f"a gradient of {size_text(n * itemsize)} on {local} rank(s) of one machine needs about {size_text(total)} "
            f"of memory, {size_text(needed)} per rank; available are {size_text(available)}. Take a smaller -e"
            + (", or leave out -c." if grid.check else ".")
        )


# -- the run ----------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Measure all rows, or start the ranks that do; return the exit status."""
    started_by = launcher()
    if started_by is None:
        grid, ranks = parse(arguments), arguments.ranks or 1  # report errors before MPI is loaded
        check_memory(grid, ranks, ranks, available_bytes())
        options.check_writable(grid.json, grid.plot)
        if arguments.ranks:
            return start(ranks, arguments.line)
        print(_ONE_RANK, file=sys.stderr, flush=True)
    comm = world()
    grid = agreed(comm, lambda: _checked(arguments, comm, started_by))
    try:
        return _measure(grid, comm)
    except BaseException as error:
        if comm.Get_size() == 1:
            raise
        text = f"{type(error).__name__}: {error}" if isinstance(error, SparseCommError) else traceback.format_exc()
        print(f"sparsecomm: rank {comm.Get_rank()}: {text}", file=sys.stderr, flush=True)
        comm.Abort(1)  # the other ranks wait for this one
        raise


def _checked(arguments: argparse.Namespace, comm: World, started_by: str | None) -> argparse.Namespace:
    """Return the parsed options after checking that this rank can run them."""
    if arguments.ranks:
        raise InvalidInputError(
            f"--ranks {arguments.ranks}: this process is already a rank, started by {started_by}; leave --ranks out"
        )
    nodes, rank = transport_of(comm).node_of_rank, comm.Get_rank()
    is_first_of_node = nodes.index(nodes[rank]) == rank
    grid = parse(arguments)
    available = available_bytes() if is_first_of_node else None
    check_memory(grid, comm.Get_size(), nodes.count(nodes[rank]), available)
    if rank == 0:
        options.check_writable(grid.json, grid.plot)
    return grid


def _measure(grid: argparse.Namespace, comm: World) -> int:
    is_first = comm.Get_rank() == 0
    header, columns = _header(grid, comm), _columns(grid)
    if is_first:
        print(table_head(header, columns), flush=True)
    rows: list[Row] = []
    common_start = CommonStart(comm, transport_of(comm))
    for n in grid.counts:
        bench = None  # free the vectors first: two sizes at once may not fit in memory
        bench = Bench(grid, n, comm, common_start)
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
                save(draw(header, rows), grid.plot)
    comm.Barrier()
    comm.Free()
    return 1 if wrong else 0


def _columns(grid: argparse.Namespace) -> list[Column]:
    """Return the columns of the table of `Row`."""

    def decimals(key: str, digits: int) -> Any:
        return lambda row: f"{row[key]:.{digits}f}"

    def part(name: str) -> Any:
        return lambda row: f"{row['breakdown_us'][name]:.1f}"

    def taken(key: str) -> Any:
        return lambda row: _choice_text(row[key], row[f"{key}_taken"])

    algorithm = max(len(_choice_text(name, "butterfly")) for name in grid.algorithms)
    wire = max(len(_choice_text(name, "packed")) for name in grid.wires)
    return [
        Column("size", "B", 12, itemgetter("size_bytes")),
        Column("count", "", 12, itemgetter("count")),
        Column("k", "", 10, itemgetter("k")),
        Column("algorithm", "", max(11, algorithm + 2), taken("algorithm")),
        Column("wire", "", wire + 2, taken("wire")),
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
        "machine": f"{', '.join(hosts)}; {processor()}",
        "platform": platform.platform(),
        "mpi": transport_of(comm).library,
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}, mpi4py {version_of('mpi4py')}",
        "ranks": comm.Get_size(),
        "machines": len(hosts),
        "kernels": kernels() + " per rank",
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPARSECOMM_")},
        "dtype": grid.dtype.name,
        "device": devices.DEVICES[grid.device]().name,
        "iterations": grid.iterations,
        "warmup": grid.warmup,
    }


# -- the plot ---------------------------------------------------------------------------------------------------------

_LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)), (0, (3, 1)))


def draw(header: dict[str, Any], rows: Sequence[Row]) -> Any:
    """Return a figure of time against size: a panel for each density, a line for each algorithm and wire format.

    Colours and markers stand for algorithms, line styles for wire formats. Dense sums have no wire format.
    """
    from matplotlib.lines import Line2D

    keys = "algorithm", "density", "wire"
    names, densities, wires = (list(dict.fromkeys(row[key] for row in rows)) for key in keys)
    sizes = sorted({float(row["size_bytes"]) for row in rows})
    figure, all_axes = panels(len(densities), 4.2, 3.9, sharey=True)
    for axes, density in zip(all_axes, densities, strict=True):
        for name in names:
            for wire in wires[:1] if name.startswith("dense") else wires:
                line = [r for r in rows if (r["algorithm"], r["density"], r["wire"]) == (name, density, wire)]
                line.sort(key=lambda row: row["size_bytes"])
                look = {**style(name), "linestyle": _LINES[wires.index(wire) % len(_LINES)]}
                axes.plot([r["size_bytes"] for r in line], [1e-6 * r["time_median_us"] for r in line], **look)
        size_axis(axes, sizes, size_text)
        axes.set_title(f"density {number_text(density)}", fontsize="medium")
        axes.set_xlabel(f"dense gradient, {header['dtype']}")
    log_axis(all_axes[0].yaxis, time_text)
    all_axes[0].set_ylabel("median time of a call, slowest rank")
    handles = [Line2D([], [], **style(name), label=name) for name in names]
    handles += [
        Line2D([], [], color="black", linestyle=_LINES[i % len(_LINES)], label=f"wire format {wire}")
        for i, wire in enumerate(wires)
        if len(wires) > 1
    ]
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    ranks, nodes = header["ranks"], header["machines"]
    where = f"{ranks} rank{'s' * (ranks > 1)}, {nodes} node{'s' * (nodes > 1)}"
    figure.suptitle(f"sparse_allreduce on {where}; {header['mpi']}", fontsize="medium")
    return figure
