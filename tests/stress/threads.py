"""Threads: the kernels' pool and scratch memory under ThreadSanitizer, forks beside them, and Python's threads.

A C++ program, `check_threads.cpp`, uses the pool and scratch memory from several threads at once, under the sanitizer
or with forks. Then threads of this process make calls on their own communicators or on a shared one.
"""

from __future__ import annotations

import faulthandler
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from sparsecomm.transport import simulated
from tests.processes import ROOT
from tests.stress.harness import Attack
from tests.stress.sanitizers import COMPILER, compile_all
from tests.threads import CALLS, at_once, calls

FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread"]
SHARED = ("pool", "buffer")  # kernel files with state shared by threads
LIMIT = 3600  # seconds
KERNELS = ROOT / "kernels" / "cpu"


def build_program(folder: Path, pool_only: bool, *sanitize: str) -> Path:
    folder.mkdir()
    kernels = [KERNELS / f"{name}.cpp" for name in SHARED] if pool_only else sorted(KERNELS.glob("*.cpp"))
    flags = [COMPILER, *FLAGS, *sanitize, f"-I{KERNELS}", *([] if pool_only else ["-DKERNELS"])]
    objects = {str(s): str(folder / f"{s.stem}.o") for s in (Path(__file__).with_name("check_threads.cpp"), *kernels)}
    compile_all([[*flags, "-c", source, "-o", target] for source, target in objects.items()], folder)
    compile_all([[*flags, *objects.values(), "-o", "check_threads"]], folder)
    return folder / "check_threads"


class Threads(Attack):
    options = (
        ("calls", 20_000, "of each thread"),
        ("forks", 200, ""),
        ("pool_only", False, "build the pool and scratch memory, and no kernels"),
    )

    def run(self) -> None:
        number, forks = self.arguments.calls, self.arguments.forks
        few = max(1, number // 20)
        self._python_threads(few)
        if shutil.which(COMPILER) is None:
            self.fail(f"no C++ compiler {COMPILER!r}")
            return
        with tempfile.TemporaryDirectory(prefix="sparsecomm-threads-") as folder:
            sanitized = build_program(Path(folder) / "sanitized", self.arguments.pool_only, "-fsanitize=thread")
            self._run_program(sanitized, "under ThreadSanitizer", few, 0)
            plain = build_program(Path(folder) / "plain", self.arguments.pool_only)
            self._run_program(plain, "with forks", number, forks)

    def _run_program(self, program: Path, what: str, number: int, forks: int) -> None:
        command = [str(program), "4", str(number), str(forks), str(self.report.seed)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.fail(f"{what}: no end after {LIMIT} s")
            return
        self.counts[f"calls in C++ threads {what}"] += 4 * number
        self.counts["forks beside them"] += forks
        if done.returncode != 0 or "WARNING" in done.stderr:
            self.fail(f"{what}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    def _python_threads(self, number: int) -> None:
        """Make calls from four threads, on their own communicators and on a shared one."""
        rounds, seeds = max(1, number // len(CALLS)), range(self.report.seed, self.report.seed + 4)
        *own, shared = (simulated.run(1, lambda transport: transport)[0].value for _ in range(5))
        expected = [calls(comm, 0, seed, rounds) for comm, seed in zip(own, seeds, strict=True)]
        for label, comms in (("own communicators", own), ("a shared communicator", [shared] * 4)):
            works = [partial(calls, comm, 0, seed, rounds) for comm, seed in zip(comms, seeds, strict=True)]
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            if at_once(works) != expected:
                self.fail(f"Python's threads on {label} get other results than one after another")
        faulthandler.cancel_dump_traceback_later()
        self.counts["calls in Python threads"] += 8 * rounds * len(CALLS)
