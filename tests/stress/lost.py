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

import os
import pickle
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.processes import end, mpirun
from tests.stress.harness import Numbered, numbered

__all__ = ["Lost"]

P = 4
ELEMENTS = 600
AFTER = 5  # calls or steps on the ranks that are left
ALGORITHMS = ("butterfly", "tree", "split", "allgather", "dense")
LIMIT = 300.0  # seconds for a run
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
            shapes, 0.05, comm=comm, algorithm=algorithm, op="sum", scope="tensor", dense_below=100
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


class Run:
    """A run: what ranks do, and which of them is killed when."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.seed, self.kind, self.algorithm = seed, choose.choice(list(KINDS)), choose.choice(ALGORITHMS)
        self.early = choose.random() < 0.15  # at the first call
        self.victim, self.delay = choose.randrange(P), choose.uniform(0, 0.05)

    def work(self, comm: Any) -> Calls | Steps:
        return KINDS[self.kind](comm, self.seed, self.algorithm)

    def on_rank(self, folder: Path) -> None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank = world.Get_rank()
        work = self.work(world)
        if not self.early:
            work.step(rank)
        world.Barrier()
        (folder / f"tmp{rank}").write_text(str(os.getpid()))
        (folder / f"tmp{rank}").rename(folder / f"pid{rank}")
        while not (folder / "go").exists():  # the harness has the ids of all
            time.sleep(1e-3)
        try:
            while True:
                work.step(rank)
        except sc.RankFailedError as error:
            found = {"rank": rank, "named": error.ranks, "error": str(error), "done": work.done}
        times = {"all had raised": time.monotonic()}
        comm = sc.shrink(world)
        times["all had shrunk"] = time.monotonic()
        found |= {"size": comm.Get_size(), "lost": work.rebuild(comm)}
        found |= {"applied": work.applied.copy(), "kept": work.kept.copy()}
        work.done += 1  # the gradient of the call that failed is in the residual
        for _ in range(AFTER):
            work.step(rank)
            times.setdefault("all went on", time.monotonic())
        found |= {"applied after": work.applied, "kept after": work.kept, "times": times}
        (folder / f"tmp{rank}").write_bytes(pickle.dumps(found))
        (folder / f"tmp{rank}").rename(folder / f"rank{rank}")
        while (
            len(list(folder.glob("rank*"))) < P - 1
        ):  # who ends is dead, too, for those who have not heard of the first
            time.sleep(5e-3)
        os._exit(0)  # MPI's finalisation may wait for the dead

    def kill(self, folder: Path, job: subprocess.Popen[bytes]) -> float:
        """Kill a rank when all have begun; return when, once all others have gone on, or the job has ended."""
        deadline = time.monotonic() + LIMIT

        def wait_for(what: str, number: int) -> None:
            while len(list(folder.glob(f"{what}*"))) < number and time.monotonic() < deadline and job.poll() is None:
                time.sleep(1e-3)

        wait_for("pid", P)
        pids = [file.read_text() for file in sorted(folder.glob("pid*"))]
        (folder / "go").touch()
        time.sleep(self.delay)
        if len(pids) == P:
            os.kill(int(pids[self.victim]), signal.SIGKILL)
        killed = time.monotonic()
        wait_for("rank", P - 1)
        end(job)
        return killed

    def wrong(self, ranks: list[dict[str, Any]]) -> list[str]:
        """Compare what survivors say with each other, and with ranks of which none died."""
        wrong, first = [], ranks[0]
        for r in ranks:
            who, lost = f"rank {r['rank']}", (self.victim,)
            if r["named"] != lost:
                wrong.append(f"{who} named {r['named']}, not {self.victim}: {r['error']}")
            if r["size"] != P - 1:
                wrong.append(f"{who} went on with {r['size']} ranks")
            if self.kind == "steps" and r["lost"] != lost:
                wrong.append(f"{who}'s Reducer lost {r['lost']}, not {self.victim}")
            if r["done"] != first["done"]:
                wrong.append(f"{who} had made {r['done']} calls, rank {first['rank']} {first['done']}")
            wrong += [
                f"{key}: {who} and {first['rank']} differ"
                for key in ("applied", "applied after")
                if not np.array_equal(r[key], first[key])
            ]
        if wrong:
            return wrong
        total = first["applied"] + sum(r["kept"] for r in ranks)
        steps = range(first["done"] + 1, first["done"] + 1 + AFTER)
        added = sum(gradient(self.seed, r["rank"], step) for r in ranks for step in steps)
        if not np.array_equal(first["applied after"] + sum(r["kept after"] for r in ranks), total + added):
            wrong.append("the sum of residuals and results changed after the loss")
        return wrong + self._other_than_simulated(ranks, first["done"])

    def _other_than_simulated(self, ranks: list[dict[str, Any]], done: int) -> list[str]:
        """Compare with ranks of which none died: the call that failed counted nowhere, and those before everywhere."""

        def program(transport: simulated.SimulatedTransport) -> list[np.ndarray]:
            work = self.work(transport)
            states = [np.array([work.applied, work.kept])]
            for _ in range(done + 1):
                work.step(transport.rank)
                states.append(np.array([work.applied, work.kept]))
            return states[-2:]

        wrong, expected = [], [result.value for result in simulated.run(P, program)]
        sizes = [int(np.prod(shape)) for shape in SHAPES.values()] if self.kind == "steps" else [ELEMENTS]
        for r in ranks:
            before, after = expected[r["rank"]]  # type: ignore[misc]
            right = [np.array([before[0], before[1] + gradient(self.seed, r["rank"], done)])]
            if self.kind == "steps":
                right.append(after)  # other calls of the step did, before
            if self.early:
                right.append(before)  # the first call of all did not begin
            for begin, until in pairwise([0, *accumulate(sizes)]):  # tensors of a step count each by itself
                part, now = slice(begin, until), np.array([r["applied"], r["kept"]])
                if not any(np.array_equal(now[:, part], state[:, part]) for state in right):
                    wrong.append(f"rank {r['rank']}: elements {begin} to {until} are not those of whole calls")
        return wrong


class Lost(Numbered):
    unit, chunk = "runs", 10
    options = (
        *numbered(unit, 200)[:2],
        ("jobs", 0, "processes; 0: none but this"),
        ("seconds", 2.0, "within which survivors go on"),
    )

    def run(self) -> None:
        """Kill a rank in so many jobs; the n-th has the seed of the attack, plus n."""
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        super().run()
        for what, values in self.times.items():
            values.sort()
            for of, value in (("median", statistics.median(values)), ("95 %", values[int(0.95 * (len(values) - 1))])):
                self.report.measure(f"s after the kill until {what}, {of}", value)
            self.report.measure(f"s after the kill until {what}, longest", values[-1])

    def be_rank(self, folder: str, number: str) -> None:
        """Be one of the ranks of a run."""
        Run(self.report.seed + int(number)).on_rank(Path(folder))

    def check(self, number: int) -> None:
        """Make a run."""
        made, killed = Run(self.report.seed + number), 0.0
        with tempfile.TemporaryDirectory() as folder:

            def kill(job: subprocess.Popen[bytes], _: Callable[[], str]) -> None:
                nonlocal killed
                killed = made.kill(Path(folder), job)

            command = ["-m", "tests.stress", "lost", "--seed", str(self.report.seed), "--on-ranks", folder, str(number)]
            _, said = mpirun(P, *command, options=("--with-ft", "ulfm"), meanwhile=kill)
            ranks = [pickle.loads(file.read_bytes()) for file in sorted(Path(folder).glob("rank*"))]
        self.counts.update({"kills": 1, "kills at the first call": int(made.early)})
        which = f"{made.kind}, {made.algorithm}{', at the first call' if made.early else ''}"
        assert len(ranks) == P - 1, f"{which}: {P - 1 - len(ranks)} survivors did not go on:\n{said[-3000:]}"
        for what in ranks[0]["times"]:
            self.times[what].append(max(r["times"][what] for r in ranks) - killed)
        shown = ", ".join(f"{what} {values[-1]:.3f}" for what, values in self.times.items())
        print(f"{number}: {which}: {shown} s after the kill", file=sys.stderr, flush=True)
        wrong, slowest = made.wrong(ranks), self.times["all went on"][-1]
        if slowest > self.given.seconds:
            wrong.append(f"went on after {slowest:.2f} s")
        assert not wrong, "\n".join(wrong)
