"""One of four ranks is killed at a random time, again and again; the others go on alike with nothing lost.

Each run is a job of its own under `mpirun --with-ft ulfm`. Its ranks sum whole numbers, so that all sums are exact, and
one of them is killed from outside: at the first call, between calls or within one. What must hold afterwards:

- all survivors name the rank that was killed;
- the calls that counted before are the same on all survivors, to the bit, and so are those that did not;
- their results and residuals are those of simulated ranks, of which none died: a call counted on all or on none;
- the sum of the three residuals and of what they apply is conserved from then on;
- the survivors have made their first call on three ranks within 2 s of the kill (``--seconds``).

Half of the runs make single calls, in the main thread. The other half step a `Reducer`, and `rebuild` it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.processes import ENVIRONMENT, MPIRUN, ROOT, end
from tests.stress.report import Report

__all__ = ["HELP", "add_arguments", "run"]

HELP = "one of four ranks is killed, and the others go on"

P = 4
ELEMENTS = 600
AFTER = 5  # calls or steps on the ranks that are left
ALGORITHMS = ("butterfly", "tree", "split", "allgather", "dense")
LIMIT = 60.0  # seconds for a run
SHAPES = {"a": (20, 20), "b": (150,), "c": (50,)}


def gradient(seed: int, rank: int, step: int) -> np.ndarray:
    """Whole numbers whose sums float32 holds exactly."""
    return np.random.default_rng([seed, rank, step]).integers(-8, 9, ELEMENTS).astype(np.float32)


def parts(flat: np.ndarray) -> dict[str, np.ndarray]:
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])
    split = np.split(flat.copy(), ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), split, strict=True)}


class Calls:
    """Single calls. ``applied`` is the sum of the results, ``kept`` the residual."""

    def __init__(self, comm: Any, seed: int, algorithm: str) -> None:
        self._comm, self._seed, self._algorithm = comm, seed, algorithm
        self.applied, self.kept = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
        self.done = 0

    def step(self, rank: int) -> None:
        x = gradient(self._seed, rank, self.done)
        result = sc.sparse_allreduce(x, 20, comm=self._comm, algorithm=self._algorithm, residual=self.kept)
        self.applied += result.to_dense()
        self.done += 1

    def rebuild(self, comm: Any) -> tuple[int, ...]:
        self._comm = comm
        return ()


class Steps:
    """Steps of a Reducer. A step counts in part if some of its calls did."""

    def __init__(self, comm: Any, seed: int, algorithm: str) -> None:
        self._seed, self.done = seed, 0
        shapes = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self._reducer = sc.Reducer(
            shapes, 0.05, comm=comm, algorithm=algorithm, op="sum", scope="tensor", dense_below=100, reorder=True
        )
        self.applied = np.zeros(ELEMENTS, np.float32)

    @property
    def kept(self) -> np.ndarray:
        return np.concatenate([self._reducer.residual(name).reshape(-1) for name in SHAPES])

    def step(self, rank: int) -> None:
        pushed = parts(gradient(self._seed, rank, self.done))
        marks = {name: np.full_like(array, np.inf) for name, array in pushed.items()}
        try:
            for name, array in pushed.items():
                self._reducer.push(name, array, marks[name])
            self._reducer.wait()
            self.done += 1
        finally:
            for mark in marks.values():  # what was written counts, also in a step that failed
                if np.isinf(mark).any():
                    mark[:] = 0
            self.applied += np.concatenate([mark.reshape(-1) for mark in marks.values()])

    def rebuild(self, comm: Any) -> tuple[int, ...]:
        return self._reducer.rebuild(comm).ranks_lost


KINDS: dict[str, Callable[[Any, int, str], Calls | Steps]] = {"calls": Calls, "steps": Steps}


# -- a rank -----------------------------------------------------------------------------------------------------------


def work(folder: Path, kind: str, algorithm: str, seed: int, early: bool) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    found: dict[str, Any] = {"rank": rank}
    work = KINDS[kind](world, seed, algorithm)
    if not early:
        work.step(rank)
    world.Barrier()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    while not (folder / "go").exists():  # the harness has the ids of all
        time.sleep(1e-3)
    error: sc.RankFailedError | None = None
    try:
        while True:
            work.step(rank)
    except sc.RankFailedError as caught:
        error = caught
    found |= {"raised": time.monotonic(), "named": error.ranks, "error": str(error), "done": work.done}
    comm = sc.shrink(world)
    found |= {"shrunk": time.monotonic(), "size": comm.Get_size(), "lost": work.rebuild(comm)}
    found |= {"applied": work.applied.copy(), "kept": work.kept.copy()}
    work.done += 1  # the gradient of the call that failed is in the residual
    for number in range(AFTER):
        work.step(rank)
        if number == 0:
            found["on"] = time.monotonic()
    found |= {"applied after": work.applied, "kept after": work.kept}
    (folder / f"tmp{rank}").write_bytes(pickle.dumps(found))
    (folder / f"tmp{rank}").rename(folder / f"rank{rank}")
    while len(list(folder.glob("rank*"))) < P - 1:  # who ends is dead, too, for those who have not heard of the first
        time.sleep(5e-3)
    os._exit(0)  # MPI's finalisation may wait for the dead


# -- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run showed: how long survivors took to raise, to shrink and to go on, and what was wrong."""

    seed: int
    kind: str
    algorithm: str
    early: bool
    raised: float = float("nan")
    shrunk: float = float("nan")
    seconds: float = float("nan")
    done: int = -1
    wrong: list[str] = field(default_factory=list)


def one_run(seed: int, seconds: float) -> Run:
    """Make one run."""
    choose = random.Random(seed)
    made = Run(seed, choose.choice(list(KINDS)), choose.choice(ALGORITHMS), choose.random() < 0.15)
    victim, delay = choose.randrange(P), choose.uniform(0, 0.05)
    folder = Path(tempfile.mkdtemp())
    worker = [str(folder), made.kind, made.algorithm, str(seed), str(int(made.early))]
    command = [str(MPIRUN), "--with-ft", "ulfm", "-n", str(P), sys.executable, "-m", "tests.stress.lost", *worker]
    said = folder / "said"
    with said.open("w") as to:
        job = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + LIMIT
        while len(list(folder.glob("pid*"))) < P and time.monotonic() < deadline and job.poll() is None:
            time.sleep(1e-3)
        time.sleep(0.01)  # the last one has been written, too
        pid = int((folder / f"pid{victim}").read_text())
        (folder / "go").touch()
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        while len(list(folder.glob("rank*"))) < P - 1 and time.monotonic() < deadline and job.poll() is None:
            time.sleep(1e-3)
        ranks = [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("rank*"))]
        if len(ranks) < P - 1:
            made.wrong.append(f"{P - 1 - len(ranks)} survivors did not go on:\n{said.read_text()[-3000:]}")
        else:
            judge(made, victim, killed, ranks, seconds)
    except (OSError, ValueError) as error:
        made.wrong.append(f"the job did not start: {error}\n{said.read_text()[-3000:]}")
    finally:
        end(job)
        shutil.rmtree(folder)
    return made


def judge(made: Run, victim: int, killed: float, ranks: list[dict[str, Any]], seconds: float) -> None:
    """Compare what survivors say with each other, and with ranks of which none died."""
    made.raised, made.shrunk, made.seconds = (max(r[key] for r in ranks) - killed for key in ("raised", "shrunk", "on"))
    first = ranks[0]
    made.done = first["done"]
    check = made.wrong.append
    if made.seconds > seconds:
        check(f"went on after {made.seconds:.2f} s")
    for r in ranks:
        if r["named"] != (victim,):
            check(f"rank {r['rank']} named {r['named']}, not {victim}: {r['error']}")
        if r["size"] != P - 1:
            check(f"rank {r['rank']} went on with {r['size']} ranks")
        if made.kind == "steps" and r["lost"] != (victim,):
            check(f"rank {r['rank']}'s Reducer lost {r['lost']}, not {victim}")
        if r["done"] != first["done"]:
            check(f"rank {r['rank']} had made {r['done']} calls, rank {first['rank']} {first['done']}")
        for key in ("applied", "applied after"):
            if not np.array_equal(r[key], first[key]):
                check(f"{key}: ranks {r['rank']} and {first['rank']} differ")
    if made.wrong:
        return
    total = first["applied"] + sum(r["kept"] for r in ranks)
    added = sum(gradient(made.seed, r["rank"], made.done + 1 + step) for r in ranks for step in range(AFTER))
    if not np.array_equal(first["applied after"] + sum(r["kept after"] for r in ranks), total + added):
        check("the sum of residuals and results changed after the loss")
    compare_with_simulated(made, ranks)


def compare_with_simulated(made: Run, ranks: list[dict[str, Any]]) -> None:
    """Compare with ranks of which none died: the call that failed counted nowhere, and all calls before everywhere."""

    def program(transport: simulated.SimulatedTransport) -> tuple[list[np.ndarray], np.ndarray]:
        work = KINDS[made.kind](transport, made.seed, made.algorithm)
        states = [np.array([work.applied, work.kept]) for _ in range(1)]
        for _ in range(made.done + 1):
            work.step(transport.rank)
            states.append(np.array([work.applied, work.kept]))
        return states[-2:], gradient(made.seed, transport.rank, made.done)

    expected = [result.value for result in simulated.run(P, program)]
    for r in ranks:
        assert expected[r["rank"]] is not None
        (before, after), x = expected[r["rank"]]
        sizes = [int(np.prod(shape)) for shape in SHAPES.values()] if made.kind == "steps" else [ELEMENTS]
        ends = [0, *accumulate(sizes)]
        for begin, until in pairwise(ends):  # tensors of a step count each by itself
            part = slice(begin, until)
            now = np.array([r["applied"], r["kept"]])[:, part]
            right = [np.array([before[0], before[1] + x])]  # the call that failed counted nowhere
            if made.kind == "steps":
                right.append(after)  # other calls of the step did, before
            if made.early:
                right.append(before)  # the first call of all did not begin
            if not any(np.array_equal(now, state[:, part]) for state in right):
                made.wrong.append(f"rank {r['rank']}: elements {begin} to {until} are not those of whole calls")


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--runs", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="within which survivors go on (%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Kill a rank in so many jobs; the n-th has the seed of the attack, plus n."""
    runs = []
    for seed in range(report.seed, report.seed + arguments.runs):
        runs.append(made := one_run(seed, arguments.seconds))
        early = ", at the first call" if made.early else ""
        times = f"raised {made.raised:.3f}, shrunk {made.shrunk:.3f}, on {made.seconds:.3f} s after the kill"
        print(f"seed {seed}: {made.kind}, {made.algorithm}{early}: {times}", file=sys.stderr, flush=True)
        for text in made.wrong:
            report.fail(text, f"-m tests.stress lost --runs 1 --seed {seed} --seconds {arguments.seconds}")
    report.counts.update({"kills": len(runs), "kills at the first call": sum(made.early for made in runs)})
    for name, what in (("raised", "all had raised"), ("shrunk", "all had shrunk"), ("seconds", "all went on")):
        values = sorted(value for made in runs if (value := getattr(made, name)) == value)
        if values:
            shown = statistics.median(values), values[int(0.95 * (len(values) - 1))], values[-1]
            report.figures |= {
                f"s after the kill until {what}, {of}": value
                for of, value in zip(("median", "95 %", "longest"), shown, strict=True)
            }


if __name__ == "__main__":
    _folder, _kind, _algorithm, _seed, _early = sys.argv[1:]
    work(Path(_folder), _kind, _algorithm, int(_seed), _early == "1")
