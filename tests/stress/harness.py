"""The harness of all attacks: options, reports, cases by number, and real ranks.

An attack makes all its choices from a seed. Each failure is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.processes import ROOT, mpirun, run_python
from tests.stress import sanitizers

MARK = "stress: "  # begins the line with which a rank reports
SHOWN = ("progress: ", "FAILED: ", "  repeat: ")  # lines of ranks that are printed at once
ALGORITHMS = ("split", "butterfly", "allgather", "tree", "dense")
PROGRESS = 30.0  # seconds between two lines about progress
CASE_LIMIT, PROCESS_LIMIT, GATHER_LIMIT = 300, 900.0, 90  # seconds
BROADCAST_LIMIT = 8  # seconds until a broadcast of PyTorch, which hears of no errors of other ranks, gives up


@dataclass
class Report:
    """What an attack did and found."""

    attack: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)  # of events
    figures: dict[str, float] = field(default_factory=dict)  # the largest value of each measurement, with its unit
    failures: list[tuple[str, str]] = field(default_factory=list)  # descriptions, and the commands that repeat them
    began: float = field(default_factory=time.monotonic)

    def measure(self, name: str, value: float) -> None:
        self.figures[name] = max(value, self.figures.get(name, value))

    def add(self, other: dict[str, Any], prefix: str = "") -> None:
        """Add the report of another process, as JSON."""
        self.counts.update({f"{prefix}{event}": number for event, number in other["counts"].items()})
        for name, value in other["figures"].items():
            self.measure(f"{prefix}{name}", value)
        self.failures += map(tuple, other["failures"])

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"seconds": round(self.seconds, 3), "counts": dict(sorted(self.counts.items()))}
        return fields | {"machine": platform.machine(), "python": platform.python_version()}

    def write(self, file: Path) -> None:
        """Write the report as JSON to ``file`` and as text to the same name with the suffix ``.txt``."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        file.with_suffix(".txt").write_text(f"{self}\n")

    def __str__(self) -> str:
        lines = [f"{self.attack}: seed {self.seed}, {self.seconds:.1f} s"]
        lines += [f"  {number:>12,} {event}" for event, number in sorted(self.counts.items())]
        lines += [f"  {value:>12.6g} {name}" for name, value in sorted(self.figures.items())]
        lines += [f"  FAILED: {what}\n    repeat: {repeat}" for what, repeat in self.failures]
        return "\n".join([*lines, f"  {len(self.failures)} failures"])


class Attack:
    """An attack: one class per module, whose docstring is the attack's help."""

    options: tuple[tuple[str, Any, str], ...] = ()  # name, default (a tuple: several values) and meaning of each
    timeout: float = 20  # SPARSECOMM_TIMEOUT of real ranks, in seconds
    environment: dict[str, str] = {}  # noqa: RUF012 - further variables of real ranks
    folder: Path  # that real ranks and their starter share

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.report = given, Report(given.attack, given.seed)
        self.counts = self.report.counts
        self._last_progress = time.monotonic()

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        for name, default, meaning in cls.options:
            flag, several = f"--{name.replace('_', '-')}", isinstance(default, tuple)
            if default is False:
                parser.add_argument(flag, action="store_true", help=meaning)
                continue
            first = default[0] if several else default
            shown = " ".join(map(str, default)) if several else default
            text = f"{meaning} ({shown})".lstrip().replace("%", "%%")
            parser.add_argument(flag, type=type(first), default=default, nargs="+" if several else None, help=text)

    def run(self) -> None:
        """Make the attack."""
        raise NotImplementedError

    def on_rank(self, ranks: Ranks) -> None:
        """Make the attack as one of the ranks that `start_ranks` has started."""
        raise NotImplementedError

    def meanwhile(self, job: subprocess.Popen[bytes], lines: list[str]) -> None:
        """Attack the ranks from outside. Called repeatedly, once a rank has printed one of the lines `SHOWN`."""

    def words(self, **other: Any) -> list[str]:
        """Return the command after ``-m tests.stress``, with other values of some options."""
        words = [self.report.attack, "--seed", str(self.report.seed)]
        for name, default, _ in self.options:
            value = other.get(name, getattr(self.given, name))
            values = list(value) if isinstance(value, (list, tuple)) else [] if value is True else [value]
            if values != (list(default) if isinstance(default, tuple) else [default]):
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words

    def fail(self, what: str, **other: Any) -> None:
        """Record and print a failure; ``other``: options that repeat it."""
        repeat = shlex.join(["-m", "tests.stress", *self.words(**other)])
        self.report.failures.append((what, repeat))
        print(f"FAILED: {what}\n  repeat: {repeat}", file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """Print the progress now and then; of real ranks, rank 0 does."""
        if time.monotonic() - self._last_progress > PROGRESS:
            self._last_progress = time.monotonic()
            print(f"progress: {text}", file=sys.stderr, flush=True)

    # -- real ranks ---------------------------------------------------------------------------------------------------

    def start_ranks(self, P: int, seconds: float, over: str = "mpi", start: Sequence[str] = (), **other: Any) -> None:
        """Run `on_rank` on P ranks over MPI or gloo, with other options, and add their reports.

        ``start``: arguments of Python that start a command on several hosts; mpirun by default.
        """
        status, output = self.run_ranks(P, seconds, over, start, **other)
        reports = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
        for report in reports:
            self.report.add(json.loads(report))
        if status != 0 or len(reports) != P:
            what = f"{P} ranks over {over} ended with status {status} and {len(reports)} reports"
            self.fail(f"{what}:\n{output[-6000:]}", **other)

    def run_ranks(
        self, P: int, seconds: float, over: str, start: Sequence[str] = (), mpirun_options: tuple[str, ...] = (),
        **other: Any,
    ) -> tuple[int, str]:  # fmt: skip
        """Run `on_rank` on P ranks; return the exit status (-1: they did not end) and the output."""

        def follow(job: subprocess.Popen[bytes], output: Callable[[], str]) -> None:
            shown, began = 0, time.monotonic()
            while job.poll() is None and time.monotonic() - began < seconds:
                time.sleep(0.2)
                lines = [line for line in output().splitlines() if line.startswith(SHOWN)]
                print(*lines[shown:], sep="\n", end="\n" * (len(lines) > shown), file=sys.stderr, flush=True)
                shown = len(lines)
                if lines:
                    self.meanwhile(job, lines)

        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            command = ["-m", "tests.stress", *self.words(**other), "--on-ranks", over, folder]
            try:
                if start:
                    return run_python(*start, "--", sys.executable, *command, seconds=seconds, meanwhile=follow)
                return mpirun(P, *command, options=mpirun_options, seconds=seconds, meanwhile=follow)
            except AssertionError as error:  # the ranks did not end
                return -1, str(error)

    def be_rank(self, over: str, folder: str) -> None:
        os.environ |= {"SPARSECOMM_TIMEOUT": str(self.timeout), **self.environment}
        self.folder, ranks = Path(folder), Ranks(over, f"{folder}/store")
        self._last_progress = math.inf if ranks.rank else self._last_progress
        self.on_rank(ranks)
        sys.stdout.write(f"{MARK}{json.dumps(self.report.as_json())}\n")
        sys.stdout.flush()
        if any(ranks.gather(bool(self.report.failures))):  # the ranks may be out of step for good
            time.sleep(1)  # until all ranks have received this
            os._exit(0)
        ranks.close()


class Ranks:
    """This process among real ranks, with a side channel between them that the library does not use.

    ``comm`` is the communicator or process group that the library uses; ``new()`` returns another one. ``node`` is the
    value of the option ``nodes``: four ranks are two nodes.
    """

    node: Any = "auto"

    def __init__(self, over: str, store: str) -> None:
        if over == "mpi":
            from mpi4py import MPI

            self.comm, self.new, own = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup, MPI.COMM_WORLD.Dup()
            self.rank, self.size, self.close = own.rank, own.size, lambda: None
            if self.size == 4:
                self.node = own.Split(self.rank // 2)

            def gather(mine: Any) -> list[Any]:
                barrier, pause = own.Ibarrier(), 1e-5
                while not barrier.Test():  # other ranks have the cores meanwhile
                    time.sleep(pause)
                    pause = min(1.5 * pause, 1e-3)
                return own.allgather(mine)
        else:
            import torch.distributed as dist

            prefix = next(p for p in ("", "OMPI_COMM_WORLD_", "PMI_") if f"{p}RANK" in os.environ)
            size = "WORLD_SIZE" if not prefix else f"{prefix}SIZE"
            self.rank, self.size = int(os.environ[f"{prefix}RANK"]), int(os.environ[size])
            file = dist.FileStore(store, self.size)
            dist.init_process_group("gloo", store=file, rank=self.rank, world_size=self.size)
            limit = timedelta(seconds=BROADCAST_LIMIT)
            self.comm, self.new = dist.group.WORLD, lambda: dist.new_group(backend="gloo", timeout=limit)
            own = dist.new_group(backend="gloo")
            if self.size == 4:
                self.node, _ = dist.new_subgroups(2)
            # A thread of gloo that frees a tensor when the interpreter ends aborts the process.
            self.close = lambda: dist.destroy_process_group(own)

            def gather(mine: Any) -> list[Any]:
                found = [None] * self.size
                dist.all_gather_object(found, mine, group=own)
                return found

        self._gather = gather

    def gather(self, mine: Any) -> list[Any]:
        """All-gather objects with signals blocked. If a rank does not come, end the process with a traceback."""
        faulthandler.dump_traceback_later(GATHER_LIMIT, exit=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGINT})
        found = self._gather(mine)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return found


# -- cases by number --------------------------------------------------------------------------------------------------

SANITIZED = "sanitized", "", "with AddressSanitizer and UndefinedBehaviorSanitizer, built in this folder if it is empty"


def numbered(unit: str, cases: int, jobs: int = os.cpu_count() or 1) -> tuple[tuple[str, Any, str], ...]:
    """Return the options of a `Numbered` attack; ``unit``: the name of its cases."""
    first = "first", 0, "the number of the first"
    return (unit, cases, "how many"), first, ("jobs", jobs, "processes; 0: only this one")


class Numbered(Attack):
    """An attack of numbered cases, which processes share. A process that crashes costs its part, and is reported."""

    unit: str  # the name of the cases, and of the option for their number
    chunk: int  # how many cases a process checks; with sanitizers a quarter
    case: object = None  # the current one, which is printed with a failure

    def check(self, number: int) -> None:
        """Check a case. An exception is a failure."""
        raise NotImplementedError

    def run(self) -> None:
        folder = getattr(self.given, "sanitized", "")
        if not self.given.jobs and not (folder and not sanitizers.within()):
            self._check_all()
        elif not folder:
            self._share(ROOT, {}, self.chunk)
        elif sanitizers.build(root := Path(folder).resolve()):
            self._share(root, sanitizers.environment(), self.chunk // 4)
        else:
            self.fail("the sanitizers do not see a write behind the end of an array")

    def _check_all(self) -> None:
        watched = -1.0
        for number in range(self.given.first, self.given.first + getattr(self.given, self.unit)):
            began = time.monotonic()
            if began > watched + 1:  # not for each case: this starts a thread
                watched = began
                faulthandler.dump_traceback_later(CASE_LIMIT, exit=True)
            try:
                self.check(number)
            except Exception as error:
                where = "" if self.case is None else f"\n  in {self.case}"
                what = f"{type(error).__name__}: {str(error).strip() or repr(error)}{where}"
                self.fail(what, **{"first": number, self.unit: 1, "jobs": 0})
            self.report.measure(f"s, the slowest of the {self.unit}", time.monotonic() - began)
        faulthandler.cancel_dump_traceback_later()

    def _share(self, root: Path, environment: dict[str, str], chunk: int) -> None:
        """Check cases in processes, each with the command that a person would type for its part."""
        first, cases, done = self.given.first, getattr(self.given, self.unit), 0
        environment = os.environ | {"PYTHONPATH": str(root)} | environment

        def check_part(begin: int) -> tuple[dict[str, Any], Path, str, str]:
            part = {"first": begin, self.unit: min(chunk, first + cases - begin), "jobs": 0}
            report = Path(folder, f"{begin}.json")
            command = [sys.executable, "-m", "tests.stress", *self.words(**part), "--report", str(report)]
            with Path(folder, f"{begin}.log").open("w+", errors="replace") as log:
                to = {"stdout": subprocess.DEVNULL, "stderr": log, "timeout": PROCESS_LIMIT}
                try:
                    end = f"ended with status {subprocess.run(command, cwd=root, env=environment, **to).returncode}"
                except subprocess.TimeoutExpired:
                    end = f"did not end in {PROCESS_LIMIT:g} s"
                log.seek(0)
                return part, report, end, log.read()

        with tempfile.TemporaryDirectory(prefix="sparsecomm-stress-") as folder:
            pool = ThreadPoolExecutor(max(1, self.given.jobs))
            try:
                parts = [pool.submit(check_part, number) for number in range(first, first + cases, chunk)]
                for each in as_completed(parts):
                    part, report, end, output = each.result()
                    if report.exists():
                        sys.stderr.write(output)
                        self.report.add(json.loads(report.read_text()))
                    else:
                        self.fail(f"a process {end} and made no report. Its output: {output[-4000:]}", **part)
                    done += part[self.unit]
                    self.progress(f"{done:,} of {cases:,} {self.unit}, {done / self.report.seconds:,.0f}/s")
            finally:
                pool.shutdown(cancel_futures=True)
        self.report.measure(f"{self.unit}/s", cases / self.report.seconds)
