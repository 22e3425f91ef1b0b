"""What attacks have in common: options, what was found, cases by their numbers, and ranks.

An attack makes all its choices from a seed. Whatever it finds, it prints with the command that shows it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import ROOT, mpirun, run_python
from tests.stress import sanitizers
from tests.stress.side_channel import SideChannel

__all__ = ["SANITIZED", "Attack", "Numbered", "Report", "numbered"]

Option = tuple[str, Any, str]

_MARK = "stress: "  # begins the line in which a rank tells what it has found
_SHOWN = ("progress: ", "FAILED: ", "  repeat: ")  # what ranks say is shown at once
_ENOUGH = 20  # failures, after which real ranks end
_PROGRESS = 30.0  # seconds between lines that say how far it is
_HANGS = 300  # seconds for a case
_LIMIT = 900.0  # seconds for a process


@dataclass
class Report:
    """What an attack did and found.

    Attributes:
        attack: its name.
        seed: from which all choices follow.
        counts: how often what happened.
        figures: what was measured, by name with its unit; the largest counts.
        failures: what should not be, each with the command that shows it again.
    """

    attack: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def measure(self, name: str, value: float) -> None:
        """Take note of a figure."""
        self.figures[name] = max(value, self.figures.get(name, value))

    def add(self, other: dict[str, Any], prefix: str = "") -> None:
        """Add what another process has found, as JSON."""
        self.counts.update({f"{prefix}{what}": number for what, number in other["counts"].items()})
        for what, value in other["figures"].items():
            self.measure(f"{prefix}{what}", value)
        self.failures += map(tuple, other["failures"])

    @property
    def seconds(self) -> float:
        """The time since the attack began."""
        return time.monotonic() - self.began

    def as_json(self) -> dict[str, Any]:
        """Return the report in types that JSON has."""
        fields = asdict(self) | {"seconds": round(self.seconds, 3), "counts": dict(sorted(self.counts.items()))}
        return fields | {"machine": platform.machine(), "python": platform.python_version()}

    def write(self, file: Path) -> None:
        """Write the report as JSON to ``file``, and as text beside it, with the suffix ``.txt``."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        file.with_suffix(".txt").write_text(f"{self}\n")

    def __str__(self) -> str:
        lines = [f"{self.attack}: seed {self.seed}, {self.seconds:.1f} s"]
        lines += [f"  {number:>12,} {what}" for what, number in sorted(self.counts.items())]
        lines += [f"  {value:>12.6g} {what}" for what, value in sorted(self.figures.items())]
        lines += [f"  FAILED: {what}\n    repeat: {repeat}" for what, repeat in self.failures]
        return "\n".join([*lines, f"  {len(self.failures)} failures"])


class Attack:
    """An attack. Each module has one, which has the module's docstring for its help.

    Attributes:
        options: of each the name, what it is unless it is given, which also says its type, and what it means. A tuple
            stands for several values.
        timeout: SPARSECOMM_TIMEOUT of real ranks, in seconds.
        given: what the command line says.
        report: what was done and found.
    """

    options: tuple[Option, ...] = ()
    timeout: float = 20

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.report = given, Report(given.attack, given.seed)
        self.counts = self.report.counts
        self._said = time.monotonic()

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        for name, usual, meaning in cls.options:
            flag, several = f"--{name.replace('_', '-')}", isinstance(usual, tuple)
            if usual is False:
                parser.add_argument(flag, action="store_true", help=meaning)
                continue
            shown = " ".join(map(str, usual if several else [usual]))
            kind = type(usual[0] if several else usual)
            count = {"nargs": "+"} if several else {}
            parser.add_argument(
                flag, type=kind, default=usual, help=f"{meaning} ({shown})".lstrip().replace("%", "%%"), **count
            )

    def run(self) -> None:
        """Attack."""
        raise NotImplementedError

    def on_rank(self, ranks: SideChannel) -> None:
        """Attack, as one of the ranks that `start_ranks` has started."""
        raise NotImplementedError

    def meanwhile(self, job: subprocess.Popen[bytes]) -> None:
        """Do what is to be done to ranks from outside; called again and again, once one has said something."""

    def words(self, **other: Any) -> list[str]:
        """Return the words of the command behind ``-m tests.stress``, with other values of some options."""
        words = [self.report.attack, "--seed", str(self.report.seed)]
        for name, usual, _ in self.options:
            value = other.get(name, getattr(self.given, name))
            values = list(value) if isinstance(value, (list, tuple)) else [] if value is True else [value]
            if values != (list(usual) if isinstance(usual, tuple) else [usual]):
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words

    def fail(self, what: str, **other: Any) -> None:
        """Take note of what should not be, and print it at once; ``other``: options that show it again."""
        repeat = shlex.join(["-m", "tests.stress", *self.words(**other)])
        self.report.failures.append((what, repeat))
        print(f"FAILED: {what}\n  repeat: {repeat}", file=sys.stderr, flush=True)

    def progress(self, how_far: str) -> None:
        """Say now and then how far it is; of ranks the first does."""
        if time.monotonic() - self._said > _PROGRESS:
            self._said = time.monotonic()
            print(f"progress: {how_far}", file=sys.stderr, flush=True)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def start_ranks(self, P: int, seconds: float, over: str = "mpi", network: Sequence[str] = (), **other: Any) -> None:
        """Run `on_rank` on P ranks, over MPI or gloo, with other options, and add what they find.

        ``network``: what starts a command on hosts with links between them, as words for Python.
        """

        def follow(job: subprocess.Popen[bytes], output: Callable[[], str]) -> None:
            shown, began = 0, time.monotonic()
            while job.poll() is None and time.monotonic() - began < seconds:
                time.sleep(0.2)
                lines = [line for line in output().splitlines() if line.startswith(_SHOWN)]
                print(*lines[shown:], sep="\n", end="\n" * (len(lines) > shown), file=sys.stderr, flush=True)
                shown = len(lines)
                if lines:
                    self.meanwhile(job)

        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "tests.stress", *self.words(**other), "--on-ranks", over, f"{folder}/store"]
            try:
                if network:
                    command = [*network, "--", sys.executable, *command]
                    status, output = run_python(*command, seconds=seconds, meanwhile=follow)
                else:
                    status, output = mpirun(P, *command, seconds=seconds, meanwhile=follow)
            except AssertionError as error:  # it has not ended
                status, output = -1, str(error)
        told = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
        for line in told:
            self.report.add(json.loads(line))
        if status != 0 or len(told) != P:
            self.fail(f"{P} ranks over {over} ended with status {status}, {len(told)} told:\n{output[-6000:]}", **other)

    def enough(self, ranks: SideChannel) -> bool:
        """Return whether a rank has found so much that no more is needed; all ranks ask at once."""
        return max(ranks.gather(len(self.report.failures))) > _ENOUGH

    def be_rank(self, over: str, store: str) -> None:
        """Be one of the ranks, and tell what was found."""
        os.environ["SPARSECOMM_TIMEOUT"] = str(self.timeout)
        transport = SideChannel(over, store)
        self._said = math.inf if transport.rank else self._said
        self.on_rank(transport)
        sys.stdout.write(f"{_MARK}{json.dumps(self.report.as_json())}\n")
        sys.stdout.flush()
        if any(transport.gather(bool(self.report.failures))):
            time.sleep(1)  # all have heard of it
            os._exit(0)  # they may be apart for good
        transport.close()


# -- cases by their numbers -------------------------------------------------------------------------------------------


def numbered(unit: str, cases: int) -> tuple[Option, ...]:
    """Return the options of an attack whose cases have numbers; ``unit``: what they are called."""
    first = ("first", 0, "the number of the first")
    return (unit, cases, "how many"), first, ("jobs", os.cpu_count() or 1, "processes; 0: none but this")


SANITIZED = "sanitized", "", "with AddressSanitizer and UndefinedBehaviorSanitizer, built in this folder if it is empty"


class Numbered(Attack):
    """An attack whose cases have numbers. Processes share them: one that crashes costs a part, and is reported.

    Attributes:
        unit: what cases are called: the option that says how many.
        chunk: how many a process checks; with sanitizers a quarter.
    """

    unit: str
    chunk: int

    def check(self, number: int) -> None:
        """Check a case; raise what should not be."""
        raise NotImplementedError

    def run(self) -> None:
        """Check all cases: in this process, or in others by the command that a person would type for a part of them."""
        folder = getattr(self.given, "sanitized", "")
        if not self.given.jobs and not (folder and not sanitizers.within()):
            self._check_all()
        elif not folder:
            self._share(ROOT, {}, self.chunk)
        else:
            root = Path(folder).resolve()
            if sanitizers.build(root):
                self._share(root, sanitizers.environment(), self.chunk // 4)
            else:
                self.fail("the sanitizers do not see a write behind the end of an array")

    def _check_all(self) -> None:
        watched = -1.0
        for number in range(self.given.first, self.given.first + getattr(self.given, self.unit)):
            began = time.monotonic()
            if began > watched + 1:  # a thread is started
                watched = began
                faulthandler.dump_traceback_later(_HANGS, exit=True)
            try:
                self.check(number)
            except Exception as error:
                what = str(error).strip() or repr(error)
                self.fail(f"{type(error).__name__}: {what}", **{"first": number, self.unit: 1, "jobs": 0})
            self.report.measure(f"s, the slowest of the {self.unit}", time.monotonic() - began)
        faulthandler.cancel_dump_traceback_later()

    def _share(self, root: Path, environment: dict[str, str], chunk: int) -> None:
        first, cases = self.given.first, getattr(self.given, self.unit)
        done, environment = 0, os.environ | {"PYTHONPATH": str(root)} | environment

        def start(begin: int) -> tuple[dict[str, Any], Path, str, str]:
            part = {"first": begin, self.unit: min(chunk, first + cases - begin), "jobs": 0}
            made = Path(folder, f"{begin}.json")
            command = [sys.executable, "-m", "tests.stress", *self.words(**part), "--report", str(made)]
            with Path(folder, f"{begin}.log").open("w+", errors="replace") as said:
                try:
                    ran = subprocess.run(
                        command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=said, timeout=_LIMIT
                    )
                    how = f"ended with status {ran.returncode}"
                except subprocess.TimeoutExpired:
                    how = f"did not end in {_LIMIT:g} s"
                said.seek(0)
                return part, made, how, said.read()

        with tempfile.TemporaryDirectory(prefix="sparsecomm-stress-") as folder:
            pool = ThreadPoolExecutor(max(1, self.given.jobs))
            try:
                started: list[Future[Any]] = [pool.submit(start, n) for n in range(first, first + cases, chunk)]
                for each in as_completed(started):
                    part, made, how, said = each.result()
                    if made.exists():
                        sys.stderr.write(said)
                        self.report.add(json.loads(made.read_text()))
                    else:
                        self.fail(f"a process {how} and made no report. It said: {said[-4000:]}", **part)
                    done += part[self.unit]
                    self.progress(f"{done:,} of {cases:,} {self.unit}, {done / self.report.seconds:,.0f}/s")
            finally:
                pool.shutdown(cancel_futures=True)
        self.report.measure(f"{self.unit}/s", cases / self.report.seconds)
