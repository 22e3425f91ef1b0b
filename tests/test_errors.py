"""Texts of error messages: similar names, and the command that installs what is missing."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import errors

X = np.ones(9, np.float32)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: sc.explain(9, 1, algorithm="buterfly"), "butterfly"),  # type: ignore[arg-type]
        (lambda: sc.explain(9, 1, algorithm="hierarchical:tre"), "hierarchical:tree"),  # type: ignore[arg-type]
        (lambda: sc.sparse_allreduce(X, 1, op="meen"), "mean"),  # type: ignore[arg-type]
        (lambda: sc.sparse_allreduce(X, 1, wire="packed_int5"), "packed_int"),  # type: ignore[arg-type]
        (lambda: sc.explain(9, 1, dtype="float"), "float"),  # type: ignore[arg-type]
        (lambda: sc.Reducer({"x": X}, scope="buckets"), "bucket"),  # type: ignore[arg-type]
        (lambda: sc.Reducer({"weight": X}).residual("wieght"), "weight"),
    ],
)
def test_misspelled_names(call: Any, meant: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=f"; did you mean '{meant}[a-z0-9]*'\\?$"):
        call()


def test_names_without_a_similar_one() -> None:
    for algorithm in ("xyz", None, 3):
        with pytest.raises(sc.InvalidInputError, match=r"^algorithm=.*expected one of auto, ") as refused:
            sc.explain(9, 1, algorithm=algorithm)  # type: ignore[arg-type]
        assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize("folder", ["checkout", "with a space"])
def test_commands_that_install(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / folder / "sparsecomm" / "errors.py"))
    assert shlex.split(errors.pip_install("torch")) == ["pip", "install", "sparsecomm[torch]"]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "pyproject.toml").touch()
    assert shlex.split(errors.pip_install("torch")) == ["pip", "install", "-e", f"{tmp_path / folder}[torch]"]
