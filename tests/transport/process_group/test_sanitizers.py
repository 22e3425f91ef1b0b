"""The connections under AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import sparsecomm
from tests.processes import LIMIT

HERE = Path(__file__).parent
SOURCES = Path(sparsecomm.__file__).parent / "transport" / "process_group"
COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_connections_are_clean_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / "check_connections"
    sources = [HERE / "check_connections.cpp", *sorted(file for file in SOURCES.glob("*.cpp") if file.name[0] != "_")]
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", "-fno-omit-frame-pointer", f"-I{SOURCES}"]
    sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    subprocess.run([COMPILER, *flags, *sanitize, *map(str, sources), "-o", str(program)], check=True)
    environ = os.environ | {"TSAN_OPTIONS": "report_thread_leaks=0"}  # forks have none of the threads
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=LIMIT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "passed\n"
    assert done.stderr == ""
