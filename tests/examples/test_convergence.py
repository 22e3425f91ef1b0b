"""The example that compares trainings: all learn, with the same bits over any transport, and the table is right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import ENVIRONMENT, LIMIT, MPIRUN, ROOT, needs_mpirun

EXAMPLE = str(ROOT / "examples/convergence.py")
SETTINGS = ENVIRONMENT | {"TERM": "dumb", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
GRID = ["--seeds", "2", "--steps", "60", "--densities", "0.1", "--methods", "dense", "butterfly"]
# Of the loss after the first step, what may be left at the end; the digits begin slowly.
LEARNT = {"digits": 0.985, "text": 0.7}

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.exhaustive]
for needed in ("torch", "sklearn", "matplotlib", "rich", "greenlet"):
    pytest.importorskip(needed)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=SETTINGS, capture_output=True, text=True, timeout=LIMIT)


def ran(*command: str) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trainings(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Curves by model, ranks, method, density and seed."""
    found = json.loads(path.read_text())["trainings"]
    names = ("model", "ranks", "method", "density", "seed")
    return {tuple(t["setting"][name] for name in names): t["curve"] for t in found}


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "all"
    ran(sys.executable, EXAMPLE, "--simulated", "2", *GRID, "--out", str(out))
    return out


def test_all_learn_and_sparse_ones_send_less(simulated: Path) -> None:
    found = trainings(simulated.with_suffix(".json"))
    assert len(found) == 2 * 2 * 2
    for (model, ranks, method, _, seed), curve in found.items():
        assert curve["losses"][-1] < curve["losses"][0] * LEARNT[model], (model, method)
        assert curve["loss"] == pytest.approx(curve["losses"][-1], rel=0.3)
        assert all(a < b for a, b in zip(curve["sent"], curve["sent"][1:], strict=False))
        if method != "dense":
            dense = found[model, ranks, "dense", 1.0, seed]
            assert curve["losses"][0] == pytest.approx(dense["losses"][0], rel=0.1)  # from the same weights
            assert curve["sent"][-1] < 0.2 * dense["sent"][-1]


def test_table(simulated: Path) -> None:
    """Against its own arithmetic, from the file beside it."""
    found = trainings(simulated.with_suffix(".json"))
    made = rows(simulated.with_suffix(".txt").read_text())
    assert [row[:4] for row in made] == [
        [model, "2", *cells] for model in ("digits", "text") for cells in (["Dense", "1"], ["gTop-k, butterfly", "0.1"])
    ]
    methods = {"Dense": "dense", "gTop-k, butterfly": "butterfly"}
    for model, P, name, density, seeds, score, gap, times, _, fraction, later in made:
        assert seeds == "2"
        kind = "accuracy" if model == "digits" else "loss"
        mine, dense = (
            [found[model, int(P), method, d, seed] for seed in range(2)]
            for method, d in ((methods[name], float(density)), ("dense", 1.0))
        )
        decimals = 1 if model == "digits" else 3
        near = {"abs": 0.51 * 10**-decimals}
        mean, min_, max_ = map(float, re.findall(r"[\d.]+", score))
        scores, dense_scores = ([c[kind] for c in curves] for curves in (mine, dense))
        assert (mean, min_, max_) == (
            pytest.approx(np.mean(scores), **near),
            pytest.approx(min(scores), **near),
            pytest.approx(max(scores), **near),
        )
        if name == "Dense":
            assert gap == times == fraction == later == ""
            continue
        difference = np.mean(scores) - np.mean(dense_scores)
        spread = max(dense_scores) - min(dense_scores)
        assert float(gap.removesuffix(" %")) == pytest.approx(difference, **near)
        assert float(times.rstrip("!")) == pytest.approx(abs(difference) / spread, abs=0.06)
        assert times.endswith("!") == ((-difference if kind == "accuracy" else difference) > spread)
        ratio = sum(c["sent"][-1] for c in mine) / sum(c["sent"][-1] for c in dense)
        assert float(fraction.rstrip(" %")) == pytest.approx(100 * ratio, rel=0.06)
        after = np.mean(
            [(m["sent"][-1] - m["warm"]) / 54 / (d["sent"][-1] / 60) for m, d in zip(mine, dense, strict=True)]
        )
        assert float(later.rstrip(" %")) == pytest.approx(100 * after, rel=0.06)
        assert after < ratio


@needs_mpirun
def test_mpi_gives_the_same_bits_and_goes_on(simulated: Path, tmp_path: Path) -> None:
    """And what is there already is not trained again: of two seeds only the second."""
    content = json.loads(simulated.with_suffix(".json").read_text())
    content["trainings"] = [t for t in content["trainings"] if t["setting"]["seed"] == 0]
    file = tmp_path / "mpi.json"
    file.write_text(json.dumps(content))
    ran(str(MPIRUN), "-n", "2", sys.executable, EXAMPLE, *GRID, "--out", str(tmp_path / "mpi"))
    assert trainings(file) == trainings(simulated.with_suffix(".json"))
    again = json.loads(file.read_text())["trainings"]
    assert {(t["setting"]["seed"], t["transport"] == "simulated") for t in again} == {(0, True), (1, False)}


def test_report_and_bad_options(simulated: Path, tmp_path: Path) -> None:
    """The plots and the table can be drawn again; what cannot be done is refused. All in one process, to save time."""
    assert (simulated.parent / "all-2.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    cases = {
        "divides the batches": ["--simulated", "3"],
        "between 0 and 1": ["--densities", "1.5"],
        "expected 10 or more": ["--steps", "3"],
        "there is no such folder": ["--out", "/nowhere/all"],
        "not results of this example": ["--report", "/nowhere.json"],
    }
    report = ["--report", f"{simulated}.json", "--out", str(tmp_path / "again")]
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import convergence
for options in {list(cases.values())!r}:
    sys.argv = ["convergence.py", *options]
    try:
        convergence.main()
    except SystemExit as refused:
        print(refused, file=sys.stderr)
        continue
    raise AssertionError(options)
sys.argv = ["convergence.py", *{report!r}]
convergence.main()
"""
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [message for message in cases if message not in done.stderr] == []
    assert trainings(tmp_path / "again.json") == trainings(simulated.with_suffix(".json"))
    assert rows((tmp_path / "again.txt").read_text()) == rows(simulated.with_suffix(".txt").read_text())
