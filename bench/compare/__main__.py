"""Every algorithm of sparsecomm beside every baseline, on the same inputs, in one run.

    mpirun -n 8 python -m bench.compare                                     25.6M elements, density 0.001
    mpirun -n 8 python -m bench.compare --n 4e6 --densities 0.001,0.01,0.1  the density above which dense wins

docs/reports/speed.md describes the timing and the checks.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from rich.table import Table

from bench import report
from bench.compare import tables
from bench.compare.contenders import CONTENDERS, FromZero, Ours, wrong_elements
from bench.compare.tables import DENSE, SPARSE
from bench.timing import Runner, Timer, Timing
from sparsecomm.calls.measurement import measured_links
from sparsecomm.primitives.costs import Link
from sparsecomm.quantities import number_text
from sparsecomm.tools.machine import available_bytes
from sparsecomm.tools.timing import Vectors, uninterrupted
from sparsecomm.transport import transport_of
from sparsecomm.wire import WIRES

COMM = MPI.COMM_WORLD
ARRAYS = 10  # arrays of n float32 that a rank has at once, at most: torch.topk takes four for itself
Run = dict[str, Any]


def main() -> int:
    options = parsed()
    if text := problem(options):
        if COMM.rank == 0:
            print(f"bench.compare: {text}", file=sys.stderr, flush=True)
        return 2
    transport = transport_of(COMM)
    link_of = {"measured": Link(0.0, 0.0) if COMM.size == 1 else measured_links(transport, 2.0).slowest}
    if measured := report.emulated_link():
        link_of["given"] = Link(measured["alpha"], measured["beta"])
    run: Run = report.about("-m bench.compare", sys.argv[1:], COMM.size) | {
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
        "P": COMM.size,
        "n": options.n,
        "wire": options.wire,
        "drain": options.drain,
        "calls": options.calls,
        "links": {source: {"alpha": link.alpha, "beta": link.beta} for source, link in link_of.items()},
        "wrong": [],
    }
    gradient = np.random.default_rng([0, COMM.rank]).standard_normal(options.n, dtype=np.float32)
    vectors = FromZero(COMM, gradient, np.zeros_like(gradient), np.zeros_like(gradient))
    comparison = Comparison(options, vectors, run)
    all_tables = comparison.by_density() if options.densities else comparison.at_one_density(link_of)
    if COMM.rank == 0:
        report.publish(options.write and options.write / options.name, heading(run, link_of), all_tables, run)
    return 1 if run["wrong"] else 0


def parsed() -> argparse.Namespace:
    parser = report.parser(__doc__, prog="python -m bench.compare")
    usual = [name for name, contender in CONTENDERS.items() if contender.usual]
    parser.add_argument("--n", type=float, default=25.6e6, help="elements (25.6e6)")
    parser.add_argument("--density", type=float, default=0.001, help="k/n (0.001)")
    numbers = lambda text: sorted(map(float, text.split(",")))  # noqa: E731
    parser.add_argument("--densities", type=numbers, metavar="D,D,...", help="from which density on dense wins")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each (7)")
    parser.add_argument("--slow-rounds", type=int, default=3, help="rounds in which slow baselines take part (3)")
    parser.add_argument("--calls", type=int, default=1, help="calls per timing; short messages need several (1)")
    names, known = lambda text: text.split(","), f"of {', '.join(CONTENDERS)} ({', '.join(usual)})"
    parser.add_argument("--only", type=names, default=usual, metavar="NAME,...", help=known)
    burst = "bytes that all send before each timing, to use up a token bucket (2^20 if SLOW_NETWORK_LINK is set)"
    parser.add_argument("--drain", type=float, metavar="BYTES", help=burst)
    parser.add_argument("--wire", default="plain", choices=["auto", *WIRES], help="sparsecomm's format (plain)")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the tables and a JSON file there")
    parser.add_argument("--name", metavar="STEM", help="name of these files")
    options = parser.parse_args()
    drain = (1 << 20 if os.environ.get("SLOW_NETWORK_LINK") else 0) if options.drain is None else options.drain
    options.drain = max(0, int(drain))
    options.n, options.only = int(options.n), set(options.only)
    options.name = options.name or f"{'densities' if options.densities else 'compare'}-{COMM.size}"
    if unknown := options.only - set(CONTENDERS):
        parser.error(f"--only {','.join(sorted(unknown))}: expected names of {', '.join(CONTENDERS)}")
    if not all(0 < d <= 1 for d in options.densities or [options.density]) or options.n < 1:
        parser.error("expected n >= 1 and densities in (0, 1]")
    if min(options.rounds, options.slow_rounds, options.calls) < 1:
        parser.error("--rounds, --slow-rounds and --calls must be at least 1")
    options.slow_rounds = min(options.slow_rounds, options.rounds)
    if options.densities:
        options.only &= {*SPARSE, *DENSE}
        if not options.only & set(SPARSE) or not options.only & set(DENSE):
            parser.error("--densities needs a sparse one of ours and a dense one among --only")
    return options


def problem(options: argparse.Namespace) -> str | None:
    """Return why this run is impossible, or ``None``. Hosts of an emulated network share the memory of one machine."""
    boot_ids = COMM.allgather(Path("/proc/sys/kernel/random/boot_id").read_text())
    available = available_bytes() or 2**63
    needed = boot_ids.count(boot_ids[COMM.rank]) * (ARRAYS * 4 * options.n + (400 << 20))
    text = None
    if needed > available:
        text = f"{needed / 2**30:.1f} GiB needed, {available / 2**30:.1f} available: take a smaller --n"
    try:
        if COMM.rank == 0 and options.write:
            options.write.mkdir(parents=True, exist_ok=True)
            for kind in ("json", "txt"):
                (options.write / f"{options.name}.{kind}").open("a").close()
    except OSError as error:
        text = f"cannot write: {error}"
    return next(filter(None, COMM.allgather(text)), None)


class Comparison:
    """A run of the command: contenders in turn, on the same vectors. ``run`` becomes the JSON file."""

    def __init__(self, options: argparse.Namespace, vectors: Vectors, run: Run) -> None:
        self.options, self.vectors, self.run = options, vectors, run
        self.drain_out, self.drain_into = np.zeros((2, options.drain), np.uint8)

    def at_one_density(self, link_of: dict[str, Link]) -> list[Table]:
        """Time everyone."""
        n = self.options.n
        k = max(1, round(self.options.density * n))
        self.run |= {"density": self.options.density, "k": k}
        runners = self.runners(k)
        times = self.measure(runners, say)
        ours = {name: runner for name, runner in runners.items() if isinstance(runner, Ours)}
        own_hosts = (
            len(set(COMM.allgather(socket.gethostname()))) == COMM.size > 1
        )  # else they count others' bytes, too
        self.run |= {
            "times": tables.timing_rows(runners, times, own_hosts),
            "bounds": tables.bound_rows(ours, times, link_of),
            "ratios": tables.ratio_rows(times),
        }
        for runner in runners.values():
            runner.close()
        all_tables = [tables.timing_table(self.run["times"])]
        all_tables += [tables.bound_table(self.run["bounds"], link_of)] if self.run["bounds"] else []
        return all_tables + ([tables.ratio_table(self.run["ratios"])] if self.run["ratios"] else [])

    def by_density(self) -> list[Table]:
        """Time ours and the dense ones, density by density."""
        rows = []
        for density in self.options.densities:
            say(f"density {number_text(density)}")
            times = self.measure(self.runners(max(1, round(density * self.options.n))), lambda text: None)
            rows.append(tables.density_row(density, times))
        crossings = {kind: tables.crossing(rows, kind) for kind in ("step", "exchange")}
        self.run |= {"densities": rows, "crossings": crossings}
        return [tables.density_table(rows)]

    def runners(self, k: int) -> dict[str, Runner]:
        """Set up all contenders that were asked for and work here, and check a step of each."""
        working: dict[str, Runner] = {}
        for name, contender in CONTENDERS.items():
            if name in self.options.only:
                try:
                    working[name] = contender.make(self.vectors, k, self.options.wire)
                except ValueError as error:  # raised on every rank
                    say(f"left out: {error}")
        for name, runner in working.items():
            counts = COMM.allgather(wrong_elements(CONTENDERS[name], runner, self.vectors, k))
            failures = [f"{name}, rank {rank}: {n} elements are wrong" for rank, n in enumerate(counts) if n]
            say(f"WRONG: {failures[0]}" if failures else f"checked {name}")
            self.run["wrong"] += failures
        return working

    def drain(self) -> None:
        """Use up the bursts that a link limited by a token bucket lets pass after a pause; then begin together."""
        P, rank = COMM.size, COMM.rank
        if len(self.drain_out) and P > 1:
            COMM.Sendrecv(self.drain_out, (rank + 1) % P, recvbuf=self.drain_into, source=(rank - 1) % P)
            COMM.Barrier()

    def measure(self, runners: dict[str, Runner], say: Any) -> dict[tuple[str, str], Timing]:
        """Time all in turn, round by round, so that a change of the machine's speed meets all alike."""
        rounds, of_slow = self.options.rounds, self.options.slow_rounds
        slow_rounds = {rounds * i // of_slow for i in range(of_slow)}
        timers = {
            (name, kind): Timer(COMM, runner, kind, rounds, calls=self.options.calls, ready=self.drain, settle=True)
            for name, runner in runners.items()
            for kind in CONTENDERS[name].times
        }
        with uninterrupted():
            for round_no in range(-1, rounds):
                say(f"round {round_no + 1} of {rounds}" if round_no >= 0 else "warm-up")
                for (name, _), timer in timers.items():
                    if round_no < 0 or not CONTENDERS[name].slow or round_no in slow_rounds:
                        timer.run(round_no)
        times = {key: timer.timing() for key, timer in timers.items()}
        return {(name, "exchange"): times[name, "step"] for name in runners} | times  # a step that is only an exchange


def heading(run: Run, link_of: dict[str, Link]) -> list[str]:
    what = f"P = {run['P']}, n = {run['n']:,}" + (f", k = {run['k']:,}" if "k" in run else "")
    return [
        *report.head(run),
        f"# {run['mpi']}; MPI's allreduce is {'its ring' if tables.launched_ring() else 'the one it chooses'}",
        f"# {what}; {tables.link_text(link_of)}",
        f"# before each timing all send {run['drain']:,} bytes, to use up bursts",
        f"# {len(run['wrong'])} results wrong",
        *(f"# WRONG: {text}" for text in run["wrong"]),
    ]


def say(text: str) -> None:
    if COMM.rank == 0:
        print(f"# {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
