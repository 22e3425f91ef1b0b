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


def ran(*arguments: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLE, *arguments], env=SETTINGS, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_the_rules_are_the_librarys() -> None:
    """The same trainings by both, of 40 steps: losses agree but for the order in which sums are rounded."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
from ablation import Variant, train
from convergence_training import Setting, simulate
for model, ours, theirs in (("digits", "butterfly", "butterfly"), ("digits", "split", "split"),
                            ("digits", "topk", "allgather"), ("text", "split", "split")):
    plain = train(Variant(model=model, ranks=4, method=ours, density=0.01, steps=40, momentum=0.5))
    library = simulate(Setting(model, 4, theirs, 0.01, 0, 40, 0.5))
    print(plain["loss"], library.loss)
"""
    done = subprocess.run([sys.executable, "-c", program], env=SETTINGS, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    pairs = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(pairs) == 4
    for plain, library in pairs:
        assert plain == pytest.approx(library, rel=1e-4)


def test_every_rule_trains_and_the_table_has_its_score(tmp_path: Path) -> None:
    out = tmp_path / "rules.jsonl"
    rules = [
        "keep=merger,owner",
        "mask=none,selected,applied",
        "complete=sum,root,contributors",
        "place=after",
        "decay=0.9",
        "clamp=1.5",
        "scope=tensor",
        "lowpass=0.5",
        "regular=1",
        "bits=8,16",
        "share=2",
        "nesterov=1",
        "threshold=0.05",
        "ef21=0.2",
        "method=topk,butterfly,dense",
    ]
    common = ["model=digits", "ranks=2", "density=0.1", "momentum=0.5", "steps=24", "--out", str(out)]
    for rule in rules:
        ran(rule, *common)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) == 21 - 1  # keep=owner is mask=both, and the usual
    for entry in found:
        assert entry["outcome"]["loss"] < 2.36, entry["variant"]
        assert entry["outcome"]["curve"]
    again = ran("decay=0.9", *common)
    assert not again  # it is there already
    table = ran("--report", str(out))
    for entry in found:
        assert f"{entry['outcome']['score']:.3f}" in table


def test_an_unknown_rule_is_refused() -> None:
    done = subprocess.run([sys.executable, EXAMPLE, "colour=red"], env=SETTINGS, capture_output=True, text=True)
    assert done.returncode != 0
    assert "colour=red: expected NAME=VALUE" in done.stderr
