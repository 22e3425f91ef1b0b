"""CPU kernels built with AddressSanitizer and UndefinedBehaviorSanitizer, and with ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sanitizers
from tests.processes import LIMIT, ROOT

FILES = [f"tests/backends/test_{name}.py" for name in ("adamw", "cpu", "entries", "packed")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which(sanitizers.COMPILER) is None, reason=f"no C++ compiler {sanitizers.COMPILER!r}"),
]


def test_kernels_are_clean_under_sanitizers(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert sanitizers.build(root), "the sanitizers do not see a write behind the end of an array"
    environment = os.environ | sanitizers.environment() | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-k", "(portable or avx) and not cuda", *FILES]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_threads_and_forks_share_the_pool_and_scratch_memory(tmp_path: Path) -> None:
    kernels = ROOT / "kernels" / "cpu"
    flags = [sanitizers.COMPILER, "-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", "-fsanitize=thread"]
    sources = [Path(__file__).with_name("check_threads.cpp"), *sorted(kernels.glob("*.cpp"))]
    objects = [str(tmp_path / f"{source.stem}.o") for source in sources]
    compiled = [[*flags, f"-I{kernels}", "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
    sanitizers.compile_all(compiled, tmp_path)
    sanitizers.compile_all([[*flags, *objects, "-o", "check_threads"]], tmp_path)
    for calls, forks in ((50, 0), (200, 20)):
        command = [str(tmp_path / "check_threads"), "4", str(calls), str(forks), "1"]
        environ = os.environ | {"TSAN_OPTIONS": "die_after_fork=0"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert "WARNING" not in done.stderr, done.stderr[-4000:]
