"""The experiment that compares trainings: all learn, with the same bits over any transport; tables are right."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.conftest import Run

IMPORTS = "torch", "sklearn.model_selection", "matplotlib.pyplot", "rich.progress"
PROGRAM = "-m", "bench.experiments.convergence"
GRID = ["--seeds", "2", "--steps", "30", "--densities", "0.1", "--methods", "dense", "butterfly"]
# Of the loss after the first step, what may be left at the end; the digits begin slowly.
LEARNT = {"digits": 0.995, "text": 0.72}

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.exhaustive]
for needed in ("torch", "sklearn", "matplotlib", "rich", "greenlet"):
    pytest.importorskip(needed)


def ran(forks: Run, *words: object) -> str:
    status, said = forks(*PROGRAM, *words)
    assert status == 0, said
    return said


def trainings(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the curves by model, ranks, method, density and seed."""
    found = json.loads(path.read_text())["trainings"]
    names = ("model", "ranks", "method", "density", "seed")
    return {tuple(t["setting"][name] for name in names): t["curve"] for t in found}


def rows(text: str, title: str = "Sparse gradients against dense ones") -> list[dict[str, str]]:
    """Return the rows of a table, by column name."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.strip() == title)
    end = next(number for number, line in enumerate(lines) if number > begin and line.startswith("└"))
    names = [cell.strip() for cell in lines[begin + 2].split("┃")[1:-1]]
    cells = [line.split("│")[1:-1] for line in lines[begin:end] if line.startswith("│")]
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in cells]


@pytest.fixture(scope="module")
def simulated(forks: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "all"
    ran(forks, "--simulated", 2, *GRID, "--out", out)
    return out


def test_the_table_shows_the_trainings(simulated: Path) -> None:
    found = trainings(simulated.with_suffix(".json"))
    shown = [list(row.values()) for row in rows(simulated.with_suffix(".txt").read_text())]
    assert len(shown) == 4
    for model, P, _, name, density, seeds, score, *_ in shown:
        method, kind = ("dense" if name == "Dense" else "butterfly"), ("accuracy" if model == "digits" else "loss")
        scores = [found[model, int(P), method, float(density), seed][kind] for seed in range(int(seeds))]
        expected = [np.mean(scores), min(scores), max(scores)]
        assert list(map(float, re.findall(r"[\d.]+", score))) == pytest.approx(expected, abs=0.06)


def test_all_learn_and_sparse_ones_send_less(simulated: Path) -> None:
    found = trainings(simulated.with_suffix(".json"))
    assert len(found) == 2 * 2 * 2
    for (model, ranks, method, _, seed), curve in found.items():
        assert curve["losses"][-1] < curve["losses"][0] * LEARNT[model], (model, method)
        assert curve["loss"] == pytest.approx(curve["losses"][-1], rel=0.3)
        assert all(a < b for a, b in pairwise(curve["sent"]))
        if method != "dense":
            dense = found[model, ranks, "dense", 1.0, seed]
            assert curve["losses"][0] == pytest.approx(dense["losses"][0], rel=0.1)  # from the same weights
            assert curve["sent"][-1] < 0.2 * dense["sent"][-1]


def test_report_and_bad_options(simulated: Path, forks: Run, tmp_path: Path) -> None:
    """``--report`` reproduces plots and tables; bad options are refused."""
    assert (simulated.parent / "all-bytes-2.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    cases = {
        "divides the batches": ["--simulated", "3"],
        "--densities 1.5: expected numbers between 0 and 1": ["--densities", "1.5"],
        "--equal-bytes 0.0: expected numbers between 0 and 1": ["--equal-bytes", "0"],
        "both empty": ["--densities"],
        "--momentum 0.9 1.0: expected": ["--momentum", "0.9", "1"],
        "--rate -1.0: expected": ["--rate", "-1"],
        "--warmup 1.0: expected": ["--warmup", "1"],
        "--decay 0.0: expected": ["--decay", "0"],
        "--steps-times 0: expected": ["--steps-times", "0"],
        "invalid choice: 'auto'": ["--wire", "auto"],
        "must be at least 10": ["--steps", "3"],
        "there is no such folder": ["--out", "/nowhere/all"],
        "not results of this program": ["--report", "/nowhere.json"],
    }
    said = ""
    for options in cases.values():
        status, refused = forks(*PROGRAM, *options)
        assert status != 0, refused
        said += refused
    assert [message for message in cases if message not in said] == []
    ran(forks, "--report", f"{simulated}.json", "--out", tmp_path / "again")
    assert trainings(tmp_path / "again.json") == trainings(simulated.with_suffix(".json"))
    assert rows((tmp_path / "again.txt").read_text()) == rows(simulated.with_suffix(".txt").read_text())
