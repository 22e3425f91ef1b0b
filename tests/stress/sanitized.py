"""Another attack under AddressSanitizer and UndefinedBehaviorSanitizer.

The extension modules that read what others wrote, and the kernels, are built with both sanitizers in a folder of their
own, beside a copy of the rest of the library. The attack then runs there, with all memory of Python from malloc. An
access out of bounds, undefined behaviour or an allocation of more than 256 MiB ends its process, and is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.processes import ROOT
from tests.stress.chunks import run_chunks
from tests.stress.report import Report

__all__ = ["COMPILER", "HELP", "SANITIZED", "add_arguments", "compile_all", "run"]

HELP = "another attack under AddressSanitizer and UndefinedBehaviorSanitizer"

COMPILER = os.environ.get("CXX", "g++")
SANITIZED = {"messages": 100_000, "inputs": 4000, "calls": 500}  # what can run, and cases per process
_MODULES = {"sparsecomm/backends/_cpu": "cpp", "sparsecomm/tensors/_dlpack": "c"}
_FLAGS = ["-O0", "-g", "-fPIC", "-pthread", "-fno-omit-frame-pointer", "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION"]
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compile_all(commands: Sequence[Sequence[str]], jobs: int, folder: Path) -> None:
    """Run compilers, some at a time.

    Raises:
        subprocess.CalledProcessError: one failed.
    """
    waiting, running = list(commands), []
    while waiting or running:
        while waiting and len(running) < jobs:
            command = waiting.pop()
            running.append((command, subprocess.Popen(command, cwd=folder)))
        command, process = running.pop(0)
        if process.wait() != 0:
            for _, other in running:
                other.wait()
            raise subprocess.CalledProcessError(process.returncode, command)


def _build(root: Path, jobs: int) -> None:
    """Make a copy of the checkout in ``root``, in which the modules have sanitizers."""
    built = shutil.ignore_patterns("__pycache__", "_kernels")
    shutil.copytree(ROOT / "sparsecomm", root / "sparsecomm", ignore=built, symlinks=True)
    shutil.copytree(ROOT / "kernels", root / "kernels")
    (root / "sparsecomm" / "_kernels").symlink_to("../kernels")
    shutil.copytree(ROOT / "tests", root / "tests", ignore=built)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    include = [f"-I{sysconfig.get_paths()['include']}", f"-I{np.get_include()}", "-Ikernels/cpu"]
    directives = ["-X", "boundscheck=False", "-X", "wraparound=False"]  # as in setup.py
    cython = [sys.executable, "-m", "cython", "-3", *directives]
    plus = {"cpp": ["--cplus"], "c": []}
    compile_all([[*cython, *plus[k], f"{m}.pyx", "-o", f"{m}.{k}"] for m, k in _MODULES.items()], jobs, root)
    flags = [*_FLAGS, *_SANITIZE, *include]
    sources = [f"{module}.{kind}" for module, kind in _MODULES.items()]
    kernels = [str(file.relative_to(root)) for file in sorted((root / "kernels" / "cpu").glob("*.cpp"))]
    language = {".c": ["-x", "c"], ".cpp": ["-std=c++17", "-ffp-contract=off", "-fno-math-errno"]}
    compile_all(
        [[COMPILER, *language[Path(s).suffix], *flags, "-c", s, "-o", f"{s}.o"] for s in (*kernels, *sources)],
        jobs,
        root,
    )
    for module, kind in _MODULES.items():
        objects = [f"{module}.{kind}.o", *(f"{s}.o" for s in kernels if kind == "cpp")]
        link = [COMPILER, "-shared", "-pthread", *_SANITIZE, *objects, "-o", f"{module}{suffix}"]
        subprocess.run(link, cwd=root, check=True)


def _environment() -> dict[str, str]:
    """Return what a process needs to load the modules."""

    def library(name: str) -> str:
        return subprocess.run([COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout

    return {
        "LD_PRELOAD": " ".join(map(str.strip, (library("libasan.so"), library("libstdc++.so.6")))),
        "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=256",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


_PLANTED = """
import numpy as np
from sparsecomm import SparseVector
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors import interop
memory = interop.tensor(np.zeros(100, np.float32), "x")
CpuBackend(1).scatter_add(memory, SparseVector([101], np.ones(1, np.float32), 200))
"""


def _sees_a_planted_error(root: Path) -> bool:
    """Return whether the sanitizers are there: a write behind the end of an array must end its process."""
    environment = {**os.environ, **_environment(), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", _PLANTED], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode != 0 and "heap-buffer-overflow" in done.stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("which", choices=SANITIZED, help="the attack")
    parser.add_argument("--cases", type=int, default=10_000, help="messages, inputs or calls (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (%(default)s)")
    parser.add_argument("--build", type=Path, help="a folder with what was built, or for it (a new one each time)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Build the modules, and run the attack on them."""
    with tempfile.TemporaryDirectory(prefix="sparsecomm-sanitized-") as folder:
        root = arguments.build or Path(folder) / "build"
        if not (root / "tests").exists():
            _build(root, arguments.jobs)
        report.figures["s, to build the modules with sanitizers"] = report.seconds
        if not _sees_a_planted_error(root):
            report.fail(
                "the sanitizers do not see a write behind the end of an array", "-m tests.stress sanitized calls"
            )
            return
        which, chunk = arguments.which, SANITIZED[arguments.which]
        run_chunks(
            report,
            [which],
            which,
            arguments.cases,
            chunk,
            arguments.jobs,
            first=arguments.first,
            environment=_environment(),
            root=root,
        )
    report.failures = [replace(each, repeat=_sanitized(each.repeat, which)) for each in report.failures]


def _sanitized(repeat: str, which: str) -> str:
    """Return the command that repeats a failure under sanitizers, where it was found."""
    plain = repeat.replace(f"tests.stress {which} ", f"tests.stress sanitized {which} ")
    return plain.replace(f" --{which} ", " --cases ").replace(" --jobs 0", " --jobs 1")
