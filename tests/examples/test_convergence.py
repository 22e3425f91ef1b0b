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


def number(cell: str) -> float:
    """Return the number of a cell, in bytes or in its unit."""
    factor = {"kB": 1e3, "MB": 1e6, "GB": 1e9}.get(cell.split()[-1], 1)
    return factor * float(cell.split()[0].rstrip("!"))


@pytest.fixture(scope="module")
def simulated(forks: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "all"
    ran(forks, "--simulated", 2, *GRID, "--out", out)
    return out


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


def test_table(simulated: Path) -> None:
    """Recompute every cell from the JSON file."""
    found = trainings(simulated.with_suffix(".json"))
    text = simulated.with_suffix(".txt").read_text()
    made = [list(row.values()) for row in rows(text)]
    assert [row[:5] for row in made] == [
        [model, "2", "30", *cells]
        for model in ("digits", "text")
        for cells in (["Dense", "1"], ["gTop-k, butterfly", "0.1"])
    ]
    assert "More steps" not in text  # nor a table of densities, of which there is one
    assert "Bytes that are enough" not in text
    methods = {"Dense": "dense", "gTop-k, butterfly": "butterfly"}
    for model, P, _, name, density, seeds, score, gap, times, sent, fraction, later, per_step, milliseconds in made:
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
        steps_later = 30 if name == "Dense" else 27
        assert number(sent) == pytest.approx(np.mean([c["sent"][-1] for c in mine]), rel=0.006)
        assert number(per_step) == pytest.approx(
            np.mean([c["sent"][-1] - c["warm"] for c in mine]) / steps_later, rel=0.006
        )
        assert number(milliseconds) == pytest.approx(
            1e3 * np.mean([c["seconds"][-1] - c["warm_seconds"] for c in mine]) / steps_later, rel=0.006
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
            [(m["sent"][-1] - m["warm"]) / 27 / (d["sent"][-1] / 30) for m, d in zip(mine, dense, strict=True)]
        )
        assert float(later.rstrip(" %")) == pytest.approx(100 * after, rel=0.06)
        assert after < ratio


def test_seconds_rise_and_are_those_of_the_large_model(simulated: Path) -> None:
    """Virtual seconds are the same in every run."""
    found = trainings(simulated.with_suffix(".json"))
    for (model, ranks, method, _, _), curve in found.items():
        seconds = curve["seconds"]
        assert len(seconds) == len(curve["steps"])
        assert seconds[0] > 0
        assert all(a < b for a, b in pairwise(seconds))
        if method == "dense":  # a ring on two ranks: half of the gradient, twice; a header and a start for each
            assert (ranks, seconds[0]) == (2, pytest.approx(25.6e6 * 4 * 8e-9 + 2 * 50e-6, rel=0.005)), model
        else:
            assert 0 < curve["warm_seconds"] < seconds[-1] < found[model, ranks, "dense", 1.0, 0]["seconds"][-1]


@pytest.fixture(scope="module")
def compared(forks: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train at equal bytes and at two densities, with two momenta and two numbers of steps."""
    out = tmp_path_factory.mktemp("compared") / "all"
    grid = ["--seeds", "2", "--steps", "20", "--steps-times", "1", "2", "--models", "digits", "--momentum", "0.9", "0"]
    methods = ["--methods", "dense", "allgather", "butterfly", "split"]
    densities = ["--densities", "0.02", "--equal-bytes", "0.02"]
    ran(forks, "--simulated", 4, *grid, *methods, *densities, "--out", out)
    return out


def later(training: dict[str, Any]) -> float:
    """Return the bytes per step after the warm-up."""
    steps = training["setting"]["steps"]
    return float((training["curve"]["sent"][-1] - training["curve"]["warm"]) / (steps - round(0.1 * steps)))


@pytest.mark.exhaustive
def test_equal_bytes(compared: Path) -> None:
    """Compare the bytes that the methods sent."""
    found = json.loads(compared.with_suffix(".json").read_text())["trainings"]
    equal = [t for t in found if t["setting"]["equal_to"] == 0.02]
    assert len(equal) == 2 * 2 * 2 * 3
    for t in equal:
        setting = t["setting"]
        same = {"method": "allgather", "density": 0.02}
        (of_topk,) = (later(o) for o in equal if o["setting"] == setting | same)
        # Those of split depend on the gradients.
        assert later(t) == pytest.approx(of_topk, rel=0.1 if setting["method"] == "split" else 0.05), setting
        if setting["method"] == "butterfly":
            assert setting["density"] > 0.025
    plain = {json.dumps(t["setting"] | {"equal_to": 0.0}): t["curve"] for t in found if not t["setting"]["equal_to"]}
    twins = [t for t in equal if t["setting"]["method"] == "allgather"]
    assert all(plain[json.dumps(t["setting"] | {"equal_to": 0.0})] == t["curve"] for t in twins)  # trained once
    assert len({t["setting"]["momentum"] for t in equal}) == 2
    assert sum(t["setting"]["method"] == "dense" for t in found) == 2 * 2  # of each length and seed one


NAMES = {"Dense": "dense", "Top-k": "allgather", "gTop-k, butterfly": "butterfly", "gTop-k, split": "split"}
AMOUNTS = {"density 0.02": 0.0, "Top-k at 0.02": 0.02, "": 0.0}


@pytest.mark.exhaustive
def test_tables_of_the_best(compared: Path, forks: Run, tmp_path: Path) -> None:
    """Recompute the tables, with scores that are sometimes as good as dense."""
    content = json.loads(compared.with_suffix(".json").read_text())
    random = np.random.default_rng(1)
    for t in content["trainings"]:
        t["curve"]["accuracy"] = 98.2 - random.uniform(0, 0.2 if t["setting"]["method"] == "dense" else 2)
    (tmp_path / "scored.json").write_text(json.dumps(content))
    ran(forks, "--report", tmp_path / "scored.json", "--out", tmp_path / "made")
    text = (tmp_path / "made.txt").read_text()
    groups: dict[tuple[str, int, float, float], list[dict[str, Any]]] = {}
    for t in content["trainings"]:
        s = t["setting"]
        groups.setdefault((s["method"], s["steps"], s["equal_to"], s["momentum"]), []).append(t)

    def score(method: str, steps: int, equal_to: float, momentum: float) -> float:
        return float(np.mean([t["curve"]["accuracy"] for t in groups[method, steps, equal_to, momentum]]))

    def best(method: str, steps: int, equal_to: float) -> tuple[float, float]:
        """Return the score and its momentum."""
        momenta = [0.9] if method == "dense" else [0.9, 0.0]
        return max((score(method, steps, equal_to, momentum), momentum) for momentum in momenta)

    near = {"abs": 0.051}
    at_best = rows(text, "Each method at its best")
    assert len(at_best) == 2 * 2 * 4
    for row in at_best:
        method, steps = NAMES[row["gradients"]], int(row["steps"])
        equal_to = AMOUNTS[row["as many as"]] if method != "dense" else 0.0
        found, momentum = best(method, steps, equal_to)
        assert number(row["score"]) == pytest.approx(found, **near)
        if method != "dense":
            assert row["of"] == "2"
            assert number(row["gap"]) == pytest.approx(found - best("dense", steps, 0.0)[0], **near)
            assert row["at its best with"] == ("" if momentum else "momentum 0")
    for begin in range(0, len(at_best), 4):
        scores = [number(row["score"]) for row in at_best[begin : begin + 4]]
        assert scores == sorted(scores, reverse=True)

    steps_table = rows(text, "More steps")
    assert len(steps_table) == 1 + 2 * 3
    for row in steps_table:
        for steps in (20, 40):
            method, cell = NAMES[row["gradients"]], row[f"steps x {steps // 20}"]
            found, _ = best(method, steps, AMOUNTS[row["as many as"]])
            dense = 0.0 if method == "dense" else best("dense", steps, 0.0)[0]
            assert number(cell) == pytest.approx(found - dense, **near)

    enough = rows(text, "Bytes that are enough")
    assert len(enough) == 2 * 4
    for row in enough:
        method, steps = NAMES[row["gradients"]], int(row["steps"])
        good = [
            np.mean([later(t) if method != "dense" else t["curve"]["sent"][-1] / steps for t in tried])
            for (name, s, _, _), tried in groups.items()
            if (name, s) == (method, steps)
            and np.mean([t["curve"]["accuracy"] for t in tried]) >= best("dense", steps, 0.0)[0] - 0.5
        ]
        assert (row["per step"] == "-") == (not good), row
        if good:
            assert number(row["per step"]) == pytest.approx(min(good), rel=0.006)
    assert any(row["per step"] == "-" for row in enough)
    assert any(row["per step"] != "-" for row in enough if row["gradients"] != "Dense")


def test_a_training_is_repeated_when_the_recipe_has_changed(simulated: Path, forks: Run, tmp_path: Path) -> None:
    """A training with another recipe is repeated, with the same outcome."""
    file, sparse = tmp_path / "again.json", ("digits", 2, "butterfly", 0.1, 0)
    content = json.loads(simulated.with_suffix(".json").read_text())
    content["trainings"] = [t for t in content["trainings"] if t["setting"]["seed"] == 0]
    for t in content["trainings"]:
        t["curve"]["weights"] = "old"
        if t["setting"]["model"] == "digits" and t["setting"]["method"] == "butterfly":
            assert t["recipe"].pop("rule") == 2
    file.write_text(json.dumps(content))
    ran(forks, "--simulated", 2, "--seeds", 1, *GRID[2:], "--models", "digits", "--out", tmp_path / "again")
    again = trainings(file)
    assert {setting for setting, curve in again.items() if curve["weights"] != "old"} == {sparse}
    assert again[sparse] == trainings(simulated.with_suffix(".json"))[sparse]


def test_report_and_bad_options(simulated: Path, forks: Run, tmp_path: Path) -> None:
    """``--report`` reproduces plots and tables; bad options are refused."""
    for name in ("all-2.png", "all-bytes-2.png"):
        assert (simulated.parent / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
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
