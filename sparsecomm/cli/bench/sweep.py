"""The options of `sparsecomm bench`, understood and checked before anything is allocated."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparsecomm.algorithms import ALGORITHMS, find, inner_algorithms
from sparsecomm.calls import arguments
from sparsecomm.cli import devices
from sparsecomm.cli.bench.contenders import CONTENDERS
from sparsecomm.cli.outputs import PLOTS, json_and_plot
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install
from sparsecomm.quantities import nbytes, size_text
from sparsecomm.tensors.dtypes import DTYPES, DType
from sparsecomm.wire import EXACT, WIRES

__all__ = ["Point", "Sweep", "add_arguments", "available_bytes", "check_memory", "parse", "same_command"]

USUAL = tuple(name for name, contender in CONTENDERS.items() if contender.usual)

_MAX_SIZES = 1000
_PROCESS = 64 << 20  # Python, NumPy and MPI, before any vector
_NAMES = ("auto", *ALGORITHMS, "hierarchical:X", "hierarchical_dense:X")


@dataclass(frozen=True)
class Point:
    """A row of the table, before it is measured."""

    n: int
    k: int
    density: float
    algorithm: str
    wire: str = "auto"


@dataclass(frozen=True)
class Sweep:
    """The options. ``counts`` are the sizes in elements."""

    counts: tuple[int, ...]
    densities: tuple[float, ...]
    algorithms: tuple[str, ...]
    wires: tuple[str, ...]
    complete: bool
    dtype: DType
    device: str
    iterations: int
    warmup: int
    check: bool
    breakdown: bool
    json: Path | None
    plot: Path | None

    def points(self) -> Iterator[Point]:
        for n, density in product(self.counts, self.densities):
            for algorithm, wire in product(self.algorithms, self.wires):
                yield Point(n, arguments.count_of(density, n), density, algorithm, wire)

    def __len__(self) -> int:
        return len(self.counts) * len(self.densities) * len(self.algorithms) * len(self.wires)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        if self.dtype.name == "bfloat16":
            import ml_dtypes  # noqa: F401 - teaches NumPy the name; `parse` has seen that it is there
        return np.dtype(self.dtype.name)


# -- options ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("what to measure")
    sizes.add_argument(
        "-b",
        "--min-bytes",
        default="64Ki",
        metavar="SIZE",
        help="the smallest dense gradient, in bytes: K, M and G are decimal, Ki, Mi and Gi binary (%(default)s)",
    )
    sizes.add_argument("-e", "--max-bytes", default="64Mi", metavar="SIZE", help="the largest (%(default)s)")
    sizes.add_argument("-f", "--factor", default="4", help="from one size to the next (%(default)s)")
    sizes.add_argument("--density", default="0.001,0.01", metavar="LIST", help="k/n, one or several (%(default)s)")
    sizes.add_argument("--algorithms", metavar="LIST", help=f"some of {', '.join(_NAMES)}; or all ({','.join(USUAL)})")
    sizes.add_argument(
        "--wire", default="auto", metavar="LIST", help=f"some of auto, {', '.join(WIRES)}; or all (%(default)s)"
    )
    sizes.add_argument("--complete", action="store_true", help="with all that ranks hold where the k entries are")
    sizes.add_argument("--dtype", default="float32", help=f"one of {', '.join(DTYPES)} (%(default)s)")
    sizes.add_argument("--device", default="cpu", help=f"one of {', '.join(devices.DEVICES)} (%(default)s)")
    options = parser.add_argument_group("how")
    options.add_argument(
        "-n", "--iterations", type=int, default=20, metavar="N", help="timed calls per row (%(default)s)"
    )
    options.add_argument("-w", "--warmup", type=int, default=5, metavar="N", help="calls before them (%(default)s)")
    options.add_argument("-c", "--check", action="store_true", help="check every result: #wrong")
    options.add_argument("--breakdown", action="store_true", help="time of every part: select, exchange, merge, ...")
    options.add_argument(
        "--ranks", type=int, metavar="N", help="start N ranks on this machine, with mpirun; without MPI, with torchrun"
    )
    output = parser.add_argument_group("output, besides the table")
    output.add_argument("--json", metavar="FILE", help="write the figures to this file as well")
    output.add_argument("--plot", metavar="FILE", help=f"draw time against size: {', '.join(PLOTS)}")


def same_command(arguments: argparse.Namespace) -> list[str]:
    """Return the options as a command line, in one form, without ``--ranks``."""
    said = {name: value for name, value in vars(arguments).items() if name not in ("ranks", "run")}
    given = {name.replace("_", "-"): v for name, v in said.items() if v is not None and v is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


def parse(arguments: argparse.Namespace) -> Sweep:
    """Return the options of `add_arguments`.

    Raises:
        InvalidInputError: one of them cannot be used. It is decided by the options and what is installed alone.
    """
    dtype = DTYPES.get(arguments.dtype)
    if dtype is None:
        raise InvalidInputError(f"--dtype {arguments.dtype}: expected one of {', '.join(DTYPES)}")
    if dtype.name == "bfloat16" and importlib.util.find_spec("ml_dtypes") is None:
        raise InvalidInputError(f"--dtype bfloat16: needs ml_dtypes: {pip_install('bench')}")
    devices.check(arguments.device, dtype.name)
    if arguments.iterations < 1:
        raise InvalidInputError(f"-n {arguments.iterations}: expected at least 1 timed call")
    if arguments.warmup < 0:
        raise InvalidInputError(f"-w {arguments.warmup}: expected 0 calls or more before the timed ones")
    json, plot = json_and_plot(arguments)
    return Sweep(
        counts=_counts(arguments.min_bytes, arguments.max_bytes, arguments.factor, dtype.itemsize),
        densities=_densities(arguments.density),
        algorithms=_algorithms(arguments.algorithms, arguments.complete),
        wires=_wires(arguments.wire, dtype),
        complete=arguments.complete,
        dtype=dtype,
        device=arguments.device,
        iterations=arguments.iterations,
        warmup=arguments.warmup,
        check=arguments.check,
        breakdown=arguments.breakdown,
        json=json,
        plot=plot,
    )


def _counts(smallest: str, largest: str, factor: str, itemsize: int) -> tuple[int, ...]:
    b, e = nbytes("-b", smallest), nbytes("-e", largest)
    f = _number(factor)
    if not 1 < f < math.inf:
        raise InvalidInputError(f"-f {factor}: expected a number above 1")
    if b < itemsize:
        raise InvalidInputError(f"-b {smallest}: expected at least one element, {itemsize} bytes")
    if b > e:
        raise InvalidInputError(f"-b {smallest} -e {largest}: no size is in this range; expected -b to be at most -e")
    if math.log(e / b) / math.log(f) > _MAX_SIZES:
        raise InvalidInputError(
            f"-f {factor}: more than {_MAX_SIZES} sizes from {smallest} to {largest}; take a larger one"
        )
    counts, size = [], float(b)
    while size <= e * (1 + 1e-9):
        counts.append(min(round(size), e) // itemsize)
        size *= f
    return tuple(dict.fromkeys(counts))


def _densities(text: str) -> tuple[float, ...]:
    densities = [_number(part) for part in text.split(",")]
    if not all(0 < d <= 1 for d in densities):
        raise InvalidInputError(f"--density {text}: expected numbers above 0 and up to 1, with commas between them")
    return tuple(dict.fromkeys(densities))


def _algorithms(text: str | None, complete: bool) -> tuple[str, ...]:
    """Return the names that were asked for; the usual ones for ``None``."""
    names = _names(text) if text is not None else USUAL
    if text is None or names == ("all",):
        among = tuple(ALGORITHMS) if text is not None else USUAL
        return tuple(name for name in among if ALGORITHMS[name].reselects or not complete)
    for name in names:
        try:
            found = find(name)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"--algorithms {text}: {name!r} is unknown; expected all, or some of {', '.join(_NAMES)}, where X is "
                f"one of {', '.join(inner_algorithms())}"
            ) from error
        if complete and found is not None and not found.reselects:
            keeping = ", ".join(a.name for a in ALGORITHMS.values() if a.reselects)
            raise InvalidInputError(
                f"--complete: the result of {name} is no global top-k; expected --algorithms all, auto, or some of "
                f"{keeping}"
            )
    return names


def _wires(text: str, dtype: DType) -> tuple[str, ...]:
    names = _names(text)
    fitting = tuple(name for name, wire in WIRES.items() if wire.kind is EXACT or dtype.name != "float64")
    if names == ("all",):
        return fitting
    for name in names:
        if name != "auto" and name not in WIRES:
            known = ", ".join(["auto", *WIRES])
            raise InvalidInputError(f"--wire {text}: {name!r} is unknown; expected all, or some of {known}")
        if name != "auto" and name not in fitting:
            raise InvalidInputError(
                f"--wire {text}: {name} rounds float32 values; expected auto, {' or '.join(fitting)} with --dtype "
                f"{dtype.name}"
            )
    return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


# -- what the machine must have ---------------------------------------------------------------------------------------


def check_memory(sweep: Sweep, ranks: int, local: int, available: int | None) -> None:
    """Refuse a size for which this machine has too little memory.

    Args:
        ranks: in all.
        local: how many of them run on this machine.
        available: bytes; None if it is not known.
    """
    n = max(sweep.counts)
    per_rank, once = _needed(sweep, n, ranks)
    there, (needed, _) = (
        devices.DEVICES[sweep.device]().available_bytes(),
        _needed(replace(sweep, check=False), n, ranks),
    )
    if there is not None and needed > there:
        raise InvalidInputError(
            f"a gradient of {size_text(n * sweep.dtype.itemsize)} needs about {size_text(needed)} of its device per "
            f"rank; available are {size_text(there)}. Take a smaller -e."
        )
    total = per_rank * local + once
    if available is not None and total > available:
        raise InvalidInputError(
            f"a gradient of {size_text(n * sweep.dtype.itemsize)} on {local} rank(s) of one machine needs about "
            f"{size_text(per_rank)} per rank, {size_text(total)} in all; available are {size_text(available)}. "
            "Take a smaller -e" + (", or leave out -c." if sweep.check else ".")
        )


def _needed(sweep: Sweep, n: int, ranks: int) -> tuple[int, int]:
    """Estimate the bytes that every rank holds at most, and those that rank 0 holds for the oracle."""
    accumulator, element = sweep.dtype.accumulator.itemsize, sweep.dtype.itemsize
    entry = accumulator + (4 if n < 2**31 else 8)
    k = arguments.count_of(max(sweep.densities), n)
    listed = (
        n * (accumulator + 2 * entry) if sweep.check else 0
    )  # the entries of a dense sum, which only a check asks for
    dense = n * accumulator + 3 * (n // ranks) * accumulator + listed  # the sum, and segments under way
    gathered = 4 * k * ranks * entry
    kept = 12 * k * entry

    def work(name: str) -> int:
        outer, _, inner = name.rpartition(":")
        found = kept
        if inner in ("auto", "dense"):
            found = max(found, dense)
        if inner == "dsar_split_allgather":
            found = max(found, gathered, dense + n * accumulator)
        if inner in ("allgather", "ssar_recursive_doubling", "ssar_split_allgather"):
            found = max(found, gathered)
        return max(found, 2 * n * accumulator + kept) if "hierarchical_dense" in (outer, inner) else found

    held = n * (2 * element + 2 * accumulator)  # gradient, out, residual, and what the residual was
    per_rank = _PROCESS + held + max(map(work, sweep.algorithms))
    if not sweep.check:
        return per_rank, 0
    # The expected result, the sums of all residuals in float64; on rank 0 all gradients, dense, and a sort of one.
    return per_rank + n * (2 * accumulator + 5 * 8), n * (3 * ranks * accumulator + 4 * 8)


def available_bytes() -> int | None:
    """Return the bytes that new allocations may take on this machine, by Linux's own estimate."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None
