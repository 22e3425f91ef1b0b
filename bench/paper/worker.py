"""One rank of the emulated cluster: steps of every method for every model. `bench.paper` starts it under mpirun.

Times are of this machine, where the network is slower than the paper's by ``--slowdown``: a table divides them by it.
A step waits for its compute time. Each result is written at once, as a line of ``--file``, and is not measured again.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import socket
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import sparsecomm as sc
from bench import report, timing
from bench.compare import baselines, contenders
from bench.paper.models import MODELS, Model
from bench.paper.tables import rows_of
from bench.timing import seconds as seconds_of
from sparsecomm import transport
from sparsecomm.calls.measurement import measured_links
from sparsecomm.cli import tune
from sparsecomm.primitives.costs import Costs
from sparsecomm.tools.timing import Vectors, uninterrupted
from sparsecomm.tuning import profile
from sparsecomm.tuning.profile import Profile

COMM = MPI.COMM_WORLD
MAX_WAIT = 0.5  # seconds of a compute time that are waited for; the rest is added to the step
WORKS = ("select", "merge", "codec", "add", "call")
PAGE = 1024  # elements
SMALL = 1 << 20  # parameters up to which dense steps are quick
MARGIN = 1 << 20  # elements by which ranks' views of the one gradient may be apart
Array = np.ndarray[Any, Any]
Row = dict[str, Any]


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--slowdown", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True, help="of the links, in bits per second")
    parser.add_argument("--models", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed, of the sparse methods")
    parser.add_argument("--gradient", type=Path, required=True, help="file of float32 numbers; ranks use views of it")
    parser.add_argument("--file", type=Path, required=True, help="JSON lines")
    options = parser.parse_args()
    done = COMM.bcast({(row["model"], row["method"]) for row in rows_of(options.file) if row["P"] == COMM.size})
    wanted = [(m, method) for m in options.models for method in options.methods if (m, method) not in done]
    wanted = [(m, method) for m, method in wanted if method != "dense" or MODELS[m].own_dense]
    wanted.sort(key=lambda pair: pair[1] == "dense")  # which needs PyTorch, and no residual
    if not wanted:
        return 0
    costs = calibrated(options)
    base = np.load(options.gradient, mmap_mode="r")
    base[::PAGE].sum()  # pages are there before anything is timed
    memory = mmap.mmap(-1, 8 * max(MODELS[model].n for model, _ in wanted))  # of all models in turn
    alone: dict[str, dict[str, float]] = {}
    for name, method in wanted:
        model = MODELS[name]
        residual, out = np.frombuffer(memory, np.float32)[: 2 * model.n].reshape(2, -1)
        vectors = contenders.FromZero(COMM, base[: model.n], residual, out)
        if method == "dense":
            memory.madvise(mmap.MADV_DONTNEED)
        elif name not in alone:
            alone[name] = work_alone(vectors, model, base)
        if COMM.rank == 0:
            where = f"P = {COMM.size} on {socket.gethostname()}"
            print(f"# {time.strftime('%H:%M:%S')} {where}: {name}, {method}", file=sys.stderr)
        row = measured(METHODS[method](vectors, model.k), model, base, options)
        if COMM.rank == 0:
            numbers = {"alpha": costs.link.alpha, "beta": costs.link.beta}
            numbers |= {work: getattr(costs, work) for work in WORKS}
            row = {"model": name, "method": method, "P": COMM.size, **row, "costs": numbers}
            row |= {"alone": alone[name]} if method != "dense" else {}
            with options.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


# -- what is measured once ---------------------------------------------------------------------------------------------


def calibrated(options: argparse.Namespace) -> Costs:
    """Measure messages of all ranks at once, and the work of one while the others sleep; return the costs. Collective.

    "auto" uses them as its profile. The ranks take turns on the cores, so work in the profile takes ranks / cores times
    as long as alone.
    """
    link = measured_links(transport.transport_of(COMM), 1.0).slowest
    turns = max(1.0, COMM.size / (os.cpu_count() or 1))
    alone = dict.fromkeys(WORKS, 0.0)
    wait_all()
    if COMM.rank == 0:
        for name, (_, count, work) in tune.works().items():
            work()
            alone[name] = float(np.median([seconds_of(work) for _ in range(15)])) / count
    wait_all()
    alone = COMM.bcast(alone)
    shared = Costs(link, **{name: turns * seconds for name, seconds in alone.items()})
    file = options.file.with_suffix(f".{COMM.size}.profile.json")
    library = transport.transport_of(COMM).library
    if COMM.rank == 0:
        file.write_text(Profile(library, COMM.size, COMM.size, shared).as_json())
    wait_all()
    os.environ["SPARSECOMM_PROFILE"] = str(file)
    return replace(shared, **alone)


def work_alone(vectors: Vectors, model: Model, base: Array) -> dict[str, float]:
    """Return the seconds of a step's work on n elements on rank 0, while all others sleep. Collective."""
    entries = sc.topk(vectors.x, model.k)
    times: dict[str, list[float]] = {"select": [], "densify": []}
    wait_all()
    if COMM.rank == 0:
        for step in range(6):
            x = gradient(base, model.n, step)
            times["select"].append(seconds_of(lambda: sc.topk(x, model.k, residual=vectors.residual)))  # noqa: B023
            times["densify"].append(seconds_of(lambda: entries.to_dense(out=vectors.out)))
    wait_all()
    return dict(COMM.bcast({name: float(np.median(taken[1:])) if taken else 0.0 for name, taken in times.items()}))


# -- steps -------------------------------------------------------------------------------------------------------------


def gradient(base: Array, n: int, step: int) -> Array:
    """Return this rank's gradient of a step: the same numbers for all, at indices that differ by rank and step."""
    offset = 16 * ((COMM.rank * 2011 + step * 50021) % (MARGIN // 16))
    return base[offset : offset + n]


def measured(method: Method, model: Model, base: Array, options: argparse.Namespace) -> Row:
    """Return times of steps, as rank 0 collects them; seconds are of this machine. Collective."""
    vectors, sparse = method.vectors, not isinstance(method, Dense)
    if sparse:
        vectors.residual.fill(0)
    steps = options.steps if sparse or model.n < SMALL else 1
    wait = min(MAX_WAIT, options.slowdown * model.compute)
    took: list[float] = []
    parts: list[dict[str, float]] = []
    busy: list[float] = []
    with uninterrupted():
        for step in range(-1 if steps > 1 else 0, steps):
            vectors.x = gradient(base, model.n, step + 1)
            method.before()
            sent, cpu = method.sent(), _cpu_seconds()
            wait_all()
            begin = time.perf_counter()
            time.sleep(wait)
            times = method.step()
            seconds = time.perf_counter() - begin - wait
            cpu = _cpu_seconds() - cpu
            sent = method.sent() - sent
            wait_all()
            slowest = max(COMM.allgather(seconds))
            if step >= 0:
                took.append(slowest)
                parts.append(times)
                busy.append(sum(COMM.allgather(cpu)) / (slowest * (os.cpu_count() or 1)))
        checksums = COMM.allgather(zlib.crc32(vectors.out.data))
        if len(set(checksums)) > 1:
            raise SystemExit(f"rank {COMM.rank}: the sums of ranks differ: {checksums}")
        alone = [_together(method.exchange) for _ in range(steps + 1)][1:] if isinstance(method, Ours) else []
    every = COMM.gather({name: float(np.median([times[name] for times in parts])) for name in parts[0]})
    row = {
        "algorithm": method.choice[0],
        "wire": method.choice[1],
        "n": model.n,
        "k": model.k,
        "slowdown": options.slowdown,
        "rate": options.rate,
        "compute": model.compute,
        "steps": took,
        "exchange": alone,
        "sent": max(COMM.allgather(sent)),
        "busy": float(np.median(busy)),
    }
    if isinstance(method, Ours):
        messages_only = Costs(profile.read(Path(os.environ["SPARSECOMM_PROFILE"])).costs.link)
        row["formula"] = method.predicted_time(method.problem, messages_only)
    if every is not None:
        row["parts"] = {name: float(np.median([times[name] for times in every])) for name in every[0]}
    return row


def _together(action: Callable[[], object]) -> float:
    wait_all()
    seconds = seconds_of(action)
    wait_all()
    return float(max(COMM.allgather(seconds)))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def wait_all() -> None:
    """Wait for all ranks, asleep, so that the cores are left to those at work; then begin together."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(0.01)
    COMM.Barrier()


# -- methods ----------------------------------------------------------------------------------------------------------


class Method:
    """A way to sum gradients: ``step`` writes the dense sum of the sent entries to ``out``, and returns times of parts.

    ``exchange`` repeats the exchange of the last selection, and ``sent`` returns the bytes that this rank has sent so
    far. All sparse methods select with sparsecomm, so their times differ by the exchange alone.
    """

    choice = ("", "")  # algorithm and wire format

    def __init__(self, vectors: Vectors, k: int) -> None:
        self.vectors, self.k = vectors, k

    def before(self) -> None:
        """Prepare a step, outside its time."""


class Dense(Method):
    """gloo's allreduce; the gradient is summed in place, in ``out``."""

    choice = ("gloo's ring", "dense")

    def __init__(self, vectors: Vectors, k: int) -> None:
        super().__init__(vectors, k)
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        if not distributed.is_initialized():
            baselines.start_gloo(COMM, minutes=20)
        self._distributed, self._tensor, self._sent = distributed, torch.from_numpy(vectors.out), 0.0

    def before(self) -> None:
        np.copyto(self.vectors.out, self.vectors.x)

    def step(self) -> dict[str, float]:
        begin = time.perf_counter()
        self.exchange()
        return {"exchange": time.perf_counter() - begin}

    def exchange(self) -> None:
        P = COMM.size
        self._distributed.all_reduce(self._tensor)
        self._sent += 2 * (P - 1) / P * self.vectors.out.nbytes

    def sent(self) -> float:
        return self._sent


class TopK(Method):
    """Selection of ours, `bench.compare.baselines.TopkNumpy`'s exchange and sum."""

    choice = ("MPI's allgather", "plain")

    def __init__(self, vectors: Vectors, k: int) -> None:
        super().__init__(vectors, k)
        self._baseline = baselines.TopkNumpy(COMM)
        self._selected: baselines.Entries = (np.empty(0, np.int32), np.empty(0, np.float32))

    def step(self) -> dict[str, float]:
        v, times = self.vectors, [time.perf_counter()]
        entries = sc.topk(v.x, self.k, residual=v.residual)
        self._selected = entries.indices, entries.values
        times.append(time.perf_counter())
        result = self._baseline.exchange(self._selected)
        times.append(time.perf_counter())
        self._baseline.densify(result, v.out)
        times.append(time.perf_counter())
        return dict(zip(("select", "exchange", "densify"), map(float, np.diff(times)), strict=True))

    def exchange(self) -> None:
        self._baseline.exchange(self._selected)

    def sent(self) -> float:
        return self._baseline.sent


class Ours(Method):
    """`sparse_allreduce` with a residual and ``out``."""

    def __init__(self, vectors: Vectors, k: int, algorithm: str = "auto", wire: str = "auto") -> None:
        super().__init__(vectors, k)
        self._runner = timing.Ours(algorithm, vectors, k, wire, breakdown=True)
        self._exchange: contenders.Ours | None = None
        taken = self._runner.taken
        self.choice = taken.algorithm.name, taken.wire.name
        self.problem = self._runner.explained.query.problem(taken.wire)
        self.predicted_time = taken.algorithm.predicted_time

    def step(self) -> dict[str, float]:
        assert self._runner.clock is not None
        self._runner.clock.reset()
        begin = time.perf_counter()
        self._runner.step()
        took, parts = time.perf_counter() - begin, self._runner.parts()
        return parts | {"other": took - sum(parts.values())}

    def exchange(self) -> None:
        if self._exchange is None:
            self._exchange = contenders.Ours(*self.choice[:1], self.vectors, self.k, self.choice[1])
        self._exchange.exchange()

    def sent(self) -> float:
        return float(self._runner.traffic()[0])


METHODS: dict[str, Callable[[Vectors, int], Method]] = {
    "ours": Ours,
    "gtopk": lambda vectors, k: Ours(vectors, k, "tree", "plain"),
    "topk": TopK,
    "dense": Dense,
}


if __name__ == "__main__":
    raise SystemExit(main())
