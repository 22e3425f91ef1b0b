"""Reports of benchmarks: lines that describe a run, tables, and files with both."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from sparsecomm import config
from sparsecomm.backends import _cpu
from sparsecomm.quantities import number_text
from sparsecomm.tensors.arrays import Array
from sparsecomm.tools import machine
from sparsecomm.tools.outputs import json_text

MPI_SETTINGS = tuple(f"OMPI_MCA_{name}" for name in ("coll_tuned_", "btl", "pml", "mpi_yield"))
SETTINGS = (*MPI_SETTINGS, "SPARSECOMM_", "GLOO_", "SLOW_NETWORK")


def about(program: str, arguments: list[str], ranks: int = 1, threads: int | None = None) -> dict[str, Any]:
    """Return the command, the machine and the versions. ``threads``: per rank, if not the setting."""
    launch = f"mpirun -n {ranks} " if ranks > 1 else ""
    threads = threads or config.threads()
    names = ("sparsecomm", "numpy", "mpi4py", "torch")
    return {
        "command": f"{launch}python {program} {shlex.join(arguments)}".rstrip(),
        "machine": f"{machine.model()}, {os.cpu_count()} cores, {_cpu.simd()}; {threads} thread(s) per rank",
        "versions": {name: machine.version_of(name) for name in names} | {"python": platform.python_version()},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
        "date": time.strftime("%Y-%m-%d"),
    }


def quartiles(times: Array, scale: float = 1.0) -> list[float]:
    """Return the lower quartile, the median and the upper quartile, ignoring NaN."""
    return [float(q) for q in np.nanpercentile(times * scale, [25, 50, 75])]


def head(run: dict[str, Any]) -> list[str]:
    """Return the lines above the tables."""
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items() if number)
    lines = [f"# {run['command']}", f"# {run['machine']}", f"# {versions}; {run['date']}"]
    settings = " ".join(f"{name}={value}" for name, value in run["settings"].items())
    return [*lines, f"# {settings}"] if settings else lines


def show(lines: list[str], tables: list[Table], file: TextIO | None = None, width: int = 200) -> None:
    """Print to standard output, or to a file. Without colours, since mpirun gives ranks a terminal."""
    console = Console(width=width, file=file, force_terminal=False)
    console.print("\n".join(lines), *tables, sep="\n", highlight=False, markup=False)


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by ``None``."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    if isinstance(value, np.generic):
        return finite(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def emulated_link() -> dict[str, Any] | None:
    """Return the measurement of the emulated link that `bench.slow_network` passes to this program, or ``None``."""
    path = os.environ.get("SLOW_NETWORK_LINK")
    return json.loads(Path(path).read_text()) if path else None


Row = dict[str, Any]
Column = tuple[str, Callable[[Any], object]]


def table(rows: Iterable[Any], columns: Sequence[Column], **options: Any) -> Table:
    """Return a table; a column is a heading and a function from a row to a cell, or ``None`` for an empty cell.

    ``options`` are passed on to `rich.table.Table`.
    """
    result = Table(**options)
    for heading, _ in columns:
        result.add_column(heading)
    for row in rows:
        result.add_row(*("" if (text := cell(row)) is None else str(text) for _, cell in columns))
    return result


def table_of_cells(lines: Sequence[Sequence[str]], title: str) -> Table:
    """Return a table of texts, whose first line has the headings."""
    columns = [(heading, itemgetter(i)) for i, heading in enumerate(lines[0])]
    return table(lines[1:], columns, title=title, title_justify="left")


def number(key: str, form: str = ".3f", unit: float = 1) -> Callable[[Row], str | None]:
    """Return a function that formats the value ``key`` of a row; an empty ``form`` means three digits."""

    def text(row: Row) -> str | None:
        value = row.get(key)
        if value is None or math.isnan(value):
            return None
        return format(value * unit, form) if form else number_text(value * unit)

    return text


def interval(key: str, form: str = ".3f") -> Callable[[Row], str]:
    """Return a function that formats the quartiles ``key`` of a row."""
    return lambda row: " - ".join(format(quartile, form) for quartile in row[key])


def yes_or_no(row: Row) -> str | None:
    """Return whether a row's target is met, if it has one."""
    return {None: None, True: "yes", False: "no"}[row["met"]]


def parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's documentation."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form, **options)


def publish(stem: Path | None, lines: list[str], tables: list[Table], data: dict[str, Any], width: int = 200) -> None:
    """Show the tables; with a ``stem``, write them to ``stem``.txt and the data to ``stem``.json."""
    show(lines, tables, width=width)
    if stem is not None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_name(stem.name + ".json").write_text(json_text(finite(data)))
        with stem.with_name(stem.name + ".txt").open("w") as file:
            show(lines, tables, file, width)
