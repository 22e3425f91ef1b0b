"""Many cases, by their numbers: in processes of their own, so that a crash costs a part of them and is reported."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT
from tests.stress.report import Report

__all__ = ["add_case_options", "check_each", "command_line", "run_cases", "run_chunks"]

_PROGRESS = 30.0  # seconds between lines that say how far it is
_SHOWN = 4000  # characters of what a process said before it failed


def command_line(*words: object) -> list[str]:
    """Return the command that runs ``python -m tests.stress`` with these words."""
    return [sys.executable, "-m", "tests.stress", *map(str, words)]


def add_case_options(parser: argparse.ArgumentParser, unit: str, cases: int) -> None:
    """Declare the options of an attack whose cases have numbers."""
    parser.add_argument(f"--{unit}", dest="cases", type=int, default=cases, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; 0: none but this (%(default)s)")


def run_cases(
    report: Report, arguments: argparse.Namespace, unit: str, chunk: int, attack: Callable[[], None], *words: object
) -> None:
    """Run the cases that were asked for: ``attack()`` in this process, or the same command in others."""
    if not arguments.jobs:
        attack()
        return
    command = [report.attack, *words]
    run_chunks(report, command, unit, arguments.cases, chunk, arguments.jobs, first=arguments.first)
    report.figures[f"{unit}/s"] = arguments.cases / report.seconds


def check_each(
    report: Report, arguments: argparse.Namespace, unit: str, check: Callable[[int], None], options: str = ""
) -> None:
    """Check cases; what one of them raises is a failure, whose command runs that case alone, with ``options``."""
    for number in range(arguments.first, arguments.first + arguments.cases):
        try:
            check(number)
        except Exception as error:  # noqa: PERF203
            repeat = f"-m tests.stress {report.attack} --seed {report.seed} --first {number} --{unit} 1 --jobs 0"
            what = str(error).strip() or repr(error)
            report.fail(f"{type(error).__name__}: {what}", repeat + options)


@dataclass
class _Chunk:
    first: int
    cases: int
    command: list[str]
    process: subprocess.Popen[bytes]
    report: Path
    output: Path
    deadline: float


def run_chunks(
    report: Report,
    words: Sequence[object],
    unit: str,
    cases: int,
    chunk: int,
    jobs: int,
    *,
    first: int = 0,
    environment: Mapping[str, str] | None = None,
    root: Path = ROOT,
    limit: float = 600.0,
) -> None:
    """Run cases ``first`` to ``first + cases`` of an attack, ``chunk`` of them per process and ``jobs`` at a time.

    Each process is the command that a person would type to run these cases, and its report is added to ``report``.
    One that ends in another way than with a report, or not within ``limit`` seconds, is a failure.

    Args:
        words: of the command, without seed and numbers.
        unit: the option that says how many cases, without dashes; it also names them.
        environment: variables besides this process's.
        root: the folder in which ``tests`` and ``sparsecomm`` are.
    """
    with tempfile.TemporaryDirectory(prefix="sparsecomm-stress-") as folder:
        waiting = _chunks(report, words, unit, first, first + cases, chunk, Path(folder), environment, root, limit)
        running: list[_Chunk] = []
        done, said = 0, time.monotonic()
        more = True
        while more or running:
            while more and len(running) < jobs:
                started = next(waiting, None)
                more = started is not None
                running += [started] if started is not None else []
            time.sleep(0.01)
            for each in list(running):
                if each.process.poll() is None and time.monotonic() < each.deadline:
                    continue
                _take(report, each)
                running.remove(each)
                done += each.cases
            if time.monotonic() - said > _PROGRESS:
                said = time.monotonic()
                print(f"{done:,} of {cases:,} {unit}, {done / report.seconds:,.0f}/s", file=sys.stderr, flush=True)


def _chunks(
    report: Report,
    words: Sequence[object],
    unit: str,
    first: int,
    end: int,
    chunk: int,
    folder: Path,
    environment: Mapping[str, str] | None,
    root: Path,
    limit: float,
) -> Iterator[_Chunk]:
    for begin in range(first, end, chunk):
        cases = min(chunk, end - begin)
        numbers = ["--seed", report.seed, "--first", begin, f"--{unit}", cases, "--jobs", 0]
        made, said = folder / f"{begin}.json", folder / f"{begin}.log"
        command = command_line(*words, *numbers)
        with said.open("wb") as to:
            process = subprocess.Popen(
                [*command, "--report", str(made)],
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root), **(environment or {})},
                stdout=subprocess.DEVNULL,
                stderr=to,
            )
        yield _Chunk(begin, cases, command, process, made, said, time.monotonic() + limit)


def _take(report: Report, chunk: _Chunk) -> None:
    status = chunk.process.poll()
    if status is None:
        chunk.process.kill()
        chunk.process.wait()
    said = chunk.output.read_text(errors="replace")
    if chunk.report.exists():
        sys.stderr.write(said)
        report.add(chunk.report)
        return
    how = "did not end in time" if status is None else f"ended with status {status}"
    report.fail(f"a process {how} and made no report. It said: {said[-_SHOWN:]}", shlex.join(chunk.command[1:]))
