"""Each module imports only from layers below its own (docs: the drawing of the layers), or from its own group.

Imports are read from the source, so one inside a function counts like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sparsecomm"

# Bottom to top. Groups side by side in a layer may not import each other.
LAYERS: list[list[set[str]]] = [
    [{"_kernels"}],
    [{"errors", "config", "dtypes", "scheduling"}],
    [{"sparse", "interop", "_dlpack", "memory"}],
    [{"backend"}, {"transport"}, {"wire"}],
    [{"algorithms", "feedback"}],
    [{"choice", "profile"}],
    [{"collective", "handles"}],
    [{"api", "reducer"}],
    [{"sparsecomm"}],  # the public names
    [{"cli", "__main__"}, {"torch"}, {"jax"}],
]
PLACE = {name: (height, group) for height, layer in enumerate(LAYERS) for group in layer for name in group}
# What reads like the paper: no NumPy, no MPI, no element types.
PURE = {"algorithms": {"numpy", "mpi4py", "sparsecomm.tensors.dtypes"}}

CIMPORT = re.compile(r"^\s*(?:from\s+(\.*[\w.]*)\s+c?import\s+\(?([^)#\n]*)|c?import\s+([^#\n]+))", re.MULTILINE)


def sources() -> list[Path]:
    """Every module of the package. `_kernels` is a link; what it holds imports nothing."""
    found = [p for suffix in ("py", "pyx", "pxd") for p in PACKAGE.rglob(f"*.{suffix}")]
    return sorted(p for p in found if PACKAGE / "_kernels" not in p.parents)


def imported(path: Path) -> Iterator[str]:
    """Full names of what a file imports: ``a.b`` of ``from a import b`` where ``a`` is the package, else ``a``."""
    package = path.relative_to(ROOT).parent.parts
    for module, names in statements(path):
        name = module.lstrip(".")
        if dots := len(module) - len(name):
            name = ".".join([*package[: len(package) - dots + 1], *filter(None, [name])])
        yield from (f"{name}.{n}" for n in names) if name == "sparsecomm" and names else [name]


def statements(path: Path) -> Iterator[tuple[str, list[str]]]:
    text = path.read_text()
    if path.suffix != ".py":
        for module, names, plain in CIMPORT.findall(text):
            if module:
                yield module, [n.split()[0] for n in names.split(",") if n.strip()]
            else:
                yield from ((n.split()[0], []) for n in plain.split(","))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            yield from ((a.name, []) for a in node.names)


def unit(name: str) -> str | None:
    """The part of the library that a full name belongs to, such as "ops" for "sparsecomm.backends._cpu"."""
    top, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    return None if top != "sparsecomm" else part if part in PLACE else top


def complaints(path: Path) -> list[str]:
    own = path.relative_to(PACKAGE).parts[0].split(".")[0]
    own = "sparsecomm" if own == "__init__" else own
    if own not in PLACE:
        return [f"{path.relative_to(ROOT)}: {own!r} stands in no layer; add it to LAYERS"]
    height, group = PLACE[own]
    found = set()
    for name in imported(path):
        other = unit(name)
        if other is not None and other not in group and PLACE[other][0] >= height:
            found.add(other)
        found |= {b for b in PURE.get(own, ()) if name == b or name.startswith(f"{b}.")}
    return [f"{path.relative_to(ROOT)}: {own} may not import {name}" for name in sorted(found)]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stay_below(path: Path) -> None:
    assert complaints(path) == []


def test_kernels_know_neither_python_nor_mpi() -> None:
    text = re.compile(r'#\s*include\s*[<"](Python\.h|mpi[\w-]*\.h|numpy/)', re.IGNORECASE)
    files = [p for p in (ROOT / "kernels").rglob("*") if p.suffix in {".hpp", ".inl", ".cpp", ".cu", ".cuh", ".h"}]
    assert [str(p) for p in files if text.search(p.read_text())] == []


@pytest.mark.parametrize(
    ("where", "line", "complaint"),
    [
        ("ops/x.py", "from sparsecomm.transport import base", "ops may not import transport"),
        ("ops/x.py", "def f():\n    import sparsecomm.api", "ops may not import api"),
        ("ops/x.py", "from sparsecomm import reducer", "ops may not import reducer"),
        ("ops/x.py", "from ..wire import entries", "ops may not import wire"),
        ("ops/x.py", "from .. import cli", "ops may not import cli"),
        ("wire/x.pyx", "from sparsecomm.backends cimport _cpu", "wire may not import ops"),
        ("wire/x.pyx", "cdef f():\n    import sparsecomm.backends._cpu as c", "wire may not import ops"),
        ("algorithms/x.py", "import numpy as np", "algorithms may not import numpy"),
        ("algorithms/x.py", "from mpi4py import MPI", "algorithms may not import mpi4py"),
        (
            "algorithms/x.py",
            "from sparsecomm.tensors.dtypes import FLOAT32",
            "algorithms may not import sparsecomm.tensors.dtypes",
        ),
        ("torch.py", "from sparsecomm import jax", "torch may not import jax"),
        ("errors.py", "import sparsecomm", "errors may not import sparsecomm"),
        ("api.py", "from sparsecomm import __version__", "api may not import sparsecomm"),
        ("__init__.py", "from sparsecomm import torch", "sparsecomm may not import torch"),
        ("new.py", "", "'new' stands in no layer"),
        ("ops/x.py", "from sparsecomm.errors import A\nfrom . import base\nfrom sparsecomm import config", None),
        ("algorithms/x.py", "from sparsecomm.backends import Backend\nfrom sparsecomm.feedback import put_back", None),
        ("transport/x.pyx", "from mpi4py cimport libmpi\nfrom sparsecomm.errors import TimeoutError", None),
        ("__init__.py", "from sparsecomm.api import sparse_allreduce", None),
        ("torch.py", "import sparsecomm as sc", None),
        ("__main__.py", "from sparsecomm.cli import main", None),
        ("torch.py", "import torch\nfrom sparsecomm.reducer import Reducer", None),
    ],
)
def test_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, line: str, complaint: str | None
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "sparsecomm")
    path = tmp_path / "sparsecomm" / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    found = complaints(path)
    assert not found if complaint is None else any(complaint in f for f in found), found
