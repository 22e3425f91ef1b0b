"""One of four ranks is killed at a random time, again and again; the others continue and lose nothing.

Each run is a job under `mpirun --with-ft ulfm`, which sums integers with single calls or with steps of a `Reducer`. All
survivors must name the killed rank. Their results and residuals must equal those of simulated ranks without a death: a
call is applied on all ranks or on none. Afterwards the sum of residuals and results is conserved, and the first call
on three ranks ends within 2 s of the kill (``--seconds``).
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.processes import end
from tests.stress.harness import ALGORITHMS, Numbered, Ranks, numbered

P = 4
ELEMENTS = 600
CALLS_AFTER = 5  # calls or steps on the remaining ranks
LIMIT = 300.0  # seconds for a run
SHAPES = {"a": (20, 20), "b": (150,), "c": (50,)}
ENDS = list(accumulate(int(np.prod(shape)) for shape in SHAPES.values()))


def gradient(seed: int, rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([seed, rank, step]).integers(-8, 9, ELEMENTS).astype(np.float32)


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
    """Steps of a Reducer. A step is applied in part if only some of its calls succeeded."""

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
        split = np.split(gradient(self._seed, rank, self.done), ENDS[:-1])
        outs = {name: np.full(shape, np.inf, np.float32) for name, shape in SHAPES.items()}
        try:
            for (name, out), part in zip(outs.items(), split, strict=True):
                self._reducer.push(name, part.reshape(out.shape).copy(), out)
            self._reducer.wait()
            self.done += 1
        finally:
            for out in outs.values():  # written results count, even in a failed step
                if np.isinf(out).any():
                    out[:] = 0
            self.applied += np.concatenate([out.reshape(-1) for out in outs.values()])

    def rebuild(self, comm: Any) -> tuple[int, ...]:
        return self._reducer.rebuild(comm).ranks_lost


class Run:
    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.seed, self.kind, self.algorithm = seed, choose.choice((Calls, Steps)), choose.choice(ALGORITHMS)
        self.early = choose.random() < 0.15  # at the first call
        self.victim, self.delay = choose.randrange(P), choose.uniform(0, 0.05)

    def __str__(self) -> str:
        return f"{self.kind.__name__.lower()}, {self.algorithm}{', at the first call' if self.early else ''}"

    def work(self, comm: Any) -> Calls | Steps:
        return self.kind(comm, self.seed, self.algorithm)

    def wrong(self, ranks: list[dict[str, Any]]) -> list[str]:
        """Compare the survivors with each other, and with ranks without a death."""
        wrong, first, lost = [], ranks[0], (self.victim,)
        for r in ranks:
            expected = {"named": lost, "size": P - 1, "lost": lost if self.kind is Steps else (), "done": first["done"]}
            expected |= {"applied": first["applied"], "applied after": first["applied after"]}
            wrong += [
                f"rank {r['rank']}, {name}: {r[name]}, not {value}: {r['error']}"
                for name, value in expected.items()
                if not np.array_equal(r[name], value)
            ]
        if wrong:
            return wrong
        total = first["applied"] + sum(r["kept"] for r in ranks)
        steps = range(first["done"] + 1, first["done"] + 1 + CALLS_AFTER)
        added = sum(gradient(self.seed, r["rank"], step) for r in ranks for step in steps)
        if not np.array_equal(first["applied after"] + sum(r["kept after"] for r in ranks), total + added):
            wrong.append("the sum of residuals and results changed after the loss")
        return wrong + self._other_than_simulated(ranks, first["done"])

    def _other_than_simulated(self, ranks: list[dict[str, Any]], done: int) -> list[str]:
        """Compare with ranks without a death: earlier calls are applied on all ranks, the failed one on none."""

        def program(transport: simulated.SimulatedTransport) -> list[np.ndarray]:
            work = self.work(transport)
            states = [np.array([work.applied, work.kept])]
            for _ in range(done + 1):
                work.step(transport.rank)
                states.append(np.array([work.applied, work.kept]))
            return states[-2:]

        wrong, expected = [], [result.value for result in simulated.run(P, program)]
        for r in ranks:
            before, after = expected[r["rank"]]  # type: ignore[misc]
            right = [np.array([before[0], before[1] + gradient(self.seed, r["rank"], done)])]
            if self.kind is Steps:
                right.append(after)  # earlier calls of the step succeeded
            if self.early:
                right.append(before)  # the first call of all did not begin
            # Tensors are applied independently.
            for begin, until in pairwise([0, *(ENDS if self.kind is Steps else [ELEMENTS])]):
                part, now = slice(begin, until), np.array([r["applied"], r["kept"]])
                if not any(np.array_equal(now[:, part], state[:, part]) for state in right):
                    wrong.append(f"rank {r['rank']}: elements {begin} to {until} are not those of whole calls")
        return wrong


class Lost(Numbered):
    unit, chunk = "runs", 10
    options = (*numbered(unit, 200, jobs=0), ("seconds", 2.0, "within which survivors go on"))

    def check(self, number: int) -> None:
        """Kill a rank in one run. Its seed is the attack's seed plus the run's number."""
        run = self._run = Run(self.report.seed + number)
        self._killed, self._ranks = 0.0, []
        options = "--with-ft", "ulfm"
        _, output = self.run_ranks(P, LIMIT, "mpi", mpirun_options=options, first=number, runs=1, jobs=0)
        ranks = self._ranks
        self.counts.update({"kills": 1, "kills at the first call": int(run.early)})
        assert len(ranks) == P - 1, f"{run}: {P - 1 - len(ranks)} survivors did not go on:\n{output[-3000:]}"
        seconds = {event: max(r["times"][event] for r in ranks) - self._killed for event in ranks[0]["times"]}
        for event, value in seconds.items():
            self.report.measure(f"s after the kill until {event}, at most", value)
        wrong, slowest = run.wrong(ranks), seconds["all went on"]
        if slowest > self.arguments.seconds:
            wrong.append(f"went on after {slowest:.2f} s")
        assert not wrong, "\n".join(wrong)

    def meanwhile(self, job: subprocess.Popen[bytes], lines: list[str]) -> None:
        """Kill a rank once all are ready, and end the job once the others have finished."""
        pids = dict(line.split()[1:3] for line in lines if "is ready" in line)
        if len(pids) < P:
            return
        (self.folder / "go").touch()
        time.sleep(self._run.delay)
        os.kill(int(pids[str(self._run.victim)]), signal.SIGKILL)
        self._killed, deadline = time.monotonic(), time.monotonic() + LIMIT
        while len(files := sorted(self.folder.glob("rank*"))) < P - 1 and time.monotonic() < deadline:
            if job.poll() is not None:
                break
            time.sleep(1e-3)
        end(job)
        self._ranks = [pickle.loads(file.read_bytes()) for file in files]

    def on_rank(self, ranks: Ranks) -> None:
        run, comm, rank = Run(self.report.seed + self.arguments.first), ranks.comm, ranks.rank
        work = run.work(comm)
        if not run.early:
            work.step(rank)
        ranks.gather(None)
        print(f"progress: {rank} {os.getpid()} is ready", flush=True)
        while not (self.folder / "go").exists():
            time.sleep(1e-3)
        try:
            while True:
                work.step(rank)
        except sc.RankFailedError as error:
            outcome = {"rank": rank, "named": error.ranks, "error": str(error), "done": work.done}
        times = {"all had raised": time.monotonic()}
        comm = sc.shrink(comm)
        times["all had shrunk"] = time.monotonic()
        outcome |= {"size": comm.Get_size(), "lost": work.rebuild(comm)}
        outcome |= {"applied": work.applied.copy(), "kept": work.kept.copy()}
        work.done += 1  # the gradient of the call that failed is in the residual
        for _ in range(CALLS_AFTER):
            work.step(rank)
            times.setdefault("all went on", time.monotonic())
        outcome |= {"applied after": work.applied, "kept after": work.kept, "times": times}
        temporary: Path = self.folder / f"new{rank}"
        temporary.write_bytes(pickle.dumps(outcome))
        temporary.rename(self.folder / f"rank{rank}")
        while len(list(self.folder.glob("rank*"))) < P - 1:  # a rank that ended would be lost, too
            time.sleep(5e-3)
        os._exit(0)  # MPI's finalization may wait for the dead rank
