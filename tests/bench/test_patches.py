"""The benchmark of patches, with small weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from bench import patches


def test_patches_of_simulated_weights_need_fewer_bits_than_others_count() -> None:
    row = patches.counted(*patches.simulated(1e-6, 1, n=300_000))
    assert 0.005 < row["changed"] < 0.03
    assert row["floor"] < row["patch"] < row["others"]


def test_the_entropy_of_changes() -> None:
    changed = np.arange(16) % 4 == 0  # 4 of 16
    position = -(12 * np.log2(12 / 16) + 4 * np.log2(4 / 16)) / 4
    assert patches.entropy(changed, np.array([1, 1, -1, -1]), np.zeros(16, int)) == pytest.approx(position + 1)
    assert patches.entropy(changed, np.array([1, 1, -1, -1]), np.arange(16) % 4) == pytest.approx(1)


def test_results_are_added_to_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stem = tmp_path / "results"
    (tmp_path / "results.json").write_text(
        '{"bits": {"run": {"command": "x", "machine": "y", "versions": {}, "date": "", "settings": {}}, "rows": []}}'
    )
    arguments = ["patches", "speed", "--elements", "100000", "--repeats", "2", "--write", str(stem)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("SPARSECOMM_THREADS", "1")
    patches.main()
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == ["bits", "speed"]
    assert [row["way"] for row in found["speed"]["rows"]][1::2] == ["diff", "apply"]
    assert "diff" in (tmp_path / "results.txt").read_text()
