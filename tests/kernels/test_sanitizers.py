"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import LIMIT

HERE = Path(__file__).parent
KERNELS = HERE.parent.parent / "kernels" / "cpu"
COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}")
def test_kernels_are_clean_under_sanitizers(tmp_path: Path) -> None:
    flags = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fno-omit-frame-pointer", "-pthread"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(HERE / "check_kernels.cpp"), *map(str, sorted(KERNELS.glob("*.cpp")))]
    objects = [str(tmp_path / f"{i}.o") for i in range(len(sources))]
    compiling = [
        subprocess.Popen([COMPILER, *flags, *sanitize, f"-I{KERNELS}", "-c", source, "-o", made])
        for source, made in zip(sources, objects, strict=True)
    ]
    assert all(process.wait() == 0 for process in compiling)
    program = str(tmp_path / "check_kernels")
    subprocess.run([COMPILER, *sanitize, *objects, "-o", program, "-pthread"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "portable" in done.stdout
    assert "passed" in done.stdout
