"""Measure the costs of messages and work on this system, and write the profile that "auto" uses.

Run it under mpirun, srun or torchrun with the ranks that train, on the nodes where they train: the profile is valid for
that number of ranks and nodes and for that MPI. Set the same environment variables as in training, such as
SPARSECOMM_THREADS.

Messages use the library's own transport. Between nodes, one rank of each node takes part; inside nodes, all ranks do.
Several pairs of ranks exchange messages at the same time. Work is measured on the CPU, on all ranks at the same time.
The profile contains the median time of the slowest pair of ranks, and the median work time of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

import sparsecomm as sc
from sparsecomm import backends
from sparsecomm.calls.measurement import measured_links
from sparsecomm.cli.launch import agreed
from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import bytes_text, number_text, rate_text
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.tools import options
from sparsecomm.tools.timing import quiet_barrier
from sparsecomm.tools.world import World, transport_of, world
from sparsecomm.transport import Transport
from sparsecomm.tuning import choice, profile
from sparsecomm.tuning.profile import Profile
from sparsecomm.wire import EXACT

HELP = 'measure the costs that "auto" uses to select an algorithm; run it on the ranks that train'

_N = 4_000_000  # elements of a gradient
_DENSITY = 0.001
_K = 25_600  # entries of a vector: 25.6 million elements at this density
_EXAMPLES = tuple((n, density) for n in (1_000_000, 25_000_000) for density in (0.001, 0.01))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    where = "where to write the profile (SPARSECOMM_PROFILE, or ~/.cache/sparsecomm/profile.json)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=where)
    duration = "approximate duration of each of the seven measurements (%(default)s s)"
    seconds = options.number(1e-9, 3600, "a number above 0, and 3600 at most")
    parser.add_argument("--seconds", type=seconds, default="1", metavar="S", help=duration)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the profile; return 0."""
    # Report an unresponsive rank within seconds, but leave time for the measurements.
    os.environ.setdefault("SPARSECOMM_TIMEOUT", str(30 + 4 * arguments.seconds))
    comm = world()
    transport = transport_of(comm)
    file: Path = (arguments.output or profile.path()).absolute()

    def say(text: str) -> None:
        if transport.rank == 0:
            print(text, flush=True)

    agreed(comm, lambda: _check(transport, file))
    nodes = f"{transport.num_nodes} node{'s' * (transport.num_nodes != 1)}"
    say(f"sparsecomm {sc.__version__} on {transport.size} ranks of {nodes}, {transport.library}\n")
    costs = _measure(transport, comm, arguments.seconds, say)
    measured = Profile(transport.library, transport.size, transport.num_nodes, costs)
    say("")
    for n, density in _EXAMPLES:
        query = choice.CostQuery(transport.size, transport.num_nodes, n, round(n * density), value_bytes=4)
        best = choice.decide(query, costs)
        text = f"{best.algorithm.name}, {best.wire.name}, {1e3 * best.seconds:.2f} ms"
        say(f"auto for n={n}, density {number_text(density)}: {text}")
    bucket = choice.bucket_bytes(transport.size, transport.num_nodes, 0.001, costs)
    say(f"buckets of a Reducer at density 0.001: {bucket >> 20} MiB")

    agreed(comm, lambda: _write(file, measured.as_json()) if transport.rank == 0 else None)
    blind = [str(rank) for rank, sees in enumerate(comm.allgather(_sees(measured, file))) if not sees]
    say(f"\nThe profile is in {file}")
    if blind:
        say(f"Ranks that do not see it there: {', '.join(blind)}. Copy it to their nodes.")
    if file != profile.path().absolute():
        say(f"Train with SPARSECOMM_PROFILE={file} in the environment of all ranks.")
    return 0


# -- the file ---------------------------------------------------------------------------------------------------------


def _check(transport: Transport, file: Path) -> None:
    if transport.size == 1:
        raise InvalidInputError(
            "there is one rank, and no message to measure: run it under mpirun with the ranks that train"
        )
    if transport.rank == 0:
        with suppress(OSError):  # `check_writable` reports it
            file.parent.mkdir(parents=True, exist_ok=True)
        options.check_writable(file)
        if file.exists() and not file.is_file():
            raise InvalidInputError(f"{file}: is not a regular file; name another with --output")


def _write(file: Path, text: str) -> None:
    """Write the file atomically: programs that start may read it at any time."""
    temporary = file.resolve().with_name(f".{file.name}.{os.getpid()}")
    with options.writing(file):
        try:
            temporary.write_text(text)
            temporary.replace(file.resolve())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _sees(measured: Profile, file: Path) -> bool:
    """Return whether this rank can read the profile; its node may have a different file system."""
    try:
        return profile.read(file) == measured
    except InvalidInputError:
        return False


# -- the measurements ------------------------------------------------------------------------------------------------


def _measure(transport: Transport, comm: World, seconds: float, say: Callable[[str], None]) -> Costs:
    """Return the costs, the same on all ranks. Collective."""
    links = measured_links(transport, seconds)
    link, node = links.slowest, links.inside
    say(f"{'messages':<20}{'alpha':>12}{'gap':>12}{'beta':>16}{'rate':>26}")
    say(f"{'between nodes':<20}{_described(link) if transport.num_nodes > 1 else 'as inside: there is only one node'}")
    say(f"{'inside a node':<20}{_described(node) if node else 'nothing: each rank has a node of its own'}")

    say(f"\n{'work':<20}{'per':>12}{'time':>16}")
    costs = {}
    for name, (unit, count, work) in works().items():
        median = _median_seconds(work, comm, seconds)
        quiet_barrier(comm)
        costs[name] = float(max(comm.allgather(median))) / count
        say(f"{name:<20}{unit:>12}{1e9 * costs[name]:>13.3f} ns")
    return Costs(link=link, node=node, **costs)


def _described(link: Link) -> str:
    rate = f"{rate_text(8 / link.beta)}, {bytes_text(1 / link.beta)}/s"
    return f"{1e6 * link.alpha:>9.2f} us{1e6 * link.gap:>9.2f} us{1e9 * link.beta:>11.4f} ns/B{rate:>26}"


def works() -> dict[str, tuple[str, int, Callable[[], object]]]:
    """Return, for each cost of work, its unit, the number of units in a call, and the call."""
    backend, rng = backends.of(interop.CPU), np.random.default_rng(os.getpid())
    gradient, residual, total = (rng.standard_normal(_N, np.float32) for _ in range(3))
    x, r = interop.tensor(gradient, "x"), interop.tensor(residual, "residual", writable=True)
    n = round(_K / _DENSITY)
    indices = (np.sort(rng.choice(n, _K, replace=False)).astype(np.int32) for _ in range(2))
    a, b = (SparseVector.trusted(array, rng.standard_normal(_K, np.float32), n, (n,)) for array in indices)
    tiny = a.part(0, 4)

    def codec() -> None:
        data = backend.pack(a, EXACT)
        backend.unpack(data, data[:16].tobytes(), a.nnz, a.size, EXACT, False)

    return {
        "select": ("element", _N, lambda: backend.topk(x, round(_N * _DENSITY), r)),
        "merge": ("entry", a.nnz + b.nnz, lambda: backend.merge_topk(a, b, _K)),
        "codec": ("entry", a.nnz, codec),
        "add": ("element", _N, lambda: backend.add(total, gradient)),
        "call": ("call", 1, lambda: backend.merge_topk(tiny, tiny, tiny.nnz)),
    }


def _median_seconds(work: Callable[[], object], comm: World, seconds: float) -> float:
    """Call ``work`` for ``seconds`` on all ranks at once; return the median time of a call. Collective."""
    for _ in range(3):
        work()
    quiet_barrier(comm)
    times: list[float] = []
    began = now = time.perf_counter()
    while now < began + seconds or len(times) < 3:
        before = now
        work()
        now = time.perf_counter()
        times.append(now - before)
    return statistics.median(times)
