"""Build the wheels for aarch64, on a machine of another kind: one for each Python that is found, each for every MPI.

    python packaging/aarch64.py [--pythons python3.11 python3.12] [--to dist]

The compiler is zig's clang. The MPIs are the aarch64 wheels of PyPI; a wrapper stands for their mpicc, which does not
run here. Headers of Python and NumPy are those of this machine: they are the same for both architectures. What was
built is tried by packaging/emulated.py.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import zipfile
from pathlib import Path

import wheels
import zig

MACHINE = "aarch64"
GLIBC = "2.17"  # the oldest there is for aarch64
PLATFORMS = [f"{name}_{MACHINE}" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
WORK = wheels.WORK / MACHINE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=None, help="interpreters; by default one of each version found")
    parser.add_argument("--to", type=Path, default=wheels.ROOT / "dist", help="folder of the files (default: dist)")
    arguments = parser.parse_args()
    pythons = [wheels.environment(python) for python in arguments.pythons or wheels.found_pythons()]
    arguments.to.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    wrappers = ":".join(str(wrapper) for name in wheels.MPIS for wrapper in mpi_wrappers(pythons[-1], name))
    archive = wheels.sdist(pythons[-1], WORK)
    for python in pythons:
        print(wheels.wheel(python, archive, wrappers, arguments.to, compilers(python)), flush=True)


def compilers(python: Path) -> dict[str, str]:
    """Return the variables by which setuptools compiles for aarch64."""
    wheels.run(python, "-m", "pip", "install", "--quiet", zig.REQUIREMENT)
    code = "import platform, sysconfig; print(platform.machine(), sysconfig.get_config_var('EXT_SUFFIX'))"
    here, suffix = wheels.run(python, "-c", code).split()
    names = {"SETUPTOOLS_EXT_SUFFIX": suffix.replace(here, MACHINE), "_PYTHON_HOST_PLATFORM": f"linux-{MACHINE}"}
    return zig.compilers(python, MACHINE, GLIBC, "generic", wheels.WORK / "zig") | names


def mpi(python: Path, name: str) -> Path:
    """Return the folder of an MPI's aarch64 wheel, unpacked."""
    folder = WORK / name
    if not folder.exists():
        downloads = WORK / "downloads"
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", downloads]
        platforms = [f"--platform={platform}" for platform in PLATFORMS]
        wheels.run(python, "-m", "pip", "download", *options, *platforms, name)
        (archive,) = downloads.glob(f"{name}-*.whl")
        unpacked = folder.with_suffix(".unpacked")
        zipfile.ZipFile(archive).extractall(unpacked)
        (data,) = unpacked.glob("*.data/data")
        shutil.move(data, folder)
        shutil.rmtree(unpacked)
    return folder


def mpi_wrappers(python: Path, name: str) -> list[Path]:
    """Return programs that show what an MPI's compiler wrappers would, one for each of its ABIs."""
    folder, made = mpi(python, name), []
    for wrapper in wheels.MPIS[name]:
        abi = wrapper == "mpicc_abi"
        shown = f"cc -I{folder}/include -L{folder}/lib -lmpi{'_abi' if abi else ''}{' -DMPI_ABI' if abi else ''}"
        path = WORK / f"{name}-{wrapper}"
        path.write_text(f"#!/bin/sh\necho {shlex.quote(shown)}\n")
        path.chmod(0o755)
        made.append(path)
    return made


if __name__ == "__main__":
    main()
