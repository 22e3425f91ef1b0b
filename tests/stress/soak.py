"""Local steps for an hour, over links that lose packets and stall for seconds now and then.

The relay of `bench.slow_network` stalls single links, and is stopped itself at random times, sometimes for longer than
the timeout. (With ``--no-network`` a rank is stopped instead.) Of two runs, one blocks during exchanges, and the
other overlaps them with steps. All sums are exact. The attack checks:

- pushed changes are applied or in residuals, and global parameters are the same on all ranks;
- a stall shorter than the timeout raises nothing. A longer one raises `TimeoutError` that names another rank, and
  `TransportError` elsewhere; then `realign` and `rebuild` let the ranks continue. If only some ranks have applied a
  round, `rebuild` makes global parameters equal, and sums are counted anew;
- no rank hangs, and memory, descriptors and threads do not grow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from tests.stress.endurance import resources
from tests.stress.harness import Attack, Ranks

SYNC_EVERY, STEP = 4, 0.01  # local steps per round, and seconds per step
ROUNDS = 4  # rounds between two checks
SIZES = {"a": 150_000, "b": 30_000, "c": 700}
LONG = 1.7  # length of a long stall, in timeouts
NAMED = re.compile(r"for ranks? (\d+)")
MAX_GROWTH = 32 << 20  # bytes of resident memory, for buffers of connections and of the allocator


class Training:
    """One rank's training, and a hash of the sum of its changes.

    The hash is the sum of elements times fixed random numbers, modulo 2^64. Since it is linear, hashes can be added.
    """

    def __init__(self, name: str, comm: Any, rank: int, P: int, seed: int, **options: Any) -> None:
        self.name, self._P, self._delay = name, P, options.get("fragment_sync_delay", 0)
        self.parameters = {key: np.zeros(size, np.float32) for key, size in SIZES.items()}
        self._rng, weights = np.random.default_rng([seed, rank]), np.random.default_rng(seed)
        self._weights = {key: weights.integers(-(2**62), 2**62, size) for key, size in SIZES.items()}
        self.local = sc.LocalSteps(
            self.parameters, sync_every=SYNC_EVERY, comm=comm, op="mean", wire="packed", decay=1.0, **options
        )
        self.pushed = self.began = 0

    def hash(self, arrays: dict[str, Any]) -> int:
        with np.errstate(over="ignore"):
            parts = [np.dot(self._weights[key], array.astype(np.int64)) for key, array in arrays.items()]
        return sum(map(int, parts)) % 2**64

    def step(self) -> None:
        for array in self.parameters.values():
            some = self._rng.integers(0, array.size, array.size // 8)
            array[some] += self._P * self._rng.integers(-3, 4, some.size)
        if (self.local.local_step + 1 + self._delay) % SYNC_EVERY == 0:
            now = self.local.global_parameters()
            self.pushed += self.hash({key: now[key] - local for key, local in self.parameters.items()})
        self.local.step(self.parameters)

    @property
    def kept(self) -> int:
        return self.hash({key: reducer.residual(key) for reducer in self.local.reducers for key in SIZES})

    @property
    def applied(self) -> int:
        """The hash of the change of the global parameters since `begin`."""
        return self.began - self.hash(self.local.global_parameters())

    @property
    def checksum(self) -> int:
        return zlib.crc32(b"".join(array.tobytes() for array in self.local.global_parameters().values()))

    def begin(self) -> None:
        """Count anew from the global parameters, since differences of local ones may be no multiples of P."""
        now = self.local.global_parameters()
        for key, array in self.parameters.items():
            array[:] = now[key]
        self.pushed, self.began = self.kept, self.hash(now)


class Soak(Attack):
    options = (
        ("minutes", 60.0, ""),
        ("ranks", 4, ""),
        ("rate", "200mbit", "of the links"),
        ("rtt", "20ms", "of the links"),
        ("loss", "1%", "of the packets"),
        ("stall", 4.0, "seconds for which the network stalls at most; now and then 1.7 timeouts"),
        ("every", 40.0, "seconds between two stalls"),
        ("long", 6, "of so many stalls one is long"),
        ("timeout", 12.0, "SPARSECOMM_TIMEOUT"),
        ("no_network", False, "between processes of this machine"),
    )

    def run(self) -> None:
        arguments, P = self.arguments, self.arguments.ranks
        network = ["-m", "bench.slow_network", "run", "--ranks", str(P), "--launcher", "torchrun", "--no-measure"]
        network += ["--rate", arguments.rate, "--rtt", arguments.rtt, "--loss", arguments.loss]
        network += ["--stall", f"{arguments.stall / 2:g}s/{2 * arguments.every:g}s"]  # each link stalls independently
        self._rng, self._number, self._due = np.random.default_rng(self.report.seed), 0, 0.0
        self.start_ranks(P, 60 * arguments.minutes + 240, "gloo", [] if arguments.no_network else network)
        # The library does not notice stalls during the attack's own gathers.
        noticed = self.counts["stalls: long"] * (P - 1) > self.counts["gathers longer than the timeout"]
        if noticed and not self.counts["TimeoutError"]:
            self.fail("nothing timed out in stalls that were longer than the timeout")

    def meanwhile(self, job: subprocess.Popen[bytes], lines: list[str]) -> None:
        now = time.monotonic()
        if not self._number:  # the ranks have just begun
            self._number, self._due, self._end = 1, now + self.arguments.every / 2, now + 60 * self.arguments.minutes
        long = self._number % self.arguments.long == self.arguments.long // 2
        seconds = LONG * self.arguments.timeout if long else float(self._rng.uniform(0.3, self.arguments.stall))
        if self._due < now < self._end - 2 * seconds and (stopped := stop_below(job.pid, self._rng)):
            time.sleep(seconds)
            for process in stopped:
                os.kill(process, signal.SIGCONT)
            self._number += 1
            self.counts["stalls: long" if long else "stalls: short"] += 1
            self.report.measure("s, the longest stall", seconds)
            self._due = time.monotonic() + float(self._rng.uniform(0.5, 1.5)) * self.arguments.every

    def be_rank(self, over: str, folder: str) -> None:
        self.timeout = self.arguments.timeout
        super().be_rank(over, folder)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def on_rank(self, ranks: Ranks) -> None:
        """Train, with checks now and then."""
        comm, seed, P = ranks.comm, self.report.seed, ranks.size
        blocking = Training("blocking", comm, ranks.rank, P, seed)
        delayed = Training("delayed", comm, ranks.rank, P, seed + 1, fragment_sync_delay=2, algorithm="allgather")
        trainings = (blocking, delayed)
        if ranks.rank == 0:
            print("progress: the ranks have begun", flush=True)
        end, before = time.monotonic() + 60 * self.arguments.minutes, None
        checks = 0
        for training in trainings:
            training.begin()
        going_on = True
        while going_on:
            failed = False
            for _ in range(ROUNDS * SYNC_EVERY):
                time.sleep(STEP)
                for training in trainings:
                    failed |= not self._try(ranks, training.name, training.step)
                if failed:
                    break
            of_ranks = self._gather(ranks, (failed, time.monotonic() < end))
            going_on = of_ranks[0][1]
            if any(failed for failed, _ in of_ranks):
                self._recover(ranks, trainings)
            else:
                self._check(ranks, trainings, "in the course")
            checks += 1
            if before is None and checks >= 20:
                before = resources()
            self.progress(f"round {blocking.local.round}, {self.counts['recoveries']} recoveries")
            if any(self._gather(ranks, bool(self.report.failures))):
                break
        self.counts["rounds"] = blocking.local.round if ranks.rank == 0 else 0
        for kind, now in resources().items() if before is not None else ():
            grown = now - before[kind]
            self.report.measure(f"{kind}: growth", grown)
            if grown > (MAX_GROWTH if "bytes" in kind else 4):
                self.fail(f"rank {ranks.rank}: {grown} more {kind} after {checks} checks")

    def _gather(self, ranks: Ranks, mine: Any) -> list[Any]:
        """All-gather, and count the stalls that the library does not notice."""
        began = time.monotonic()
        of_ranks = ranks.gather(mine)
        self.counts["gathers longer than the timeout"] += time.monotonic() - began > self.timeout
        return of_ranks

    def _try(self, ranks: Ranks, what: str, action: Callable[..., object], *arguments: Any) -> bool:
        """Perform an action, check its error, and return whether it succeeded."""
        began = time.monotonic()
        try:
            action(*arguments)
        except sc.TransportError as error:
            self.counts[type(error).__name__] += 1
            if isinstance(error, sc.TimeoutError):
                named = NAMED.search(str(error))
                if named is None or int(named[1]) in (ranks.rank, ranks.size):
                    self.fail(f"rank {ranks.rank}, {what}: the error names no other rank: {error}")
            return False
        finally:
            self.report.measure("s, the longest wait", time.monotonic() - began)
        return True

    def _check(self, ranks: Ranks, trainings: tuple[Training, ...], when: str) -> bool:
        """Return whether all ranks have the same global parameters; fail if sums are not conserved. Collective."""
        same = True
        for training in trainings:
            mine = training.checksum, training.pushed, training.kept, training.applied, training.local.round
            of_ranks = self._gather(ranks, mine)
            if len({checksum for checksum, *_ in of_ranks}) > 1:
                same = False
                continue
            pushed, waiting = (sum(record[i] for record in of_ranks) for i in (1, 2))
            if (pushed - waiting - ranks.size * mine[3]) % 2**64:
                self.fail(f"rank {ranks.rank}, {training.name}, round {mine[-1]}, {when}: sums are not conserved")
                training.begin()
            self.counts["checks of sums"] += ranks.rank == 0
        if not same and when == "in the course":
            self.fail(f"rank {ranks.rank}: global parameters differ, and nothing was raised")
        return same

    def _recover(self, ranks: Ranks, trainings: tuple[Training, ...]) -> None:
        """Realign and rebuild, so that all ranks continue together. Collective."""
        began = time.monotonic()
        self.counts["recoveries"] += ranks.rank == 0
        for training in trainings:
            self._try(ranks, "finish", training.local.finish, training.parameters)
        same = self._check(ranks, trainings, "before rebuild")
        self.counts["recoveries: some ranks had applied what others had not"] += not same and ranks.rank == 0
        for _ in range(20):
            fine = self._try(ranks, "realign", sc.realign, ranks.comm)
            for training in trainings:
                fine = fine and self._try(ranks, "rebuild", training.local.rebuild, ranks.comm, training.parameters)
            if all(self._gather(ranks, fine)):
                break
        else:
            self.fail(f"rank {ranks.rank}: the ranks do not meet again")
        for training in () if same else trainings:
            training.begin()
        if not self._check(ranks, trainings, "after rebuild"):
            self.fail(f"rank {ranks.rank}: global parameters differ after rebuild")
        self.report.measure("s, the longest recovery", time.monotonic() - began)


def stop_below(parent: int, rng: np.random.Generator) -> list[int]:
    """Stop the relay among a process's descendants, or else a rank; return the stopped processes."""
    parents, programs = {}, {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path("/proc", process, "stat").read_text()
            programs[int(process)] = Path("/proc", process, "cmdline").read_text().split("\0")
        except OSError:
            continue
        parents[int(process)] = int(status.rpartition(")")[2].split()[1])
    below = {parent}
    while more := {process for process, above in parents.items() if above in below} - below:
        below |= more
    targets = [process for process in below if Path(programs[process][0]).name.startswith("relay")]
    if not targets:
        ranks = [p for p in below if programs[p][:2] == [sys.executable, "-m"] and "--on-ranks" in programs[p]]
        targets = [int(rng.choice(ranks))] if ranks else []
    for process in targets:
        os.kill(process, signal.SIGSTOP)
    return targets
