"""The options of `sparsecomm bench`, and whether they fit together and into memory."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from sparsecomm.algorithms import find
from sparsecomm.calls.arguments import count_of
from sparsecomm.cli import devices, options
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.quantities import size_text
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.wire import EXACT, WIRES

__all__ = ["add_arguments", "available_bytes", "check_memory", "parse"]

_USUAL = "butterfly,tree,split,dense,allgather"
_PROCESS = 64 << 20  # Python, NumPy and MPI, before any vector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what")
    size = "the smallest dense gradient, in bytes: K, M and G are decimal, Ki, Mi and Gi binary (%(default)s)"
    what.add_argument("-b", "--min-bytes", type=options.nbytes, default="64Ki", metavar="SIZE", help=size)
    size = "the largest (%(default)s)"
    what.add_argument("-e", "--max-bytes", type=options.nbytes, default="64Mi", metavar="SIZE", help=size)
    factor, step = options.number(1.01, 2**53, "a number from 1.01 on"), "from one size to the next (%(default)s)"
    what.add_argument("-f", "--factor", type=factor, default="4", help=step)
    part, parts = options.listed(options.density), "k/n, one or several (%(default)s)"
    what.add_argument("--density", dest="densities", type=part, default="0.001,0.01", metavar="LIST", help=parts)
    names = f"some of {', '.join(options.ALGORITHM_NAMES)}; or all (%(default)s)"
    what.add_argument("--algorithms", type=options.algorithms, default=_USUAL, metavar="LIST", help=names)
    names = f"some of {', '.join(options.WIRE_NAMES)}; or all (%(default)s)"
    what.add_argument("--wire", dest="wires", type=options.wires, default="auto", metavar="LIST", help=names)
    what.add_argument("--dtype", default="float32", choices=DTYPES, help="of the gradient (%(default)s)")
    devices.add_argument(what)
    how = parser.add_argument_group("how")
    calls, warmup = "timed calls per row (%(default)s)", "calls before them (%(default)s)"
    how.add_argument("-n", "--iterations", type=options.count, default=20, metavar="N", help=calls)
    how.add_argument("-w", "--warmup", type=options.count_or_0, default=5, metavar="N", help=warmup)
    how.add_argument("-c", "--check", action="store_true", help="check every result: #wrong")
    how.add_argument("--breakdown", action="store_true", help="time of every part: select, exchange, merge, ...")
    start = "start N ranks on this machine, with mpirun; without MPI, with torchrun"
    how.add_argument("--ranks", type=options.count, metavar="N", help=start)
    options.add_files(parser, "time against size")


def parse(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `add_arguments` with ``counts``, the sizes in elements, and with their `DType`.

    Raises:
        InvalidInputError: they do not fit together. It is decided by the options and what is installed alone.
    """
    dtype, wires = DTYPES[arguments.dtype], arguments.wires
    if dtype.name == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401 - teaches NumPy the name
        except ImportError as error:
            raise InvalidInputError(f"--dtype bfloat16: needs ml_dtypes: {pip_install('bench')}") from error
    devices.check(arguments.device, dtype.name)
    if dtype.name == "float64":
        exact = tuple(name for name in wires if name == "auto" or WIRES[name].kind is EXACT)
        if wires not in (exact, tuple(WIRES)):
            raise InvalidInputError("--wire: expected auto, plain or packed with --dtype float64; others round float32")
        wires = exact
    b, e = arguments.min_bytes, arguments.max_bytes
    if not dtype.itemsize <= b <= e:
        raise InvalidInputError(f"-b {b} -e {e}: expected -b to be at least {dtype.itemsize}, and at most -e")
    steps = int(math.log(e / b) / math.log(arguments.factor) + 1e-9)
    sizes = (min(round(b * arguments.factor**step), e) for step in range(steps + 1))
    counts = tuple(dict.fromkeys(size // dtype.itemsize for size in sizes))
    return argparse.Namespace(**vars(arguments) | {"dtype": dtype, "wires": wires, "counts": counts})


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
    total = needed * local
    there = devices.DEVICES[asked.device]().available_bytes()
    limits = [(needed, there, "its device per rank")]
    if asked.check:
        # The expected result, the sums of all residuals in float64, the entries of a dense sum; on rank 0 all
        # gradients, dense, and a sort of one.
        needed += n * (3 * accumulator + 2 * entry + 5 * 8)
        total = needed * local + n * (3 * ranks * accumulator + 4 * 8)
    limits.append((total, available, f"memory, {size_text(needed)} per rank"))
    for size, limit, where in limits:
        if limit is not None and size > limit:
            raise InvalidInputError(
                f"a gradient of {size_text(n * asked.dtype.itemsize)} on {local} rank(s) of one machine needs about "
                f"{size_text(size)} of {where}; available are {size_text(limit)}. Take a smaller -e"
                + (", or leave out -c." if asked.check else ".")
            )


def available_bytes() -> int | None:
    """Return the bytes that new allocations may take on this machine, by Linux's own estimate."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None
