"""The figures as they are shown: the table, the JSON file, the plot, and how far it is."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import sparsecomm as sc
from sparsecomm.cli import info
from sparsecomm.cli.bench.clocks import PARTS
from sparsecomm.cli.bench.measure import Row
from sparsecomm.cli.bench.sweep import Point, Sweep, size_text
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.outputs import json_text

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SCHEMA", "as_json", "header", "plot", "progress", "table_head", "table_line"]

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
        _Column("#wrong", "", 8, lambda row: "-" if row.wrong is None else str(row.wrong)),
    ]
    parts = (*PARTS, "other") if sweep.breakdown else ()
    return columns + [_Column(part, "us", 11, partial(_part, part)) for part in parts]


def _part(part: str, row: Row) -> str:
    assert row.breakdown_us is not None
    return f"{row.breakdown_us[part]:.1f}"


def _taken(asked: str, taken: str) -> str:
    return f"auto={taken}" if asked == "auto" else asked


def header(command: Sequence[str], sweep: Sweep, comm: MPI.Intracomm) -> dict[str, Any]:
    """Return where and how it was measured. Collective; the same on all ranks."""
    from mpi4py import MPI

    name, number = MPI.get_vendor()
    nodes = sorted(set(comm.allgather(platform.node())))
    cores = f"{info._usable_cores()} of {os.cpu_count()} cores usable"
    return {
        "sparsecomm": sc.__version__,
        "command": " ".join(["sparsecomm", "bench", *command]),
        "machine": f"{', '.join(nodes)}; {info._cpu_model()}, {cores}",
        "platform": platform.platform(),
        "mpi": f"{name} {'.'.join(map(str, number))}",
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


_RGB = "4d4d4d 0072b2 e69f00 d55e00 009e73 cc79a7 56b4e9 332288 882255 999933 44aa99 aa4499 117733"
_COLOURS = [f"#{colour}" for colour in _RGB.split()]
_LINES: tuple[Any, ...] = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P")


def plot(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Median time against size: a colour per algorithm, a kind of line per density, a marker per format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(row.algorithm for row in rows))
    densities = list(dict.fromkeys(row.density for row in rows))
    wires = list(dict.fromkeys(row.wire for row in rows))
    sizes = sorted({row.size_bytes for row in rows})

    def key(row: Row) -> tuple[int, int, int]:
        return names.index(row.algorithm), densities.index(row.density), wires.index(row.wire)

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for (a, d, w), line in groupby(sorted(rows, key=lambda row: (*key(row), row.size_bytes)), key):
        points = list(line)
        style: dict[str, Any] = {
            "color": _COLOURS[a % len(_COLOURS)],
            "linestyle": _LINES[d % len(_LINES)],
            "marker": _MARKERS[w % len(_MARKERS)],
            "markersize": 4.5,
            "linewidth": 1.6,
        }
        axes.plot([r.size_bytes for r in points], [r.time_median_us for r in points], **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = sizes[:: -(-len(sizes) // 10)]
    axes.set_xticks(shown, [size_text(size) for size in shown], rotation=30 if len(shown) > 6 else 0)
    axes.minorticks_on()
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda us, _: _time_text(us)))
    axes.set_xlabel(f"dense gradient, {header['dtype']}")
    axes.set_ylabel("median time of a call, slowest rank")
    axes.set_title(f"sparse_allreduce on {header['ranks']} rank(s), {header['machines']} machine(s), {header['mpi']}")
    axes.grid(True, which="major", alpha=0.35)
    axes.grid(True, which="minor", axis="y", alpha=0.12)
    kinds = [
        *(Line2D([], [], color=_COLOURS[i % len(_COLOURS)], linewidth=3, label=n) for i, n in enumerate(names)),
        *(
            Line2D([], [], color="black", linestyle=_LINES[i % len(_LINES)], label=f"density {d:g}")
            for i, d in enumerate(densities)
        ),
        *(
            Line2D([], [], color="black", linestyle="", marker=_MARKERS[i % len(_MARKERS)], markersize=4.5, label=w)
            for i, w in enumerate(wires)
        ),
    ]
    axes.legend(handles=kinds, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _time_text(us: float) -> str:
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if us >= scale:
            return f"{us / scale:g} {unit}"
    return f"{us:g} us"


# -- how far it is ----------------------------------------------------------------------------------------------------


@contextmanager
def progress(shown: bool, total: int) -> Iterator[Callable[[Point | None], None]]:
    """Give a function that is told which row comes next; None stands for a pause, in which a row is printed.

    It draws only on a terminal, and only when it is told something: a display that is renewed on time would disturb
    the measurement.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda point: None
        return
    done, current = -1, None

    def count(point: Point) -> int:
        """Return how many rows are done before this one, which may be told again."""
        nonlocal done, current
        done += point is not current
        current = point
        return done

    def text(point: Point) -> str:
        return f"n={point.n} density={point.density:g} {point.algorithm} {point.wire}"

    if importlib.util.find_spec("rich") is None:

        def plain(point: Point | None) -> None:
            line = "" if point is None else f"{count(point)}/{total} {text(point)}"
            print(f"\r{line:<78}\r", end="", file=sys.stderr, flush=True)

        yield plain
        plain(None)
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False)
    task = bar.add_task("", total=total)

    def drawn(point: Point | None) -> None:
        if point is None:
            bar.stop()
            return
        bar.start()
        bar.update(task, completed=count(point), description=text(point), refresh=True)

    try:
        yield drawn
    finally:
        bar.stop()
