"""The options of `sparsecomm bench`, understood and checked before anything is allocated."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from sparsecomm.algorithms import find
from sparsecomm.calls.arguments import count_of
from sparsecomm.cli import devices, options
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install
from sparsecomm.quantities import nbytes, size_text
from sparsecomm.tensors.dtypes import DTYPES

__all__ = ["add_arguments", "available_bytes", "check_memory", "parse", "same_command"]

_USUAL = "butterfly,tree,split,dense,allgather"
_MAX_SIZES = 1000
_PROCESS = 64 << 20  # Python, NumPy and MPI, before any vector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    sizes = parser.add_argument_group("what")
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
    names = ", ".join(options.ALGORITHM_NAMES)
    sizes.add_argument("--algorithms", default=_USUAL, metavar="LIST", help=f"some of {names}; or all (%(default)s)")
    names = ", ".join(options.WIRE_NAMES)
    sizes.add_argument("--wire", default="auto", metavar="LIST", help=f"some of {names}; or all (%(default)s)")
    sizes.add_argument("--dtype", default="float32", help=f"one of {', '.join(DTYPES)} (%(default)s)")
    sizes.add_argument("--device", default="cpu", help=f"one of {', '.join(devices.DEVICES)} (%(default)s)")
    how = parser.add_argument_group("how")
    how.add_argument("-n", "--iterations", type=int, default=20, metavar="N", help="timed calls per row (%(default)s)")
    how.add_argument("-w", "--warmup", type=int, default=5, metavar="N", help="calls before them (%(default)s)")
    how.add_argument("-c", "--check", action="store_true", help="check every result: #wrong")
    how.add_argument("--breakdown", action="store_true", help="time of every part: select, exchange, merge, ...")
    how.add_argument(
        "--ranks", type=int, metavar="N", help="start N ranks on this machine, with mpirun; without MPI, with torchrun"
    )
    options.add_files(parser, "time against size")


def same_command(arguments: argparse.Namespace) -> list[str]:
    """Return the options as a command line, in one form, without ``--ranks``."""
    said = {name: value for name, value in vars(arguments).items() if name not in ("ranks", "run")}
    given = {name.replace("_", "-"): v for name, v in said.items() if v is not None and v is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


def parse(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `add_arguments`, parsed: a `DType`, numbers, `Path`s, and tuples.

    The tuples are ``counts``, the sizes in elements, ``densities``, ``algorithms`` and ``wires``.

    Raises:
        InvalidInputError: one of them cannot be used. It is decided by the options and what is installed alone.
    """
    dtype = DTYPES.get(arguments.dtype)
    if dtype is None:
        raise InvalidInputError(f"--dtype {arguments.dtype}: expected one of {', '.join(DTYPES)}")
    if dtype.name == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401 - teaches NumPy the name
        except ImportError as error:
            raise InvalidInputError(f"--dtype bfloat16: needs ml_dtypes: {pip_install('bench')}") from error
    devices.check(arguments.device, dtype.name)
    if arguments.iterations < 1:
        raise InvalidInputError(f"-n {arguments.iterations}: expected at least 1 timed call")
    if arguments.warmup < 0:
        raise InvalidInputError(f"-w {arguments.warmup}: expected 0 calls or more before the timed ones")
    densities = tuple(dict.fromkeys(map(options.number, arguments.density.split(","))))
    if not all(0 < d <= 1 for d in densities):
        raise InvalidInputError(
            f"--density {arguments.density}: expected numbers above 0 and up to 1, with commas between them"
        )
    json, plot = options.json_and_plot(arguments)
    parsed = {"dtype": dtype, "densities": densities, "json": json, "plot": plot}
    parsed["counts"] = _counts(arguments.min_bytes, arguments.max_bytes, arguments.factor, dtype.itemsize)
    parsed["algorithms"] = options.algorithms(arguments.algorithms)
    parsed["wires"] = options.wires(arguments.wire, dtype)
    return argparse.Namespace(**vars(arguments) | parsed)


def _counts(smallest: str, largest: str, factor: str, itemsize: int) -> tuple[int, ...]:
    b, e = nbytes("-b", smallest), nbytes("-e", largest)
    f = options.number(factor)
    if not 1 < f < math.inf:
        raise InvalidInputError(f"-f {factor}: expected a number above 1")
    if b < itemsize:
        raise InvalidInputError(f"-b {smallest}: expected at least one element, {itemsize} bytes")
    if b > e:
        raise InvalidInputError(f"-b {smallest} -e {largest}: no size is in this range; expected -b to be at most -e")
    steps = math.log(e / b) / math.log(f)
    if steps > _MAX_SIZES:
        raise InvalidInputError(
            f"-f {factor}: more than {_MAX_SIZES} sizes from {smallest} to {largest}; take a larger one"
        )
    sizes = (min(round(b * f**step), e) for step in range(int(steps + 1e-9) + 1))
    return tuple(dict.fromkeys(size // itemsize for size in sizes))


# -- what the machine must have ---------------------------------------------------------------------------------------


def check_memory(asked: argparse.Namespace, ranks: int, local: int, available: int | None) -> None:
    """Refuse a size for which this machine has too little memory.

    Args:
        ranks: in all.
        local: how many of them run on this machine.
        available: bytes; None if it is not known.
    """
    n, accumulator = max(asked.counts), asked.dtype.accumulator.itemsize
    entry, k = accumulator + (4 if n < 2**31 else 8), count_of(max(asked.densities), n)
    # Gradient, out, residual, and what the residual was; entries of one rank.
    needed = _PROCESS + n * (2 * asked.dtype.itemsize + 2 * accumulator) + 12 * k * entry
    if not all((found := find(name)) is not None and found.reselects for name in asked.algorithms):
        # Dense sums, and segments under way; or what all ranks have selected.
        needed += max(2 * n * accumulator + 3 * (n // ranks) * accumulator, 4 * k * ranks * entry)
    gradient = f"a gradient of {size_text(n * asked.dtype.itemsize)}"
    there = devices.DEVICES[asked.device]().available_bytes()
    if there is not None and needed > there:
        raise InvalidInputError(
            f"{gradient} needs about {size_text(needed)} of its device per rank; available are {size_text(there)}. "
            "Take a smaller -e."
        )
    total = needed * local
    if asked.check:
        # The expected result, the sums of all residuals in float64, the entries of a dense sum; on rank 0 all
        # gradients, dense, and a sort of one.
        needed += n * (3 * accumulator + 2 * entry + 5 * 8)
        total = needed * local + n * (3 * ranks * accumulator + 4 * 8)
    if available is not None and total > available:
        raise InvalidInputError(
            f"{gradient} on {local} rank(s) of one machine needs about {size_text(needed)} per rank, "
            f"{size_text(total)} in all; available are {size_text(available)}. "
            "Take a smaller -e" + (", or leave out -c." if asked.check else ".")
        )


def available_bytes() -> int | None:
    """Return the bytes that new allocations may take on this machine, by Linux's own estimate."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None
