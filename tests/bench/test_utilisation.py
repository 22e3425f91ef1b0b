"""The grid of utilisation: a small run that is continued, its tables and its pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from bench.utilisation import grid, tables
from bench.utilisation.__main__ import main
from tests.forks import Run

ROOT = Path(__file__).parents[2]


def row(rate: float, method: str, H: int, utilisation: float, rtt: float = 0.0, **more: Any) -> dict[str, Any]:
    round_s = H * grid.STEP / utilisation
    where = {"rate": rate, "rtt": rtt, "loss": 0.0, "method": method, "H": H, **grid.METHODS[method]}
    took = {"utilisation": utilisation, "round_s": round_s, "exchange_s": round_s - H * grid.STEP, "rounds": 3}
    return {**where, **took, "busy": 0.5, "load": 0.1, **more}


def test_a_small_grid_is_measured_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forks: Run
) -> None:
    def utilisation(out: Path, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["bench.utilisation", "--out", str(out), *options])
        return main(), "".join(capsys.readouterr())

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of ranks
    options = ["--no-network", "--ranks", "2", "--elements", "50000", "--step", "0.001", "--seconds", "0.01", "60"]
    status, said = utilisation(tmp_path / "it", *options, "--H", "1", "2")
    assert status == 0, said
    content = json.loads((tmp_path / "it.json").read_text())
    cells = {(cell["method"], cell["H"]): cell for cell in content["rows"]}
    expected = {(method, H) for method in ("dense", "blocking", "delayed") for H in (1, 2)} - {("delayed", 1)}
    assert cells.keys() == expected | {("per-step 0.01", 1), ("per-step 0.001", 1)}
    for (_, H), cell in cells.items():
        assert 0 < cell["utilisation"] < 1
        assert cell["round_s"] == pytest.approx(H * 0.001 + cell["exchange_s"])
        assert cell["rounds"] >= 3
    assert cells["blocking", 2]["sent"] < 0.3 * 4 * 50000  # dense sums would send 4 bytes per element
    assert (tmp_path / "it.png").stat().st_size > 10_000

    monkeypatch.setattr(grid, "_here", lambda P, command, environment: forks(*command, ranks=P)[0])
    content["rows"].remove(cells["dense", 1])  # as if the run had been interrupted
    (tmp_path / "it.json").write_text(json.dumps(content))
    status, said = utilisation(tmp_path / "it", *options, "--H", "1", "2", "--methods", "dense", "blocking")
    assert status == 0, said
    assert "1 cells on 1 networks" in said
    after = json.loads((tmp_path / "it.json").read_text())["rows"]
    assert [cell for cell in after if cell["run"] == 0] == content["rows"]
    assert [(cell["method"], cell["H"]) for cell in after if cell["run"] == 1] == [("dense", 1)]

    with pytest.raises(SystemExit, match="is of"):
        utilisation(tmp_path / "it", *options[:-3], "--step", "0.002", "--report")


def test_dense_cells_are_compared_with_published_ones() -> None:
    """A cell whose exchange takes as long as the published one has the ratio 1."""
    H, rate = 32, 200e6
    same = H * grid.STEP / (H * grid.STEP + grid.EXCHANGE[H, rate])
    rows = [row(rate, "dense", H, same), row(rate, "dense", H, 0.5, rtt=0.08), row(rate, "blocking", H, 0.9)]
    head, line = tables.pages(rows)["utilisation_published"]
    cells = dict(zip(head, line, strict=True))
    assert cells["measured here / from the published exchange"] == "1.00"
    assert cells["exchange here, s"] == cells["published exchange, s"] == "8.24"
