"""The examples of local steps: their plain NumPy and the library exchange alike, and results are kept and shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, LIMIT, ROOT

SETTINGS = ENVIRONMENT | {"TERM": "dumb", "OMP_NUM_THREADS": "1", "COLUMNS": "190"}

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
for needed in ("torch", "rich", "greenlet", "matplotlib"):
    pytest.importorskip(needed)


def ran(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], env=SETTINGS, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rules_are_the_librarys() -> None:
    """Some rounds by both, with exact values: means and residuals agree but for the order in which sums are rounded."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import numpy as np
from local_steps_rules import CHUNK, Ranks, Rule
import sparsecomm as sc
from sparsecomm.transport import simulated

P, ROUNDS, SIZES = 4, 3, {{"a": 5000, "small": 300, "b": 9000}}
deltas = np.random.default_rng(0).standard_normal((ROUNDS, P, sum(SIZES.values())), np.float32)
ends = np.cumsum([0, *SIZES.values()])

for method in ("dense", "allgather", "split"):
    for op in ("mean", "contributors"):
        ranks = Ranks(Rule(ranks=P, method=method, bits=32, op=op), list(SIZES.values()))
        plain = [ranks.step(each) for each in deltas]

        def program(comm):
            local = sc.LocalSteps(
                {{name: np.zeros(size, np.float32) for name, size in SIZES.items()}}, comm=comm, algorithm=method,
                sync_every=1, wire="packed" if method != "dense" else "auto", bucket_bytes=1 << 30,
                decay=1.0 if method == "dense" else 0.95, density=1.0 if method == "dense" else 64 / CHUNK,
                op="mean" if op == "mean" or method == "dense" else "mean_of_contributors",
            )
            found = []
            for each in deltas[:, comm.rank]:
                before = {{name: array.copy() for name, array in local.global_parameters().items()}}
                moved = {{name: before[name] - each[b:e] for name, b, e in zip(SIZES, ends, ends[1:])}}
                local.step(moved)
                found.append(np.concatenate([before[name] - moved[name] for name in SIZES]))
            return found

        for theirs in simulated.run(P, program):
            for mine, its in zip(plain, theirs.value):
                np.testing.assert_allclose(its, mine, atol=2e-6)
                assert np.count_nonzero(mine) > 300
print("alike")
"""
    assert ran("-c", program).strip() == "alike"


def test_trainings_are_kept_and_shown(tmp_path: Path) -> None:
    """By the library and by the rules, each is a line, made once; the tables show its loss. All in one process."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import local_steps_rules, local_steps_training
for example in (local_steps_rules, local_steps_training):
    out = {str(tmp_path)!r} + "/" + example.__name__
    file = out if example is local_steps_rules else out + ".jsonl"
    words = ["ranks=2", "steps=10", "sync_every=5", "method=dense,split", "bits=4", "--out", out]
    for options in (["colour=red"], words, words, ["--report", file, "--out", out + "-made"]):
        print("=", *options)
        sys.argv = [example.__name__, *options]
        try:
            example.main()
        except SystemExit as refused:
            print(refused)
"""
    parts = [part.splitlines() for part in ran("-c", program).split("= ")[1:]]
    for name, (refused, made, again, table) in (
        ("local_steps_rules", parts[:4]),
        ("local_steps_training.jsonl", parts[4:]),
    ):
        assert "colour=red: expected NAME=VALUE" in refused[1]
        found = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len(made) - 1 == len(found) == 2
        assert len(again) == 1  # they are there already
        dense, split = (entry["outcome"]["loss"] for entry in found)
        assert dense < split < 4.6  # log 103 = 4.63 knows nothing
        assert all(f"{loss:.3f}" in "\n".join(table) for loss in (dense, split))
