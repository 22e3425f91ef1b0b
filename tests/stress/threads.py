"""Threads: the kernels' pool and scratch memory under ThreadSanitizer, forks beside them, and Python's threads.

First a C++ program, `check_threads.cpp`, uses the pool and the scratch memory from several threads at once, built with
ThreadSanitizer. The same program, built without it, forks meanwhile; children must work, too. Then several threads of
this process make calls, each on communicators of its own, and some on one that they share.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.processes import ROOT
from tests.stress.harness import Attack
from tests.stress.sanitizers import COMPILER, compile_all

_FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread"]
_SHARED = ("pool", "buffer")  # the kernels' files that threads share state in
_LIMIT = 3600  # seconds
_KERNELS = ROOT / "kernels" / "cpu"


def _build(folder: Path, pool_only: bool, *sanitize: str) -> Path:
    """Return the program."""
    folder.mkdir()
    kernels = [_KERNELS / f"{name}.cpp" for name in _SHARED] if pool_only else sorted(_KERNELS.glob("*.cpp"))
    flags = [COMPILER, *_FLAGS, *sanitize, f"-I{_KERNELS}", *([] if pool_only else ["-DKERNELS"])]
    objects = {str(s): str(folder / f"{s.stem}.o") for s in (Path(__file__).with_name("check_threads.cpp"), *kernels)}
    compile_all([[*flags, "-c", source, "-o", made] for source, made in objects.items()], folder)
    compile_all([[*flags, *objects.values(), "-o", "check_threads"]], folder)
    return folder / "check_threads"


class Threads(Attack):
    options = (
        ("calls", 20_000, "of each thread"),
        ("forks", 200, ""),
        ("pool_only", False, "build the pool and scratch memory, and no kernels"),
    )

    def run(self) -> None:
        """Build the program, and run it and Python's threads."""
        calls, forks = self.given.calls, self.given.forks
        few = max(1, calls // 20)
        self._python_threads(few)
        if shutil.which(COMPILER) is None:
            self.fail(f"no C++ compiler {COMPILER!r}")
            return
        with tempfile.TemporaryDirectory(prefix="sparsecomm-threads-") as folder:
            sanitized = _build(Path(folder) / "sanitized", self.given.pool_only, "-fsanitize=thread")
            self._run_program(sanitized, "under ThreadSanitizer", few, 0)
            self._run_program(_build(Path(folder) / "plain", self.given.pool_only), "with forks", calls, forks)

    def _run_program(self, program: Path, what: str, calls: int, forks: int) -> None:
        command = [str(program), "4", str(calls), str(forks), str(self.report.seed)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            self.fail(f"{what}: no end after {_LIMIT} s")
            return
        self.counts[f"calls in C++ threads {what}"] += 4 * calls
        self.counts["forks beside them"] += forks
        if done.returncode != 0 or "WARNING" in done.stderr:
            self.fail(f"{what}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    def _python_threads(self, calls: int) -> None:
        """Make calls from four threads, on communicators of one rank each and on one that all share."""
        gradients = np.random.default_rng(self.report.seed).standard_normal((4, 300_000)).astype(np.float32)
        (shared,) = [result.value for result in simulated.run(1, lambda transport: transport)]
        expected = [sc.topk(x, 100) for x in gradients]
        wrong: list[str] = []

        def work(number: int) -> None:
            x, residual = gradients[number], np.zeros(gradients.shape[1], np.float32)
            (own,) = [result.value for result in simulated.run(1, lambda transport: transport)]
            for call in range(calls):
                residual[:] = 0
                result = sc.sparse_allreduce(x, 100, comm=own if call % 2 else shared, residual=residual)
                if not np.array_equal(result.indices, expected[number].indices):
                    wrong.append(f"thread {number}, call {call}: another result")
                if not np.array_equal(result.to_dense() + residual, x):
                    wrong.append(f"thread {number}, call {call}: gradient was lost")

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT)
            if thread.is_alive():
                self.fail("Python's threads: no end")
                return
        self.counts["calls in Python threads"] += 4 * calls
        for each in wrong[:10]:
            self.fail(f"Python's threads: {each}")
