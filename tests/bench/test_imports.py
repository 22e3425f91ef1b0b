"""No modules of `bench` import each other in a circle. import-linter checks the library."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_circles() -> None:
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "bench").rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        named = {(node.module or "", alias.name) for node in nodes for alias in node.names}
        imported = {f"{module}.{item}" if f"{module}.{item}" in files else module for module, item in named}
        imports[name] = imported & files.keys() - {name}
    assert any(imports.values())
    TopologicalSorter(imports).prepare()  # raises CycleError
