"""Type checkers and editors know the names of options, and refuse others."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import typing as types
from sparsecomm.algorithms import inner_algorithms
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.wire import WIRES

ROOT = Path(__file__).parent.parent

SNIPPET = """
import jax
import numpy as np
import torch
import sparsecomm as sc
from sparsecomm.typing import Op

x = np.ones(9, np.float32)
op: Op = "mean"
sc.sparse_allreduce(x, 1, algorithm="split:2", op=op, wire="packed_int8")
sc.sparse_allreduce(x, 1, algorithm=sc.algorithms()["split:17"])
sc.isparse_allreduce(x, 1, algorithm="hierarchical:tree").wait().to_torch()
sc.Reducer({"x": x}, 0.1, algorithm="butterfly", scope="chunk", clip=1.0)
model = torch.nn.Linear(2, 2)
state = sc.torch.register(torch.nn.parallel.DistributedDataParallel(model), 0.1, wire="packed", momentum=0.9)
optimizer = sc.torch.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), op="sum")
optimizer.synchronize().usable
sc.torch.DiLoCo(model, optimizer, algorithm="dense", decay=1.0)
sc.LocalSteps({"x": x}, scope="model")
sc.sparse_allreduce(torch.ones(9), 1, residual=x, out=model.weight)
sc.threshold(jax.numpy.ones(9), 1.0, residual=torch.ones(9))
sc.topk(model.weight, 1).to_dense(out=x)
sc.topk(np.ones((3, 3)), 1)
"""
WRONG = """
sc.topk([1.0, 2.0], 1)
sc.isparse_allreduce(x, 1, residual="zeros")
sc.sparse_allreduce(x, 1, op="average")
sc.sparse_allreduce(x, 1, algorithm="buterfly")
sc.explain(9, 1, wire="int8")
sc.isparse_allreduce(x, 1, op="average")
sc.Reducer({"x": x}, scope="layer")
sc.torch.register(torch.nn.parallel.DistributedDataParallel(model), scope="layer")
sc.torch.register(torch.nn.parallel.DistributedDataParallel(model), momentun=0.9)
sc.torch.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), clip="median")
sc.torch.DiLoCo(model, optimizer, algorithm="densest")
sc.LocalSteps({"x": x}, wire="int2")
sc.jax.allreduce_tree({"x": x}, 0.1, scope="bucket")
optimizer.synchronise()
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_type_checkers_refuse_unknown_names(tmp_path: Path) -> None:
    if not all(map(importlib.util.find_spec, ("mypy", "torch", "jax"))):  # importing them takes seconds
        pytest.skip("needs mypy, torch and jax")
    (tmp_path / "program.py").write_text(SNIPPET + WRONG)
    options = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]  # as `make lint`
    command = [sys.executable, "-m", "mypy", *options, "program.py"]
    settings = {"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    refused = [int(line.split(":")[1]) for line in ran.stdout.splitlines() if ": error:" in line]
    first = SNIPPET.count("\n") + 2
    assert sorted(set(refused)) == list(range(first, first + len(WRONG.splitlines()) - 1)), ran.stdout + ran.stderr


def names(alias: Any) -> set[str]:
    return {name for argument in get_args(alias) for name in (get_args(argument) or [argument])}


def test_types_list_the_names_of_the_code() -> None:
    derived = {name for name in names(types.AlgorithmName) if ":" in name}
    assert names(types.AlgorithmName) - derived == {"auto", "fastest", *sc.algorithms()}
    assert {sc.algorithms()[name].name for name in derived} == derived
    assert {name.partition(":")[2] for name in derived if name.startswith("hierarchical")} <= set(inner_algorithms())
    assert get_args(types.WireName) == ("auto", *WIRES)
    assert get_args(types.DTypeName) == tuple(DTYPES)


def test_algorithm_objects_replace_names() -> None:
    x = np.ones(9, np.float32)
    for name in ("split:17", "hierarchical:tree", "butterfly"):
        assert sc.algorithms()[name] is sc.algorithms()[name]
        assert sc.explain(9, 2, algorithm=sc.algorithms()[name]).query.algorithm == name
    for name in ("auto", "buterfly"):
        with pytest.raises(KeyError, match=r"sparsecomm\.explain|did you mean"):
            sc.algorithms()[name]
    butterfly = sc.algorithms()["butterfly"]
    stranger = sc.Algorithm("butterfly", "", "", "", "", butterfly.run, butterfly.predicted_time)
    with pytest.raises(sc.InvalidInputError, match="'butterfly', which is not registered"):
        sc.Reducer({"x": x}, algorithm=stranger)


def test_algorithms_print_as_a_table() -> None:
    header, *rows = str(sc.algorithms()).splitlines()
    assert header.split() == ["algorithm", "what", "it", "does"]
    assert [row.split()[0] for row in rows] == list(sc.algorithms())
    start = header.index("what")
    assert all(row[start - 2 : start] == "  " and row[start] != " " for row in rows)


def test_examples_in_docstrings_run() -> None:
    """The second paragraph of a docstring is an example. Results in comments, as of `topk`, are checked."""
    gradient, x, y = np.arange(2000, dtype=np.float32), np.ones(100, np.float32), np.arange(100, dtype=np.float32)
    names = {"np": np, "sc": sc, "gradient": gradient, "x": x, "y": y}
    for function in (sc.sparse_allreduce, sc.isparse_allreduce, sc.topk, sc.threshold, sc.merge_topk):
        assert "Any" not in str(inspect.signature(function)), function
        block = inspect.getdoc(function).split("\n\n")[1]
        code = textwrap.dedent(block).replace("residual=residual", "residual=residual, comm=MPI.COMM_SELF")
        exec(code, names | {"MPI": pytest.importorskip("mpi4py.MPI")} | {"residual": np.zeros_like(gradient)})
        if "# indices" in code:
            entries = eval(code, names)
            assert (entries.indices.tolist(), entries.values.tolist()) == ([0, 1], [3.0, -5.0])
