"""Threads: the kernels' pool and scratch memory under ThreadSanitizer, forks beside them, and Python's threads.

First a C++ program, `check_threads.cpp`, uses the pool and the scratch memory from several threads at once, built with
ThreadSanitizer. The same program, built without it, forks meanwhile; children must work, too. Then several threads of
this process make calls, each on communicators of its own, and some on one that they share.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.processes import ROOT
from tests.stress.report import Report
from tests.stress.sanitized import COMPILER, compile_all

__all__ = ["HELP", "add_arguments", "run"]

HELP = "ThreadSanitizer over the kernels' pool, forks, and threads with communicators of their own"

_FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread"]
_SHARED = ("pool", "buffer", "fork")  # the kernels' files that threads share state in
_LIMIT = 3600  # seconds
_KERNELS = ROOT / "kernels" / "cpu"


def _build(folder: Path, jobs: int, pool_only: bool, *sanitize: str) -> Path:
    """Return the program."""
    folder.mkdir()
    kernels = [_KERNELS / f"{name}.cpp" for name in _SHARED] if pool_only else sorted(_KERNELS.glob("*.cpp"))
    sources = [Path(__file__).with_name("check_threads.cpp"), *kernels]
    flags = [*_FLAGS, *sanitize, f"-I{_KERNELS}", *([] if pool_only else ["-DKERNELS"])]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    compile_all(
        [[COMPILER, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)], jobs, folder
    )
    program = folder / "check_threads"
    subprocess.run([COMPILER, *_FLAGS, *sanitize, *objects, "-o", str(program)], check=True)
    return program


def _run_program(report: Report, program: Path, what: str, calls: int, forks: int, repeat: str) -> None:
    command = [str(program), "4", str(calls), str(forks), str(report.seed)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        report.fail(f"{what}: no end after {_LIMIT} s", repeat)
        return
    report.counts[f"calls in C++ threads {what}"] += 4 * calls
    report.counts["forks beside them"] += forks
    if done.returncode != 0 or "WARNING" in done.stderr:
        report.fail(f"{what}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}", repeat)


def _python_threads(report: Report, calls: int, repeat: str) -> None:
    """Make calls from four threads, on communicators of one rank each and on one that all share."""
    gradients = np.random.default_rng(report.seed).standard_normal((4, 300_000)).astype(np.float32)
    (shared,) = [result.value for result in simulated.run(1, lambda ranks: ranks)]
    expected = [sc.topk(x, 100) for x in gradients]
    wrong: list[str] = []

    def work(number: int) -> None:
        x, residual = gradients[number], np.zeros(gradients.shape[1], np.float32)
        (own,) = [result.value for result in simulated.run(1, lambda ranks: ranks)]
        for call in range(calls):
            residual[:] = 0
            result = sc.sparse_allreduce(x, 100, comm=own if call % 2 else shared, residual=residual)
            if not np.array_equal(result.indices, expected[number].indices):
                wrong.append(f"thread {number}, call {call}: another result")
            if not np.array_equal(result.to_dense() + residual, x):
                wrong.append(f"thread {number}, call {call}: gradient was lost")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT)
        if thread.is_alive():
            report.fail("Python's threads: no end", repeat)
            return
    report.counts["calls in Python threads"] += 4 * calls
    for each in wrong[:10]:
        report.fail(f"Python's threads: {each}", repeat)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--calls", type=int, default=20_000, help="of each thread (%(default)s)")
    parser.add_argument("--forks", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--pool-only", action="store_true", help="build the pool and scratch memory, and no kernels")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time (%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Build the program, and run it and Python's threads."""
    calls, forks = arguments.calls, arguments.forks
    repeat = f"-m tests.stress threads --seed {report.seed} --calls {calls} --forks {forks}"
    repeat += " --pool-only" * arguments.pool_only
    _python_threads(report, max(1, calls // 20), repeat)
    if shutil.which(COMPILER) is None:
        report.fail(f"no C++ compiler {COMPILER!r}", repeat)
        return
    with tempfile.TemporaryDirectory(prefix="sparsecomm-threads-") as folder:
        of = arguments.jobs, arguments.pool_only
        sanitized = _build(Path(folder) / "sanitized", *of, "-fsanitize=thread")
        _run_program(report, sanitized, "under ThreadSanitizer", max(1, calls // 20), 0, repeat)
        _run_program(report, _build(Path(folder) / "plain", *of), "with forks", calls, forks, repeat)
