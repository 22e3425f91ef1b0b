"""The experiments that compare rules: NumPy and the library train alike; files and tables of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.conftest import Run
from tests.processes import ROOT

IMPORTS = "torch", "sklearn.model_selection", "matplotlib.pyplot", "rich.progress", "sparsecomm"
# Runs each experiment by its options in one process, and prints `= OPTIONS` before what it says.
EACH = """
for example, options in runs:
    print("=", *options)
    sys.argv = [example.__name__, *options]
    try:
        example.main()
    except SystemExit as refused:
        print(refused)
"""

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
for needed in ("torch", "sklearn", "rich", "greenlet", "matplotlib"):
    pytest.importorskip(needed)


def ran(forks: Run, program: str) -> str:
    """Return the output of a program that imports the experiments."""
    status, said = forks("-c", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}")
    assert status == 0, said
    return said


# -- error feedback ---------------------------------------------------------------------------------------------------


def test_the_rules_of_error_feedback_are_the_librarys(forks: Run) -> None:
    """The losses of 20 steps agree, except for the rounding order of sums."""
    program = """
from bench.experiments.ablation import Variant, train
from bench.experiments.convergence.training import Setting, simulate
for model, ours, theirs in (("digits", "butterfly", "butterfly"), ("digits", "split", "split"),
                            ("digits", "topk", "allgather"), ("text", "split", "split")):
    plain = train(Variant(model=model, ranks=4, method=ours, density=0.01, steps=20, momentum=0.5, decay=0.9))
    library = simulate(Setting(model, 4, theirs, 0.01, 0, 20, 0.5, decay=0.9))
    print(plain["loss"], library.loss)
"""
    pairs = [tuple(map(float, line.split())) for line in ran(forks, program).splitlines()]
    assert len(pairs) == 4
    for plain, library in pairs:
        assert plain == pytest.approx(library, rel=3e-5)  # with another masking it would not be


@pytest.mark.exhaustive
def test_every_rule_of_error_feedback_trains(forks: Run) -> None:
    rules: list[dict[str, object]] = [
        *({"keep": keep} for keep in ("owner", "merger")),
        *({"mask": mask} for mask in ("none", "selected", "applied")),
        *({"complete": complete} for complete in ("sum", "root", "contributors")),
        *({"bits": bits} for bits in (8, 16)),
        *({"method": method} for method in ("topk", "butterfly", "dense")),
        {"decay": 0.9},
        {"clamp": 1.5},
        {"scope": "tensor"},
        {"lowpass": 0.5},
        {"regular": 1.0},
        {"result_ratio": 2.0},
        {"nesterov": 1},
        {"threshold": 0.05},
        {"ef21": 0.2, "rate": 5.0},
    ]
    program = f"""
from bench.experiments.ablation import Variant, train
for rule in {rules!r}:
    usual = dict(model="digits", ranks=4, density=0.02, momentum=0.5, steps=32)
    print(train(Variant(**(usual | rule)))["loss"])
"""
    losses = dict(zip(map(str, rules), map(float, ran(forks, program).splitlines()), strict=True))
    assert len(losses) == len(rules)
    assert all(loss < 2.295 for loss in losses.values()), losses  # log 10 knows nothing
    assert len(set(losses.values())) == len(rules)  # each rule makes a difference


# -- optimizers with moments ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_every_way_to_exchange_trains_under_every_optimizer(forks: Run) -> None:
    rules: list[dict[str, object]] = [
        *({"way": way} for way in ("dense", "gradients", "updates", "sparse_adamw", "powersgd", "onebit")),
        *({"way": "whole", "choose": choose} for choose in ("sum", "owner", "moment", "turn", "cyclic")),
        {"way": "whole", "choose": "owner", "cap": 5},
        *({"way": way, "optimizer": "lion", "rate": 0.5} for way in ("dense", "whole")),
        *({"way": way, "optimizer": "sgd", "rate": 10.0} for way in ("dense", "whole")),
        {"way": "sparse_adamw", "bits": 1},
    ]
    program = f"""
from bench.experiments.adamw_rules import Rule, train
for rule in {rules!r}:
    found = train(Rule(**(dict(ranks=2, density=0.2, bits=4, warmup=0.2, steps=24) | rule)))
    print(found["loss"], found["ring"])
"""
    found = [tuple(map(float, line.split())) for line in ran(forks, program).splitlines()]
    assert len(found) == len(rules)
    for rule, (loss, ring) in zip(rules, found, strict=True):
        assert loss < 3.95, (rule, loss)  # the logarithm of the number of characters, 4.5, knows nothing
        assert ring == pytest.approx(1) if rule["way"] == "dense" else ring > 1
    assert len({loss for loss, _ in found}) == len(rules)  # each way makes a difference


def test_the_plot_is_made_of_the_results(forks: Run, tmp_path: Path) -> None:
    given = [str(ROOT / "bench/results" / name) for name in ("adamw.jsonl", "convergence.json")]
    given.append(str(tmp_path / "loss.png"))
    program = f"""
import sys
from bench.experiments import loss_plots
sys.argv = ["loss_plots", *{given!r}]
loss_plots.main()
"""
    ran(forks, program)
    assert (tmp_path / "loss.png").stat().st_size > 10_000


# -- local steps ------------------------------------------------------------------------------------------------------


def test_the_rules_of_local_steps_are_the_librarys(forks: Run) -> None:
    """Means and residuals of some rounds agree, except for the rounding order of sums."""
    program = """
import numpy as np
from bench.experiments.local_steps_rules import CHUNK, Ranks, Rule
import sparsecomm as sc
from sparsecomm.transport import simulated

P, ROUNDS, SIZES = 4, 3, {"a": 5000, "small": 300, "b": 9000}
deltas = np.random.default_rng(0).standard_normal((ROUNDS, P, sum(SIZES.values())), np.float32)
ends = np.cumsum([0, *SIZES.values()])

for method in ("dense", "allgather", "split"):
    for op in ("mean", "contributors"):
        ranks = Ranks(Rule(ranks=P, method=method, bits=32, op=op), list(SIZES.values()))
        plain = [ranks.step(each) for each in deltas]

        def program(comm):
            local = sc.LocalSteps(
                {name: np.zeros(size, np.float32) for name, size in SIZES.items()}, comm=comm, algorithm=method,
                sync_every=1, wire="packed" if method != "dense" else "auto", bucket_bytes=1 << 30,
                decay=1.0 if method == "dense" else 0.95, density=1.0 if method == "dense" else 64 / CHUNK,
                op="mean" if op == "mean" or method == "dense" else "mean_of_contributors",
            )
            found = []
            for each in deltas[:, comm.rank]:
                before = {name: array.copy() for name, array in local.global_parameters().items()}
                moved = {name: before[name] - each[b:e] for name, b, e in zip(SIZES, ends, ends[1:])}
                local.step(moved)
                found.append(np.concatenate([before[name] - moved[name] for name in SIZES]))
            return found

        for theirs in simulated.run(P, program):
            for mine, its in zip(plain, theirs.value):
                np.testing.assert_allclose(its, mine, atol=2e-6)
                assert np.count_nonzero(mine) > 300
print("alike")
"""
    assert ran(forks, program).strip() == "alike"


def test_results_of_local_steps_are_kept_and_shown(forks: Run, tmp_path: Path) -> None:
    """Each training is one line and is not repeated; tables show its loss. All in one process."""
    program = f"""
from bench.experiments import local_steps, local_steps_rules
runs = []
for example in (local_steps_rules, local_steps):
    out = {str(tmp_path)!r} + "/" + example.__name__.rpartition(".")[2] + ".jsonl"
    words = ["ranks=2", "steps=10", "sync_every=5", "method=dense,split", "bits=4", "--out", out]
    report = ["--report", out]
    runs += [(example, options) for options in (["colour=red"], words, words, report)]
"""
    parts = [part.splitlines() for part in ran(forks, program + EACH).split("= ")[1:]]
    for name, (refused, made, again, table) in (
        ("local_steps_rules.jsonl", parts[:4]),
        ("local_steps.jsonl", parts[4:]),
    ):
        assert "colour=red: expected NAME=VALUE" in refused[1]
        found = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len(made) - 1 == len(found) == 2
        assert len(again) == 1  # they are there already
        dense, split = (entry["outcome"]["loss"] for entry in found)
        assert dense < split < 4.6  # log 103 = 4.63 knows nothing
        assert all(f"{loss:.3f}" in "\n".join(table) for loss in (dense, split))
