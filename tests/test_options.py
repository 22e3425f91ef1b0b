"""Options are declared once: a new one, in one file, is accepted, checked and described by all front ends."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import pytest

import sparsecomm as sc
from sparsecomm.optimizers.options import AdamWOptions
from sparsecomm.options import check_options, documented
from tests.processes import run_python

ROOT = Path(__file__).parent.parent
# The changes of the recipe in docs/internals/architecture.md: texts and their replacements.
RULE = {
    "        maximize: follow": "        slowdown: divides the learning rate.\n        maximize: follow",
    "    maximize: bool = False\n": "    maximize: bool = False\n    slowdown: float = 1.0\n",
    '            ("maximize", ': '            ("slowdown", to_float(self.slowdown) >= 1, "must be at least 1"),\n'
    '            ("maximize", ',
    "float(t), self.lr,": "float(t), self.lr / self.slowdown,",
}
REDUCER = {
    "        on_step: called by": "        patience: a number.\n        on_step: called by",
    "    on_step: OnStep | None = None\n\n": "    on_step: OnStep | None = None\n    patience: int = 3\n\n",
    '            ("on_step", ': '            ("patience", to_int(self.patience, 1), "must be at least 1"),\n'
    '            ("on_step", ',
}
WRITE = """
from docs import tables
for path in tables.SOURCES:
    path.write_text(tables.options_types(path))
"""
PROGRAM = """
import inspect, os
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
import jax, optax, torch
import sparsecomm as sc
import sparsecomm.jax as sj
import sparsecomm.torch as st

def refused(function, **options):
    try:
        function(**options)
    except sc.InvalidInputError as error:
        return str(error)

START, GRADIENT = np.linspace(1, 2, 50, dtype=np.float32), np.ones(50, np.float32)

def arrays(**options):
    weights = {"w": START.copy()}
    sc.SparseAdamW(weights, 0.01, density=1.0, weight_decay=0.0, **options).step({"w": GRADIENT})
    return weights["w"]

def pytorch(**options):
    p = torch.nn.Parameter(torch.tensor(START))
    p.grad = torch.tensor(GRADIENT)
    st.SparseAdamW([("w", p)], 0.01, density=1.0, weight_decay=0.0, **options).step()
    return p.detach().numpy()

def jax_arrays(**options):
    optimizer, w = sj.sparse_adamw(0.01, density=1.0, weight_decay=0.0, **options), jax.numpy.array(START)
    updates, _ = optimizer.update(jax.numpy.array(GRADIENT), optimizer.init(w), w)
    return np.asarray(optax.apply_updates(w, updates))

for step in (arrays, pytorch, jax_arrays):
    np.testing.assert_allclose(START - step(), 0.01, rtol=1e-3)
    np.testing.assert_allclose(START - step(slowdown=4.0), 0.0025, rtol=1e-3)
    assert "slowdown=0.5: must be at least 1" in refused(step, slowdown=0.5)
for optimizer in (sc.SparseAdamW.__init__, st.SparseAdamW.__init__, sj.sparse_adamw):
    assert "slowdown: divides the learning rate." in optimizer.__doc__

model = torch.nn.Linear(3, 2)
named = list(model.named_parameters())
ways = {
    sc.Reducer: {"tensors": {"w": START}},
    sc.LocalSteps: {"parameters": {"w": START.copy()}},
    sj.LocalSteps: {"params": jax.numpy.array(START)},
    st.SparseState: {"named_parameters": named},
    st.DistributedOptimizer: {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "named_parameters": named},
    st.DiLoCo: {"model": model, "inner_optimizer": torch.optim.SGD(model.parameters(), 0.1)},
}
for way, arguments in ways.items():
    assert inspect.signature(way).parameters["patience"].default == 3
    assert "patience: a number." in (way.__init__.__doc__ if isinstance(way, type) else way.__doc__)
    assert "patience=0: must be at least 1" in refused(way, **arguments, patience=0)
    way(**arguments, patience=2)
"""


def test_a_new_option_is_one_change_of_one_file(tmp_path: Path) -> None:
    """An option of AdamW reaches three front ends, and one of a reducer six."""
    for module in ("torch", "jax", "optax"):
        pytest.importorskip(module)
    ignored = shutil.ignore_patterns("__pycache__", "_kernels")
    shutil.copytree(ROOT / "sparsecomm", tmp_path / "sparsecomm", ignore=ignored)
    (tmp_path / "sparsecomm" / "_kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "docs").mkdir()
    for file in ("tables.py", "reference.py"):
        shutil.copy(ROOT / "docs" / file, tmp_path / "docs")
    for file, changes in {"optimizers/options.py": RULE, "reducer/options.py": REDUCER}.items():
        path = tmp_path / "sparsecomm" / file
        text = path.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path.write_text(text)
    for text in (WRITE, PROGRAM):
        (tmp_path / "program.py").write_text(text)
        status, output = run_python(str(tmp_path / "program.py"))
        assert status == 0, output


def test_all_front_ends_of_adamw_have_the_same_options() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    functions = sc.SparseAdamW, sc.torch.SparseAdamW, sc.jax.sparse_adamw
    signatures = [inspect.signature(function).parameters for function in functions]
    for name in ("comm", *AdamWOptions.__annotations__):
        assert signatures[0][name] == signatures[1][name] == signatures[2][name], name


def test_unknown_options_are_refused_with_the_ones_that_were_meant() -> None:
    def function(density: float, *, momentum: float = 0) -> None: ...

    check_options(function, {"momentum": 1})
    with pytest.raises(sc.InvalidInputError, match=r"momentun is not .* of function; .* did you mean 'momentum'"):
        check_options(function, {"momentun": 1})
    with pytest.raises(sc.InvalidInputError, match="did you mean 'density'"):
        check_options(function, {"k": 1})


def test_docstrings_get_the_descriptions_that_they_lack() -> None:
    own = "Do it.\n\n    Args:\n        a: own\n            text.\n        b, options: see c.\n\n    Returns:\n"
    source = "Attributes:\n    a: other.\n    c, d, e: three of\n        them.\n\nRaises:\n    Error: f: no.\n"
    expected = own.replace("b, options: see c.", "b: see c.\n        c, e: three of\n            them.")
    assert documented(own, ["a", "b", "c", "e"], [None, source]) == expected
    assert documented(own.replace("b, options", "options"), ["a"], [source]) == own.replace(
        "        b, options: see c.\n", ""
    )
    assert documented("Do it.", ["a"], [source]) == "Do it."
    assert documented(None, ["a"], [source]) == "Args:\n    a: other.\n"
