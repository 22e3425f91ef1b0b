"""The experiments: models learn, and tables show the results in the files."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.forks import Run
from tests.processes import run_python

IMPORTS = "sklearn.model_selection", "rich.progress"
CONVERGENCE = "-m", "bench.experiments.convergence"
GRID = ["--seeds", "2", "--steps", "30", "--densities", "0.1", "--methods", "dense", "butterfly"]
# The largest final loss, as a fraction of the loss after the first step. The digits begin slowly.
LEARNT = {"digits": 0.995, "text": 0.72}

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
for needed in ("torch", "sklearn", "rich", "greenlet"):
    pytest.importorskip(needed)


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_sparse_runs_learn_and_tables_show_them(forks: Run, tmp_path: Path) -> None:
    status, said = forks(*CONVERGENCE, "--simulated", 2, *GRID, "--out", tmp_path / "all")
    assert status == 0, said
    names = "model", "ranks", "method", "density", "seed"
    curves = {
        tuple(training["setting"][name] for name in names): training["curve"]
        for training in json.loads((tmp_path / "all.json").read_text())["trainings"]
    }
    assert len(curves) == 2 * 2 * 2
    for (model, ranks, method, _, seed), curve in curves.items():
        assert curve["losses"][-1] < curve["losses"][0] * LEARNT[model], (model, method)
        assert all(a < b for a, b in pairwise(curve["sent"]))
        if method != "dense":
            dense = curves[model, ranks, "dense", 1.0, seed]
            assert curve["losses"][0] == pytest.approx(dense["losses"][0], rel=0.1)  # from the same weights
            assert curve["sent"][-1] < 0.2 * dense["sent"][-1]
    shown = rows((tmp_path / "all.txt").read_text())[:4]
    for model, P, _, name, density, seeds, score, *_ in shown:
        method, kind = ("dense" if name == "Dense" else "butterfly"), ("accuracy" if model == "digits" else "loss")
        scores = [curves[model, int(P), method, float(density), seed][kind] for seed in range(int(seeds))]
        expected = [np.mean(scores), min(scores), max(scores)]
        assert list(map(float, re.findall(r"[\d.]+", score))) == pytest.approx(expected, abs=0.06)
    status, said = forks(*CONVERGENCE, "--report", tmp_path / "all.json", "--out", tmp_path / "again")
    assert status == 0, said
    assert rows((tmp_path / "again.txt").read_text()) == rows((tmp_path / "all.txt").read_text())


def test_local_steps_by_speed() -> None:
    """The ranks make as many steps in total, in less time, and no rank waits."""
    options = ["--speeds", "1", "1", "2", "--sync-every", "5", "--steps", "10", "--seeds", "0"]
    status, said = run_python("-m", "bench.experiments.local_steps_uneven", *options)
    assert status == 0, said
    cells_by_name = {name: cells for name, *cells in rows(said)}
    assert {name: cells[:4] for name, cells in cells_by_name.items()} == {
        "equally many": ["10 10 10", "30", "20", "66.7 %"],
        "by speed": ["11 11 8", "30", "16", "79.2 %"],  # 5 5 5 in the first round, then 6 6 3
    }
    assert all(2 < float(cells[4]) < 5 for cells in cells_by_name.values())
