"""The example that compares rules of error feedback: its plain NumPy and the library train alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, LIMIT, ROOT

EXAMPLE = str(ROOT / "examples/ablation.py")
SETTINGS = ENVIRONMENT | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
for needed in ("torch", "sklearn", "rich", "greenlet"):
    pytest.importorskip(needed)


def ran(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], env=SETTINGS, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rules_are_the_librarys() -> None:
    """The same trainings by both, of 20 steps: losses agree but for the order in which sums are rounded."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
from ablation import Variant, train
from convergence_training import Setting, simulate
for model, ours, theirs in (("digits", "butterfly", "butterfly"), ("digits", "split", "split"),
                            ("digits", "topk", "allgather"), ("text", "split", "split")):
    plain = train(Variant(model=model, ranks=4, method=ours, density=0.01, steps=20, momentum=0.5, decay=0.9))
    library = simulate(Setting(model, 4, theirs, 0.01, 0, 20, 0.5, decay=0.9))
    print(plain["loss"], library.loss)
"""
    pairs = [tuple(map(float, line.split())) for line in ran("-c", program).splitlines()]
    assert len(pairs) == 4
    for plain, library in pairs:
        assert plain == pytest.approx(library, rel=3e-5)  # with another masking it would not be


@pytest.mark.whole
def test_every_rule_trains() -> None:
    rules: list[dict[str, object]] = [
        *({"keep": keep} for keep in ("owner", "merger")),
        *({"mask": mask} for mask in ("none", "selected", "applied")),
        *({"complete": complete} for complete in ("sum", "root", "contributors")),
        *({"bits": bits} for bits in (8, 16)),
        *({"method": method} for method in ("topk", "butterfly", "dense")),
        {"place": "after"},
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
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
from ablation import Variant, train
for rule in {rules!r}:
    usual = dict(model="digits", ranks=4, density=0.02, momentum=0.5, steps=32)
    print(train(Variant(**(usual | rule)))["loss"])
"""
    losses = dict(zip(map(str, rules), map(float, ran("-c", program).splitlines()), strict=True))
    assert len(losses) == len(rules)
    assert all(loss < 2.295 for loss in losses.values()), losses  # log 10 knows nothing
    assert len(set(losses.values())) == len(rules)  # each rule makes a difference


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "rules.jsonl"
    command = [EXAMPLE, "model=digits", "ranks=2", "density=0.1,0.2", "steps=8", "--jobs", "2", "--out", str(out)]
    told = ran(*command).splitlines()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(told) == len(found) == 2
    assert not ran(*command)  # they are there already
    table = ran(EXAMPLE, "--report", str(out))
    for entry in found:
        assert f"{entry['outcome']['score']:.3f}" in table


def test_an_unknown_rule_is_refused() -> None:
    done = subprocess.run([sys.executable, EXAMPLE, "colour=red"], env=SETTINGS, capture_output=True, text=True)
    assert done.returncode != 0
    assert "colour=red: expected NAME=VALUE" in done.stderr
