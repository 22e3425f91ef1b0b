"""The tests of backends with CPU kernels built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT
from tests.stress import sanitizers

FILES = [f"tests/backends/test_{name}.py" for name in ("adamw", "cpu", "entries", "packed")]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which(sanitizers.COMPILER) is None, reason=f"no C++ compiler {sanitizers.COMPILER!r}")
def test_kernels_are_clean_under_sanitizers(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert sanitizers.build(root), "the sanitizers do not see a write behind the end of an array"
    environment = os.environ | sanitizers.environment() | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-k", "(portable or avx) and not cuda", *FILES]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
