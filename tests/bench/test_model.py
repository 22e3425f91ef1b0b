"""`bench.model`: its options, and the time of simulated ranks."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest

from bench import model, simulate
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.primitives.costs import Link
from sparsecomm.tuning.profile import DEFAULT, Profile
from sparsecomm.wire import WIRES


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    return parser.parse_args(arguments)


def problem(*arguments: str) -> simulate.Problem:
    return model.problem_of(parsed(*arguments))


def rows(*arguments: str) -> list[model.Row]:
    options = parsed("--n", "1M", *arguments)
    return list(model.rows(model.problem_of(options), options))


def outcome(*arguments: str) -> simulate.Outcome:
    (row,) = rows(*arguments)
    assert row["simulated"]
    return simulate.Outcome(**{field.name: row[field.name] for field in fields(simulate.Outcome)})


# -- the times --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["plain", "packed"])
@pytest.mark.parametrize("algorithm", ["dense", "allgather", "tree", "butterfly", "split"])
def test_as_the_formula(algorithm: str, wire: str) -> None:
    got = rows("--ranks", "2,4,8", "--n", "10M", "--algorithms", algorithm, "--wire", wire)
    assert [row["ranks"] for row in got] == [2, 4, 8]
    for row in got:
        for name, rel in (("exchange", 0.02), ("step", 0.05)):
            formula = row[f"formula_{name}_seconds"]
            assert row[f"{name}_seconds"] == pytest.approx(formula, rel=0.15 if algorithm == "split" else rel)


@pytest.mark.parametrize(
    ("algorithm", "wire"), [*product([*ALGORITHMS, "hierarchical:split"], ["auto"]), *product(["butterfly"], WIRES)]
)
def test_every_algorithm_and_wire_runs(algorithm: str, wire: str) -> None:
    arguments = ("--ranks", "6", "--ranks-per-node", "2", "--n", "64K", "--density", "0.01", "--wire", wire)
    got = outcome(*arguments, "--algorithms", algorithm)
    assert 0 < got.exchange_seconds < got.step_seconds
    assert got.sent_bytes_per_rank > 0
    assert got.received_bytes_per_rank > 0


@pytest.mark.parametrize("algorithm", ["allgather", "tree", "butterfly", "split"])
def test_a_smaller_problem_takes_as_long_and_as_many_bytes(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--ranks", "8", "--n", "32M", "--algorithms", algorithm)
    full = outcome(*arguments)
    monkeypatch.setattr(simulate, "_HANDLED", 1 << 16)
    monkeypatch.setattr(simulate, "_MIN", 4096)
    smaller = outcome(*arguments)
    assert full.scale == 1
    assert smaller.scale == pytest.approx(32000 / 4096, rel=0.01)
    assert smaller.messages_per_rank == full.messages_per_rank
    for name in ("exchange_seconds", "step_seconds", "sent_bytes_per_rank", "received_bytes_per_rank"):
        more = 0.03 if algorithm == "split" else 0.0  # with fewer entries, split sends a larger part
        assert getattr(smaller, name) == pytest.approx(getattr(full, name), rel=0.05 + more), name


def test_ranks_of_a_node_share_its_link(tmp_path: Path) -> None:
    free = tmp_path / "profile.json"
    free.write_text(Profile("MPI", 4, 2, replace(DEFAULT, node=Link(0, 1e-12))).as_json())
    arguments = ("--ranks", "8", "--n", "10M", "--algorithms", "butterfly", "--latency", "1us", "--profile", str(free))
    alone, (row,) = outcome(*arguments), rows(*arguments, "--ranks-per-node", "4")
    rounds = 4 / 3  # one of three rounds is between nodes, where four ranks share the link
    assert row["exchange_seconds"] == pytest.approx(rounds * alone.exchange_seconds, rel=0.05)
    assert row["exchange_seconds"] == pytest.approx(row["formula_exchange_seconds"], rel=0.05)
    assert row["sent_bytes_per_rank"] == alone.sent_bytes_per_rank


def test_auto_equals_the_algorithm_that_it_runs() -> None:
    auto, *others = rows("--ranks", "8", "--algorithms", "auto,tree,butterfly,split,dense")
    meant = next(row for row in others if row["algorithm"] == auto["runs"])
    assert auto == meant | {"algorithm": "auto"}
    assert auto["formula_step_seconds"] == min(row["formula_step_seconds"] for row in others)


# -- output -----------------------------------------------------------------------------------------------------------


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulate, "_MAX", 4)
    file, drawn = tmp_path / "model.json", tmp_path / "drawn.png"
    arguments = ["--ranks", "2:8", "--n", "100K", "--algorithms", "tree,split,auto"]
    arguments += ["--json", str(file), "--plot", str(drawn)]
    model.main(arguments)
    table = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    content = json.loads(file.read_text())
    assert content["schema"] == model.SCHEMA
    assert content["header"]["n"] == 100_000
    assert content["header"]["costs"]["link"] == {"alpha": 100e-6, "beta": 8e-9, "gap": 5e-6}
    got = content["rows"]
    assert len(got) == len(table) == 9
    assert [(r["ranks"], r["algorithm"]) for r in got] == [(P, a) for P in (2, 4, 8) for a in ("tree", "split", "auto")]
    assert [r["simulated"] for r in got] == [True] * 7 + [False, True]
    for row, line in zip(got, table, strict=True):
        words = line.split()
        assert ("~" in line) == (not row["simulated"])
        assert words[0] == str(row["ranks"])
        assert row["formula_exchange_seconds"] < row["formula_step_seconds"]
        assert row["machines"] == row["ranks"]
        if row["simulated"]:
            assert row["exchange_seconds"] < row["step_seconds"]
            times = [row[f"{name}_seconds"] for name in ("exchange", "formula_exchange", "step", "formula_step")]
            amounts = [row[f"{name}_per_rank"] for name in ("sent_bytes", "received_bytes", "messages")]
            assert words[-7:] == [*(f"{seconds * 1e3:.3f}" for seconds in times), *map(str, amounts)]
        else:
            assert row["exchange_seconds"] is row["sent_bytes_per_rank"] is None
            assert words[-1] == "-"
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
