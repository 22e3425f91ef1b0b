"""The CUDA kernels compile with NVRTC for all supported architectures, and with nvcc. Neither needs a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsecomm.backends.cuda.modules import (
    OPTIONS,
    SOURCES,
    TUNING,
    bucket_definitions,
    dense_definitions,
    merge_definitions,
    packed_definitions,
    patch_definitions,
    selection_definitions,
    structure_definitions,
)
from sparsecomm.tensors.dtypes import DTYPES, FLOAT32, FLOAT64
from sparsecomm.tensors.kinds import EXACT, KINDS
from tests.thinning import one_in


def variants() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the file and the type definitions of every module that the library may compile."""
    for int64_indices in (False, True):
        for x in DTYPES.values():
            residuals = [None, x, FLOAT32] if x.itemsize == 2 else [None, x]
            for residual in residuals:
                for file in ("topk.cu", "radix.cu", "threshold.cu", "chunks.cu", "warp_chunks.cu"):
                    yield file, selection_definitions(x, residual, int64_indices)
            for residual in residuals[1:]:
                yield "dense.cu", dense_definitions(x, residual, int64_indices)
        for float64_values in (False, True):
            yield "merge.cu", merge_definitions(float64_values, int64_indices)
            yield "bucket.cu", bucket_definitions((FLOAT64 if float64_values else FLOAT32).accumulator, int64_indices)
            for kind in (EXACT,) if float64_values else KINDS:
                yield "packed.cu", packed_definitions(kind, float64_values, int64_indices)
    for itemsize in (1, 2, 4, 8):
        yield "patches.cu", patch_definitions(itemsize)


FOLDER = SOURCES / "cuda"
FILES = sorted(path.name for path in FOLDER.glob("*.cu"))
ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
EVERY = sorted(variants())
COMMON = [*OPTIONS, f"-I{FOLDER}", f"-I{SOURCES}"]
COMMON += [f"-D{definition}" for definition in TUNING.definitions + structure_definitions(TUNING)]

# Threads that must fit on a multiprocessor to hide latency: with 65,536 registers, this bounds registers per thread.
RESIDENT = {"sample": 768, "filter": 512, "threshold": 512, "emit": 768, "radix": 768, "merge": 768}
RESIDENT |= {"chunks": 768, "warp_chunks": 512, "unpack": 1280, "adamw": 1280, "add_addends": 1024}
RESIDENT |= {"compare": 1024, "list_changes": 1280}
RESIDENT_OTHERS = 1536
NVCC = shutil.which("nvcc") is not None


def some(file: str, architecture: int) -> tuple[str, ...]:
    """Return one variant of the file, chosen by the architecture."""
    of_file = [definitions for name, definitions in EVERY if name == file]
    return of_file[ARCHITECTURES.index(architecture) * 3 % len(of_file)]


COMPILED_BY_NVCC = [
    (*variant, 90) for i, variant in enumerate(EVERY) if "INDEX=long long" not in variant[1] or i % 3 == 0
]
CASES = [(*variant, 90) for variant in EVERY if not NVCC or (*variant, 90) not in COMPILED_BY_NVCC]
CASES += [(file, some(file, architecture), architecture) for architecture in ARCHITECTURES for file in FILES]


def named(case: tuple[str, tuple[str, ...], int]) -> str:
    file, definitions, architecture = case
    words = [definition.split("=")[1].removeprefix("sparsecomm::") for definition in definitions]
    return f"{file}-{'-'.join(words)}-sm_{architecture}"


def sample(cases: list[tuple[str, tuple[str, ...], int]]) -> list[Any]:
    """Return the cases as parameters; `make test` runs every sixth: all files, and all architectures."""
    return [pytest.param(*case, id=named(case), marks=one_in(6, number)) for number, case in enumerate(cases)]


def test_every_file_has_variants() -> None:
    assert {file for file, _ in EVERY} == set(FILES)
    assert len(EVERY) == len(set(EVERY))


@pytest.mark.parametrize(("file", "definitions", "architecture"), sample(CASES))
def test_nvrtc_compiles(file: str, definitions: tuple[str, ...], architecture: int) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    source = (FOLDER / file).read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], [])
    assert not int(status)
    options = [*COMMON, *(f"-D{d}" for d in definitions), f"-arch=sm_{architecture}", "-Werror=all-warnings"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, length = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(length + 1)  # 2 bytes or more: NVRTC writes to it, and Python shares objects of one byte
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not int(status), log.decode()
    assert "error" not in log.decode()
    assert nvrtc.nvrtcGetCUBINSize(program)[1] > 1000
    _, length = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(length)
    nvrtc.nvrtcGetPTX(program, ptx)
    assert b".entry" in ptx
    assert b".ftz" not in ptx  # it would make subnormal floats zero


@pytest.mark.skipif(not NVCC, reason="no nvcc")
@pytest.mark.parametrize(("file", "definitions", "architecture"), sample(COMPILED_BY_NVCC))
def test_nvcc_finds_no_spills_and_registers_within_budget(
    file: str, definitions: tuple[str, ...], architecture: int, tmp_path: Path
) -> None:
    command = ["nvcc", f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", *COMMON, "-o", str(tmp_path / "cubin")]
    defined = [f"-D{d}" for d in definitions]
    done = subprocess.run([*command, *defined, str(FOLDER / file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = resources(done.stderr)
    assert kernels
    for kernel, (registers, spilled, shared) in kernels.items():
        resident = RESIDENT.get(kernel, RESIDENT_OTHERS)
        if kernel == "radix" and "INDEX=long long" in definitions:
            resident = 640  # for 2^31 elements or more it runs only after a misleading sample
        budget = 65536 // resident
        assert not spilled, f"{kernel} {definitions} spills {spilled} bytes"
        assert registers <= budget, f"{kernel} {definitions}: {registers} registers, budget {budget}"
        assert shared <= 48 << 10, f"{kernel} {definitions}: {shared} bytes of shared memory"


def resources(said: str) -> dict[str, tuple[int, int, int]]:
    """Return registers, spilled bytes and shared memory by kernel, from the output of ptxas."""
    kernels = {}
    for part in re.split(r"Compiling entry function '", said)[1:]:
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert registers is not None
        kernels[part.split("'")[0]] = int(registers[1]), spilled, int(shared[1]) if shared else 0
    return kernels
