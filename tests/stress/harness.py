"""The harness of all attacks: options, reports, cases by number, and real ranks.

All choices of an attack follow from a seed. Each failure is printed with a command that repeats it.
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

MARK = "stress: "  # begins the line of a rank's report
SHOWN = ("progress: ", "FAILED: ", "  repeat: ")  # lines of ranks that are printed at once
ALGORITHMS = ("split", "butterfly", "allgather", "tree", "dense")
PROGRESS = 30.0  # seconds between two lines about progress
CASE_LIMIT, PROCESS_LIMIT, GATHER_LIMIT = 300, 900.0, 90  # seconds
BROADCAST_LIMIT = 8  # seconds: timeout of PyTorch's broadcasts, which do not notice other ranks' errors


@dataclass
class Report:
    """The counts, measurements and failures of an attack."""

    attack: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)  # of events
    figures: dict[str, float] = field(default_factory=dict)  # the largest value of each measurement, with its unit
    failures: list[tuple[str, str]] = field(default_factory=list)  # (description, command that repeats it)
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
    """An attack. Each module has one subclass, whose module docstring is the help text."""

    options: tuple[tuple[str, Any, str], ...] = ()  # (name, default, meaning); a tuple as default: several values
    timeout: float = 20  # SPARSECOMM_TIMEOUT of real ranks, in seconds
    environment: dict[str, str] = {}  # noqa: RUF012 - further variables of real ranks
    folder: Path  # shared by real ranks and their starter

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.report = arguments, Report(arguments.attack, arguments.seed)
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
        """Make the attack as one of the ranks of `start_ranks`."""
        raise NotImplementedError

    def meanwhile(self, job: subprocess.Popen[bytes], lines: list[str]) -> None:
        """Attack the ranks from outside. Called again and again, once a rank has printed a line of `SHOWN`."""

    def words(self, **other: Any) -> list[str]:
        """Return the arguments of ``-m tests.stress``, with some options replaced."""
        words = [self.report.attack, "--seed", str(self.report.seed)]
        for name, default, _ in self.options:
            value = other.get(name, getattr(self.arguments, name))
            values = list(value) if isinstance(value, (list, tuple)) else [] if value is True else [value]
            if values != (list(default) if isinstance(default, tuple) else [default]):
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words

    def fail(self, what: str, **other: Any) -> None:
        """Record and print a failure; ``other``: options for its repetition."""
        repeat = shlex.join(["-m", "tests.stress", *self.words(**other)])
        self.report.failures.append((what, repeat))
        print(f"FAILED: {what}\n  repeat: {repeat}", file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """Print the progress now and then, on rank 0 only."""
        if time.monotonic() - self._last_progress > PROGRESS:
            self._last_progress = time.monotonic()
            print(f"progress: {text}", file=sys.stderr, flush=True)

    # -- real ranks ---------------------------------------------------------------------------------------------------

    def start_ranks(self, P: int, seconds: float, over: str = "mpi", start: Sequence[str] = (), **other: Any) -> None:
        """Run `on_rank` on P ranks over MPI or gloo, with some options replaced, and add their reports.

        ``start``: Python arguments that start a command on several hosts; by default mpirun starts the ranks.
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
        if any(ranks.gather(bool(self.report.failures))):  # the ranks may be out of step
            time.sleep(1)  # lets all ranks receive this
            os._exit(0)
        ranks.close()


class Ranks:
    """This process as one of several real ranks, with a side channel that the library does not use.

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
                while not barrier.Test():  # leave the cores to other ranks
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
                results = [None] * self.size
                dist.all_gather_object(results, mine, group=own)
                return results

        self._gather = gather

    def gather(self, mine: Any) -> list[Any]:
        """All-gather objects with signals blocked. If a rank does not come, end the process with a traceback."""
        faulthandler.dump_traceback_later(GATHER_LIMIT, exit=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGINT})
        results = self._gather(mine)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return results


# -- cases by number --------------------------------------------------------------------------------------------------

SANITIZED = "sanitized", "", "with AddressSanitizer and UndefinedBehaviorSanitizer, built in this folder if it is empty"


def numbered(unit: str, cases: int, jobs: int = os.cpu_count() or 1) -> tuple[tuple[str, Any, str], ...]:
    """Return the options of a `Numbered` attack whose cases are called ``unit``."""
    first = "first", 0, "the number of the first"
    return (unit, cases, "how many"), first, ("jobs", jobs, "processes; 0: only this one")


class Numbered(Attack):
    """An attack of numbered cases, divided among processes. If a process crashes, its part is lost, and reported."""

    unit: str  # name of the cases, and of the option for their number
    chunk: int  # cases per process; a quarter with sanitizers
    case: object = None  # the current case, printed with a failure

    def check(self, number: int) -> None:
        """Check a case. An exception is a failure."""
        raise NotImplementedError

    def run(self) -> None:
        folder = getattr(self.arguments, "sanitized", "")
        if not self.arguments.jobs and not (folder and not sanitizers.within()):
            self._check_all()
        elif not folder:
            self._share(ROOT, {}, self.chunk)
        elif sanitizers.build(root := Path(folder).resolve()):
            self._share(root, sanitizers.environment(), self.chunk // 4)
        else:
            self.fail("the sanitizers do not see a write behind the end of an array")

    def _check_all(self) -> None:
        watched = -1.0
        for number in range(self.arguments.first, self.arguments.first + getattr(self.arguments, self.unit)):
            began = time.monotonic()
            if began > watched + 1:  # starts a thread, so not for each case
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
        """Check cases in processes, each with the command for its part."""
        first, cases, done = self.arguments.first, getattr(self.arguments, self.unit), 0
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
            pool = ThreadPoolExecutor(max(1, self.arguments.jobs))
            try:
                parts = [pool.submit(check_part, number) for number in range(first, first + cases, chunk)]
                for future in as_completed(parts):
                    part, report, end, output = future.result()
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
