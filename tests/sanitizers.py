"""AddressSanitizer and UndefinedBehaviorSanitizer for tests and attacks.

Kernels, and extension modules that read foreign data, are built with both sanitizers into a copy of the library. Tests
run there, with all of Python's memory from malloc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.processes import ROOT

COMPILER = os.environ.get("CXX", "g++")
_MODULES = {"sparsecomm/backends/_cpu": ("cpp", ["--cplus"]), "sparsecomm/tensors/_dlpack": ("c", [])}
_FLAGS = ["-O0", "-g", "-fPIC", "-pthread", "-fno-omit-frame-pointer", "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION"]
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# No checks of stacks, since greenlets of simulated ranks copy them.
_NO_RED_ZONES = ["-mllvm", "-asan-stack=0"] if "clang" in COMPILER else ["--param", "asan-stack=0"]


def compile_all(commands: Iterable[Sequence[str]], folder: Path) -> None:
    """Run compilers in parallel, one per core; raise a CalledProcessError if one fails."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, cwd=folder, check=True), commands))


def within() -> bool:
    return "ASAN_OPTIONS" in os.environ


def build(root: Path) -> bool:
    """Copy the checkout to ``root`` and build modules with sanitizers there, unless they exist.

    Return whether the sanitizers notice a write behind the end of an array.
    """
    if not (root / "tests").exists():
        _build(root)
    environ = {**os.environ, **environment(), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", _PLANTED], cwd=root, env=environ, capture_output=True, text=True)
    return done.returncode != 0 and "heap-buffer-overflow" in done.stderr


def _build(root: Path) -> None:
    built = shutil.ignore_patterns("__pycache__", "_kernels")
    shutil.copytree(ROOT / "sparsecomm", root / "sparsecomm", ignore=built, symlinks=True)
    shutil.copytree(ROOT / "kernels", root / "kernels")
    (root / "sparsecomm" / "_kernels").symlink_to("../kernels")
    shutil.copytree(ROOT / "tests", root / "tests", ignore=built)
    cython = [sys.executable, "-m", "cython", "-3", "-X", "boundscheck=False", "-X", "wraparound=False"]  # as setup.py
    compile_all([[*cython, f"{m}.pyx", "-o", f"{m}.{kind}", *plus] for m, (kind, plus) in _MODULES.items()], root)
    flags = [*_FLAGS, *_SANITIZE, f"-I{sysconfig.get_paths()['include']}", f"-I{np.get_include()}", "-Ikernels/cpu"]
    language = {"c": ["-x", "c"], "cpp": ["-std=c++17", "-ffp-contract=off", "-fno-math-errno"]}
    kernels = [str(file.relative_to(root)) for file in sorted((root / "kernels" / "cpu").glob("*.cpp"))]
    sources = [*kernels, *(f"{module}.{kind}" for module, (kind, _) in _MODULES.items())]
    flags_of = {s: language[s.rpartition(".")[2]] + flags + _NO_RED_ZONES * (s not in kernels) for s in sources}
    compile_all([[COMPILER, *flags_of[s], "-c", s, "-o", f"{s}.o"] for s in sources], root)
    for module, (kind, _) in _MODULES.items():
        objects = [f"{module}.{kind}.o", *(f"{s}.o" for s in kernels if kind == "cpp")]
        target = f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}"
        compile_all([[COMPILER, "-shared", "-pthread", *_SANITIZE, *objects, "-o", target]], root)


def environment() -> dict[str, str]:
    """Return the environment variables for processes that load the modules."""

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
