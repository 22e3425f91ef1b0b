"""`bench.check` names ratios that are slower than recorded, and measures again before it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from bench import check


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[float]]:
    """Record 1.0 for a time and for a count, and return the lists of the ratios that are measured next, by group."""
    after: dict[str, list[float]] = {"calls": [], "counts": []}
    groups = {g: lambda v=v, g=g: {f"{g} / baseline": v.pop(0) if v else 1.0} for g, v in after.items()}
    monkeypatch.setattr(check, "GROUPS", groups)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "FILE", tmp_path / "check.json")
    assert check.main(["--record", *groups]) == 0
    return after


def test_equal_ratios(ratios: dict[str, list[float]], capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["calls", "counts"]) == 0
    assert "no ratio is slower" in capsys.readouterr().out


def test_slower_ratios_are_named(ratios: dict[str, list[float]], capsys: pytest.CaptureFixture[str]) -> None:
    ratios["calls"] += [1.2] * check.TURNS * check.ATTEMPTS
    ratios["counts"] += [1.03] * check.ATTEMPTS
    assert check.main(["calls", "counts"]) == 1
    said = capsys.readouterr().out
    assert "SLOWER  calls / baseline: 1.200 (recorded 1.000, bound 1.150)" in said
    assert "SLOWER  counts / baseline: 1.030 (recorded 1.000, bound 1.020)" in said


def test_recording_a_group_keeps_the_records_of_the_others(ratios: dict[str, list[float]]) -> None:
    before = json.loads(check.FILE.read_text())
    ratios["calls"] += [2.0] * check.RECORDED_TURNS
    assert check.main(["--record", "calls"]) == 0
    after = json.loads(check.FILE.read_text())
    assert after["counts"] == before["counts"]
    assert after["calls"]["ratios"] == {"calls / baseline": [2.0] * check.RECORDED_TURNS}
    commands = [after[group]["run"]["command"] for group in ("calls", "counts")]
    assert commands == ["python -m bench.check --record calls", "python -m bench.check --record calls counts"]


def test_a_group_without_a_record_is_named(
    ratios: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(check.GROUPS, "step", lambda: {"step / baseline": 1.0})
    with pytest.raises(SystemExit):
        check.main(["calls", "step"])
    assert "no ratios of step; record them with --record step" in capsys.readouterr().err


def test_noise_passes(ratios: dict[str, list[float]]) -> None:
    ratios["calls"] += [1.5] * check.TURNS * (check.ATTEMPTS - 1)
    assert check.main(["calls"]) == 0


def test_a_ratio_that_is_no_longer_measured_is_named(
    ratios: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(check.GROUPS, "calls", lambda: {"another": 1.0})
    assert check.main(["calls"]) == 1
    assert "MISSING calls / baseline" in capsys.readouterr().out
