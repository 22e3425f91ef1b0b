"""The grid of utilisation: a small run that is continued, its tables and its pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from bench.utilisation import grid, tables

ROOT = Path(__file__).parents[2]


def row(rate: float, method: str, H: int, utilisation: float, rtt: float = 0.0, **more: Any) -> dict[str, Any]:
    round_s = H * grid.STEP / utilisation
    where = {"rate": rate, "rtt": rtt, "loss": 0.0, "method": method, "H": H, **grid.METHODS[method]}
    took = {"utilisation": utilisation, "round_s": round_s, "exchange_s": round_s - H * grid.STEP, "rounds": 3}
    return {**where, **took, "busy": 0.5, "load": 0.1, **more}


def utilisation(out: Path, *options: str) -> tuple[int, str]:
    command = (sys.executable, "-m", "bench.utilisation", "--out", str(out), *options)
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return ran.returncode, ran.stdout + ran.stderr


def test_a_small_grid_is_measured_kept_and_gone_on_with(tmp_path: Path) -> None:
    options = ["--no-network", "--ranks", "2", "--elements", "50000", "--step", "0.001", "--seconds", "0.01", "60"]
    status, said = utilisation(tmp_path / "it", *options, "--H", "1", "2")
    assert status == 0, said
    kept = json.loads((tmp_path / "it.json").read_text())
    found = {(each["method"], each["H"]): each for each in kept["rows"]}
    expected = {(method, H) for method in ("dense", "blocking", "delayed") for H in (1, 2)} - {("delayed", 1)}
    assert found.keys() == expected | {("per-step 0.01", 1), ("per-step 0.001", 1)}
    for (_, H), each in found.items():
        assert 0 < each["utilisation"] < 1
        assert each["round_s"] == pytest.approx(H * 0.001 + each["exchange_s"])
        assert each["rounds"] >= 3
    assert found["blocking", 2]["sent"] < 0.3 * 4 * 50000  # of which a 64th is selected
    assert (tmp_path / "it.png").stat().st_size > 10_000

    kept["rows"].remove(found["dense", 1])  # as of a run that was interrupted
    (tmp_path / "it.json").write_text(json.dumps(kept))
    status, said = utilisation(tmp_path / "it", *options, "--H", "1", "2", "--methods", "dense", "blocking")
    assert status == 0, said
    assert "1 cells on 1 networks" in said
    after = json.loads((tmp_path / "it.json").read_text())["rows"]
    assert [each for each in after if each["run"] == 0] == kept["rows"]
    assert [(each["method"], each["H"]) for each in after if each["run"] == 1] == [("dense", 1)]

    status, said = utilisation(tmp_path / "it", *options[:-3], "--step", "0.002", "--report")
    assert status != 0
    assert "is of" in said


def test_dense_cells_stand_beside_the_published_ones() -> None:
    """A cell whose exchange takes as long as the published one has the ratio 1."""
    H, rate = 32, 200e6
    same = H * grid.STEP / (H * grid.STEP + grid.EXCHANGE[H, rate])
    rows = [row(rate, "dense", H, same), row(rate, "dense", H, 0.5, rtt=0.08), row(rate, "blocking", H, 0.9)]
    head, line = tables.pages(rows)["utilisation_published"]
    found = dict(zip(head, line, strict=True))
    assert found["measured here / from the published exchange"] == "1.00"
    assert found["exchange here, s"] == found["published exchange, s"] == "8.24"


def test_tables_say_what_was_measured_and_how_far_plans_are() -> None:
    rows = [
        row(50e6, "dense", 8, 0.0055, planned=0.0155), row(1e9, "dense", 8, 0.12, planned=0.22),
        row(1e9, "blocking", 8, 0.55), row(1e9, "delayed", 8, 0.951, rtt=0.08, planned=0.941),
        row(50e6, "per-step 0.01", 1, 0.04),
    ]  # fmt: skip
    made = tables.pages(rows)
    assert made["utilisation_local"] == [
        [
            "round trip, ms",
            "packet loss",
            "H",
            *(f"{rate}: {' / '.join(tables.LOCAL)}" for rate in ("50 Mb/s", "1 Gb/s")),
        ],
        ["0", "0 %", "8", "0.55 / - / -", "12 / 55 / -"],
        ["80", "0 %", "8", "- / - / -", "- / - / 95"],
    ]
    assert made["utilisation_steps"] == [
        ["round trip, ms", "packet loss", *(f"{rate}: {' / '.join(tables.STEPS)}" for rate in ("50 Mb/s", "1 Gb/s"))],
        ["0", "0 %", "4.0 / -", "- / -"],
    ]
    assert [line[:5] for line in made["utilisation_plan"][1:]] == [
        ["delayed", "1", "1", "1.0", "-1.0"], ["all held out", "1", "1", "1.0", "-1.0"],
        ["not held out", "2", "1", "5.5", "+10.0"],
    ]  # fmt: skip


def test_held_out_cells_do_not_change_predictions() -> None:
    """Only the CPU time of cells without delay and losses calibrates the work."""
    setting = {"ranks": 4, "elements": 10**6, "step": grid.STEP, "cores": 2}
    near, far = row(1e9, "blocking", 8, 0.5), row(1e9, "blocking", 8, 0.4, rtt=0.08)
    found = tables.predictions([near, far], setting)
    assert tables.predictions([near, far | {"busy": 0.9, "utilisation": 0.1}], setting) == found
    busier = tables.predictions([near | {"busy": 1.0}, far], setting)
    assert all(after < before for after, before in zip(busier, found, strict=True))


def test_heat_maps_are_drawn_of_what_there_is() -> None:
    rows = [row(rate, method, H, 0.3, rtt) for rate in (5e7, 1e9) for method in ("dense", "blocking") for H in (1, 8)
            for rtt in (0.0, 0.08)]  # fmt: skip
    figure = tables.heat_maps(tables.by_cell(rows[:-1]))
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert len(panels) == 4  # two methods, two delays
    assert sum(len(axes.texts) for axes in panels) == len(rows) - 1
    assert {text.get_text() for axes in panels for text in axes.texts} == {"30"}
