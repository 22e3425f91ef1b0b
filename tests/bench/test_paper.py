"""The paper's table: its published numbers, the arithmetic of dilated time, and a run on emulated hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from bench.paper import tables
from bench.paper.models import MODELS
from bench.slow_network import network
from tests.processes import LIMIT

ROOT = Path(__file__).parents[2]


def row(model: str, method: str, P: int, seconds: float, **more: Any) -> dict[str, Any]:
    """Return a result as `bench.paper.worker` writes it, with steps of ``seconds`` on this machine."""
    it = MODELS[model]
    return {
        "model": model,
        "method": method,
        "P": P,
        "algorithm": tables.STYLES[method],
        "wire": "plain",
        "n": it.n,
        "k": it.k,
        "slowdown": P,
        "rate": 1e9 / P,
        "compute": it.compute,
        "steps": [seconds],
        "exchange": [],
        "sent": 1000,
        "busy": 0.5,
        "parts": {"exchange": seconds} | ({} if method == "dense" else {"select": 0.0}),
        "alone": {"select": 0.0},
        "costs": {"alpha": 0.0, "beta": 8e-9 * P, "select": 0.0, "merge": 0.0, "codec": 0.0, "add": 0.0, "call": 0.0},
    } | more


def test_times_are_divided_by_the_dilation_and_selection_counts_as_alone() -> None:
    model = MODELS["VGG-16"]
    parts = {"select": 0.064, "exchange": 0.2}
    it = row("VGG-16", "ours", 32, 0.32, parts=parts, alone={"select": 0.005})
    assert tables.work_seconds(it) == (0.002, 0.005)
    assert tables.step_seconds(it) == pytest.approx(model.compute + 0.010 + 0.003)
    it["alone"] = {"select": 0.001}  # the slowdown by other ranks is not subtracted
    assert tables.step_seconds(it) == pytest.approx(model.compute + 0.010)


@pytest.mark.exhaustive
def test_a_run_measures_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    try:
        network.entry(2)
    except network.CannotError as error:
        pytest.skip(str(error))
    file = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "bench.paper", "run", "--models", "ResNet-20", "--steps", "1", "--file", str(file)]

    def run(P: int, *methods: str) -> str:
        done = subprocess.run(
            [*command, "--ranks", str(P), "--methods", *methods],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    run(2, "ours", "dense")
    before = file.read_text()
    assert [json.loads(line)["method"] for line in before.splitlines()] == ["ours", "dense"]
    assert all(json.loads(line)["sent"] > 0 for line in before.splitlines())
    said = run(2, "ours", "topk", "dense")
    assert file.read_text().startswith(before)
    assert [json.loads(line)["method"] for line in file.read_text().splitlines()] == ["ours", "dense", "topk"]
    assert "ResNet-20, topk" in said
    assert "ResNet-20, ours" not in said
    assert "P = 3 on sn0: ResNet-20, ours" in run(3, "ours")
