"""Contenders in turn, round by round."""

from __future__ import annotations

import argparse
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

from bench.compare.checks import COMM, Array
from bench.compare.contenders import Contender


def quiet_barrier() -> None:
    """All ranks together, without those that wait taking the cores of those that work."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(100e-6)
    COMM.Barrier()  # by now all are here: aligns them


def on_the_wire() -> int:
    """Bytes that this host has sent over networks."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
    return sum(int(fields[8]) for name, fields in counts.items() if name != "lo")


class Drain:
    """Uses up the bursts that a link limited by a token bucket lets pass at full speed after a pause."""

    def __init__(self, nbytes: int) -> None:
        self._out, self._into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def __call__(self) -> None:
        """All ranks to their neighbours at once; then at once together."""
        if len(self._out) and COMM.size > 1:
            COMM.Sendrecv(
                self._out, (COMM.rank + 1) % COMM.size, recvbuf=self._into, source=(COMM.rank - 1) % COMM.size
            )
            COMM.Barrier()


class Times:
    """What was measured of each contender, by kind, round by round: NaN in rounds in which it did not run."""

    def __init__(self, rounds: int, drain: Drain, calls: int = 1) -> None:
        """``calls``: one after another make a timing, whose time is their mean."""
        self.rounds, self.drain, self.calls = rounds, drain, calls
        self.seconds: dict[tuple[str, str], Array] = {}
        self.sent: dict[tuple[str, str], float] = {}
        self.wire: dict[tuple[str, str], float] = {}
        self.parts: dict[tuple[str, str], Array] = {}  # (contender, what) -> seconds

    def run(self, c: Contender, kind: str, round: int) -> float:
        """One timing; rounds below 0 warm up. Seconds on this rank."""
        c.before(kind)
        quiet_barrier()
        self.drain()
        key, sent, wire = (c.name, kind), c.sent(), on_the_wire()
        action = getattr(c, kind)
        start = time.perf_counter()
        for _ in range(self.calls):
            action()
        took = (time.perf_counter() - start) / self.calls
        quiet_barrier()  # what was sent has now left, and the barrier's own bytes are few
        if round >= 0:
            self._row(self.seconds, key)[round] = took
            self.sent[key], self.wire[key] = (c.sent() - sent) / self.calls, (on_the_wire() - wire) / self.calls
            if kind == "exchange":
                for part, seconds in c.parts().items():
                    self._row(self.parts, (c.name, part))[round] = seconds / self.calls
        return took

    def shard(self) -> None:
        """Maxima over ranks. A rank may lack a part that others have: the leaves of the tree merge nothing."""
        for rows in (self.seconds, self.parts):
            for key in sorted({key for keys in COMM.allgather(list(rows)) for key in keys}):
                mine = rows.setdefault(key, np.full(self.rounds, np.nan))
                COMM.Allreduce(MPI.IN_PLACE, ranked := np.nan_to_num(mine, nan=-1.0), MPI.MAX)
                rows[key] = np.where(ranked < 0, np.nan, ranked)
        self.most = {key: COMM.allreduce(value, MPI.MAX) for key, value in self.sent.items()}
        self.mean = {key: COMM.allreduce(value, MPI.SUM) / COMM.size for key, value in self.sent.items()}
        alone = len(set(COMM.allgather(socket.gethostname()))) == COMM.size > 1  # else hosts count others' bytes too
        self.wire = {key: COMM.allreduce(value, MPI.MAX) if alone else math.nan for key, value in self.wire.items()}

    def median(self, name: str, kind: str) -> float:
        return float(np.nanmedian(self.seconds[name, kind]))

    def _row(self, rows: dict[tuple[str, str], Array], key: tuple[str, str]) -> Array:
        return rows.setdefault(key, np.full(self.rounds, np.nan))


def measure(contenders: list[Contender], options: argparse.Namespace, say: Callable[[str], None]) -> Times:
    """All in turn, round by round, so that a change of the machine's speed meets all alike."""
    rounds, times = options.rounds, Times(options.rounds, Drain(options.drain), options.calls)
    slow = {rounds * i // options.slow_rounds for i in range(options.slow_rounds)}
    for round in range(-1, rounds):
        say(f"round {round + 1} of {rounds}" if round >= 0 else "warm-up")
        for c in contenders:
            if round < 0 or not c.slow or round in slow:
                for kind in c.kinds:
                    times.run(c, kind, round)
    times.shard()
    for c in contenders:
        if "exchange" not in c.kinds:
            for rows in (times.seconds, times.most, times.mean, times.wire):
                rows[c.name, "exchange"] = rows[c.name, "step"]
    return times
