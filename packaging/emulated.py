"""Try an aarch64 wheel on a machine of another kind, by qemu: its bits, its kernels' tests, and ranks over both MPIs.

    python packaging/emulated.py dist/sparsecomm-*-cp311-*aarch64.whl

It needs qemu-user-static and Debian's apt-get, from which Python 3.11 and its libraries come into build/wheels/aarch64,
unpacked and not installed. What the wheel needs of PyPI stands beside them. The ranks are emulated, their mpiexec is
that of this machine.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import aarch64
import wheels

WORK = aarch64.WORK
ROOT = WORK / "debian"
PYTHON = ROOT / "usr" / "bin" / "python3.11"
DEBIAN = ("python3.11", "libstdc++6")
PYPI = ("numpy", "mpi4py", "greenlet", "ml_dtypes", "pytest", "hypothesis")
KERNELS = ["tests/backends/test_cpu.py", "tests/backends/test_packed.py"]
SELECT = "portable and not cuda"
# The emulator shares no addresses with the mpiexec that started it, as PMIx would have it, and has no process_vm_readv.
RANKS = {
    "PMIX_MCA_gds": "hash",
    "MPIR_CVAR_CH4_CMA_ENABLE": "0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    host = wheels.environment(wheels.found_pythons()[0])
    wheels.mpi_wrappers()  # whose mpiexec start the ranks
    unpack_python()
    site = Path(shutil.rmtree(WORK / "site", ignore_errors=True) or WORK / "site")
    install(host, site, *PYPI, arguments.wheel.resolve())
    with tempfile.TemporaryDirectory() as folder:  # without the sources of the package, which would come first
        shutil.copytree(wheels.ROOT / "tests", Path(folder, "tests"))
        shutil.copy(wheels.ROOT / "pyproject.toml", folder)
        same_bits(emulated(site), folder)
        subprocess.run([*emulated(site), "-m", "pytest", "-q", *KERNELS, "-k", SELECT], cwd=folder, check=True)
        for name in wheels.MPIS:
            library = f"LD_LIBRARY_PATH={aarch64.mpi(host, name)}/lib"
            mpiexec = [str(wheels.WORK / name / "bin" / "mpiexec"), "-n", str(arguments.ranks)]
            command = [*mpiexec, *emulated(site, library), "-m", "sparsecomm", "selftest"]
            subprocess.run(command, cwd=folder, env=os.environ | RANKS, check=True)


def unpack_python() -> None:
    """Unpack Debian's Python for aarch64, and what it needs, into a folder."""
    if PYTHON.exists():
        return
    state = WORK / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State": state / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "--quiet=2", *(f"--option={name}={value}" for name, value in options.items())]
    wheels.run(*apt, "update")
    wheels.run(*apt, "install", "--yes", "--download-only", *DEBIAN)
    for package in sorted((state / "cache" / "archives").glob("*.deb")):
        wheels.run("dpkg-deb", "--extract", package, ROOT)


def install(python: Path, site: Path, *packages: str | Path) -> None:
    """Install wheels for the emulated Python into a folder."""
    of = ["--implementation=cp", "--python-version=3.11", "--only-binary=:all:"]
    more = ["manylinux_2_27_aarch64", "manylinux_2_24_aarch64"]
    platforms = [f"--platform={platform}" for platform in (*aarch64.PLATFORMS, *more)]
    wheels.run(python, "-m", "pip", "install", "--quiet", *of, *platforms, "--target", site, *packages)


def emulated(site: Path, *variables: str) -> list[str]:
    """Return the command of an emulated Python that finds the packages in ``site``."""
    options = [word for variable in (f"PYTHONPATH={site}", *variables) for word in ("-E", variable)]
    return ["qemu-aarch64-static", "-L", str(ROOT), *options, str(PYTHON)]


def same_bits(python: list[str], folder: str) -> None:
    """Check that the wheel computes what the checkout computes here."""
    script = str(wheels.ROOT / "packaging" / "bits.py")
    here = subprocess.run(
        [sys.executable, script],
        cwd=wheels.ROOT,
        env=os.environ | {"PYTHONPATH": str(wheels.ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    there = subprocess.run([*python, script], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    lines = [run.stdout.splitlines() for run in (here, there)]
    if differences := list(difflib.unified_diff(*lines, "here", "aarch64", lineterm="", n=0)):
        raise SystemExit("\n".join(differences))
    print(f"{len(lines[0])} digests of results: the same as here", flush=True)


if __name__ == "__main__":
    main()
