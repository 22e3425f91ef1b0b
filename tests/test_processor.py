"""On a processor that lacks required instructions, the import raises an error instead of ending with SIGILL."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.processes import LIMIT

SOURCE = Path(__file__).parents[1] / "sparsecomm" / "processor" / "_features.c"
QEMU = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
IMPORT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("sparsecomm.processor._features", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
import sparsecomm.processor
"""

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="there are no levels of other architectures")


@pytest.fixture(scope="module")
def compiled_for_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = tmp_path_factory.mktemp("processor") / "_features.so"
    include = sysconfig.get_path("include")
    flags = ["-O3", "-march=x86-64-v2", "-fPIC", "-shared", f"-I{include}"]
    subprocess.run(["cc", *flags, "-o", str(module), str(SOURCE)], check=True)
    return module


def imports(module: Path, *emulator: str) -> subprocess.CompletedProcess[str]:
    """Import `sparsecomm.processor`, with ``module`` for its compiled part."""
    command = [*emulator, sys.executable, "-c", IMPORT, str(module)]
    # NumPy's OpenBLAS would use instructions that the emulated processor lacks.
    env = os.environ | {"OPENBLAS_CORETYPE": "Nehalem"} if emulator else None
    return subprocess.run(command, cwd=SOURCE.parents[2], env=env, capture_output=True, text=True, timeout=LIMIT)


@x86_64
@pytest.mark.skipif(QEMU is None, reason="needs qemu-user")
@pytest.mark.parametrize(
    ("processor", "lacks"),
    [
        ("Opteron_G1", "SSSE3, SSE4.1, SSE4.2, POPCNT"),
        ("core2duo", "SSE4.1, SSE4.2, POPCNT"),
        ("Penryn", "SSE4.2, POPCNT"),
    ],
)
def test_below_v2(compiled_for_v2: Path, processor: str, lacks: str) -> None:
    run = imports(compiled_for_v2, str(QEMU), "-cpu", processor)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: this build of sparsecomm needs a processor with {lacks}, which the ")
    assert "pip install --force-reinstall --no-deps FOLDER" in last


@x86_64
@pytest.mark.skipif(QEMU is None, reason="needs qemu-user")
@pytest.mark.parametrize("processor", ["Nehalem", "max"])
def test_v2(compiled_for_v2: Path, processor: str) -> None:
    run = imports(compiled_for_v2, str(QEMU), "-cpu", processor)
    assert (run.returncode, run.stderr) == (0, "")


@x86_64
def test_the_check_uses_no_such_instructions(compiled_for_v2: Path) -> None:
    code = subprocess.run(["objdump", "-d", str(compiled_for_v2)], check=True, capture_output=True, text=True).stdout
    assert "cpuid" in code
    assert "xmm" not in code
    assert "popcnt" not in code
