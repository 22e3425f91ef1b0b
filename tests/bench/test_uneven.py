"""Few and short rounds of ranks with different speeds, by `bench.uneven`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import mpirun, needs_mpirun


@pytest.mark.mpi
@needs_mpirun
def test_by_speed_nobody_waits_for_the_slowest(tmp_path: Path) -> None:
    """A rank that sleeps six times as long takes fewer local steps, or makes the other one wait."""
    options = ["--speeds", "1", "6", "--unit", "0.02", "--sync-every", "5", "--rounds", "3", "--elements", "1000"]
    status, said = mpirun(2, "-m", "bench.uneven", *options, "--write", str(tmp_path / "it"))
    assert status == 0, said
    kept = {row["way"]: row for row in json.loads((tmp_path / "it.json").read_text())["rows"]}
    assert list(kept) == ["equally many local steps", "by speed", "by speed, delayed"]
    assert all(way in said for way in kept)
    equal = kept.pop("equally many local steps")
    assert (equal["steps"], equal["tokens"]) == ([5, 5], 30)
    for row in kept.values():
        first, second = row["steps"]  # 9 and 1, or 8 and 2 where sleeps last 20 ms longer than they are asked to
        assert 9 <= first + second <= 11
        assert first >= 3 * second
        assert 27 <= row["tokens"] <= 33
        assert row["seconds"] < 0.8 * equal["seconds"]  # at most 12 units of a round instead of 30
        assert equal["computing"] < 0.65  # (1 + 6) / 2 of 6
