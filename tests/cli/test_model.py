"""`sparsecomm model`: what it refuses, and whether simulated ranks take the time that they should."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.cli import main
from sparsecomm.cli.model import options, report, simulate
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.tuning.profile import DEFAULT, Profile
from sparsecomm.wire import WIRES


def parsed(*given: str) -> options.Asked:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.parse(parser.parse_args(given))


def rows(*given: str) -> list[simulate.Row]:
    return list(simulate.rows(parsed("--n", "1M", *given)))


def found(*given: str) -> simulate.Found:
    (row,) = rows(*given)
    assert row.found is not None
    return row.found


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ranks"),
    [("2:16", (2, 4, 8, 16)), ("2:15", (2, 4, 8)), ("3:20", (3, 6, 12)), ("5:5", (5,)), ("8,3,8", (3, 8)), ("1", (1,))],
)
def test_ranks(given: str, ranks: tuple[int, ...]) -> None:
    assert parsed("--ranks", given).ranks == ranks


def test_units() -> None:
    asked = parsed(
        "--rate",
        "2.5Gbit",
        "--latency",
        "20us",
        "--node-rate",
        "80gbit",
        "--node-latency",
        "500ns",
        "--straggler",
        "20ms",
        "--n",
        "25.6M",
        "--density",
        "0.001",
    )
    assert asked.costs.link == Link(pytest.approx(20e-6), pytest.approx(3.2e-9))
    assert asked.costs.node == Link(pytest.approx(500e-9), pytest.approx(1e-10))
    assert asked.costs.merge == DEFAULT.merge
    assert (asked.straggler, asked.n, asked.k) == (0.02, 25_600_000, 25_600)


def test_a_profile(tmp_path: Path) -> None:
    costs = Costs(Link(1e-5, 1e-9), None, merge=7e-9)
    file = tmp_path / "profile.json"
    file.write_text(Profile("MPI", 4, 2, costs).as_json())
    asked = parsed("--profile", str(file), "--rate", "1gbit")
    assert asked.costs == replace(costs, link=Link(1e-5, 8e-9), node=costs.link)
    assert asked.source == f"profile {file}"
    with pytest.raises(sc.InvalidInputError, match="--profile /no/such: it cannot be read"):
        parsed("--profile", "/no/such")


REFUSED = [
    (["--ranks", ""], "--ranks : expected A:B"),
    (["--ranks", "8:2"], "--ranks 8:2: no number is in this range"),
    (["--ranks", "0:4"], "--ranks 0:4: expected"),
    (["--ranks", "2,x"], "--ranks 2,x: expected"),
    (["--ranks", "1:2000000"], "at most 1048576 ranks"),
    (["--rate", "fast"], "--rate fast: expected a number above 0 and a unit, such as 1gbit"),
    (["--rate", "0gbit"], "--rate 0gbit"),
    (["--rate", "10"], "--rate 10:"),
    (["--node-rate", "1GB"], "--node-rate 1GB"),
    (["--latency", "5"], "--latency 5: expected a number and a unit, such as 100us"),
    (["--straggler", "-1s"], "--straggler -1s"),
    (["--ranks-per-node", "0"], "--ranks-per-node 0: expected a whole number, at least 1"),
    (["--n", "0"], "--n 0: expected a number from 1 on"),
    (["--density", "0"], "--density 0: expected a number above 0 and up to 1"),
    (["--density", "nan"], "--density nan"),
    (["--shared", "1.5"], "--shared 1.5: expected a number from 0 to 1"),
    (["--seed", "x"], "--seed x"),
    (["--algorithms", "tree,ring"], "expected one of auto, butterfly, tree, split"),
    (["--algorithms", ""], "algorithm='': expected one of auto"),
    (["--wire", "zip"], "--wire zip: expected one of auto, plain, packed"),
    (["--json", "/no/such/folder/a.json"], "/no/such/folder/a.json: cannot be written"),
    (["--plot", "/no/such/folder/a.png"], "/no/such/folder/a.png: cannot be written"),
    (["--plot", "a.docx"], "ends in .png, .pdf, .svg"),
    (["--plot", "a.png", "--json", "a.png"], "expected two files"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[" ".join(g).replace("/", "_") for g, _ in REFUSED])
def test_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "rows", None)  # before anything is run
    assert main(["model", *(f"{a}={b}" for a, b in zip(given[::2], given[1::2], strict=True))]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("sparsecomm: ")
    assert shown.out == ""


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    assert main(["model", "--ranks", "2"]) == 1
    assert re.search(r"greenlet: pip install .*\[simulated\]", capsys.readouterr().err)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sc.InvalidInputError, match=r"matplotlib: pip install .*\[bench\]"):
        parsed("--plot", "a.png")


# -- the times --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["plain", "packed"])
@pytest.mark.parametrize("algorithm", ["dense", "allgather", "tree", "butterfly", "split"])
def test_as_the_formula(algorithm: str, wire: str) -> None:
    got = rows("--ranks", "2,4,8", "--n", "10M", "--algorithms", algorithm, "--wire", wire)
    assert [row.P for row in got] == [2, 4, 8]
    for row in got:
        assert row.found is not None
        assert row.found.exchange == pytest.approx(row.exchange, rel=0.15 if algorithm == "split" else 0.02)
        assert row.found.step == pytest.approx(row.step, rel=0.15 if algorithm == "split" else 0.05)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "hierarchical:split"])
def test_every_algorithm_runs(algorithm: str) -> None:
    got = found("--ranks", "6", "--ranks-per-node", "2", "--n", "64K", "--density", "0.01", "--algorithms", algorithm)
    assert 0 < got.exchange < got.step
    assert got.sent > 0
    assert got.received > 0


@pytest.mark.parametrize("wire", WIRES)
def test_every_wire_runs(wire: str) -> None:
    assert found("--ranks", "3", "--algorithms", "butterfly", "--wire", wire).exchange > 0


def test_one_rank_sends_nothing() -> None:
    got = found("--ranks", "1", "--algorithms", "butterfly")
    assert (got.exchange, got.sent, got.messages) == (0, 0, 0)
    assert got.step == pytest.approx(DEFAULT.select * 1e6)


@pytest.mark.parametrize("algorithm", ["allgather", "tree", "butterfly", "split"])
def test_a_smaller_problem_takes_as_long_and_as_many_bytes(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--ranks", "8", "--n", "32M", "--algorithms", algorithm)
    whole = found(*given)
    monkeypatch.setattr(simulate, "_HANDLED", 1 << 16)
    monkeypatch.setattr(simulate, "_MIN", 4096)
    smaller = found(*given)
    assert whole.scale == 1
    assert smaller.scale == pytest.approx(32000 / 4096, rel=0.01)
    assert smaller.messages == whole.messages
    for name in ("exchange", "step", "sent", "received"):
        assert getattr(smaller, name) == pytest.approx(getattr(whole, name), rel=0.05), name


def test_ranks_of_a_node_share_its_link() -> None:
    given = ("--ranks", "8", "--n", "10M", "--algorithms", "butterfly", "--latency", "1us")
    alone, shared = (
        found(*given),
        found(*given, "--ranks-per-node", "4", "--node-latency", "0s", "--node-rate", "1tbit"),
    )
    assert shared.exchange == pytest.approx(4 / 3 * alone.exchange, rel=0.05)  # one round of three, but four at a time
    assert shared.sent == alone.sent
    (row,) = rows(*given, "--ranks-per-node", "4", "--node-latency", "0s", "--node-rate", "1tbit")
    assert shared.exchange == pytest.approx(row.exchange, rel=0.05)


@pytest.mark.parametrize("algorithm", ["tree", "butterfly", "split", "dense"])
def test_all_wait_for_a_straggler(algorithm: str) -> None:
    given = ("--ranks", "8", "--algorithms", algorithm)
    late, punctual = found(*given, "--straggler", "20ms"), found(*given)
    assert 0.0195 < late.step - punctual.step < 0.0201
    assert late.sent == punctual.sent


def test_shared_entries_make_sums_shorter() -> None:
    apart, equal = (found("--ranks", "8", "--algorithms", "ssar_recursive_doubling", "--shared", s) for s in "01")
    assert equal.sent < 0.6 * apart.sent


def test_auto_is_what_it_stands_for() -> None:
    auto, *others = rows("--ranks", "8", "--algorithms", "auto,tree,butterfly,split,dense")
    assert auto.found == next(row.found for row in others if row.name == auto.chosen.algorithm.name)
    assert auto.step == min(row.step for row in others)


def test_what_would_take_long_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_MAX", 4)
    split, tree = rows("--ranks", "8", "--algorithms", "split,tree")
    assert split.found is None
    assert tree.found is not None
    assert "~" in report.table_line(split)
    assert "~" not in report.table_line(tree)
    (split,) = rows("--ranks", "8", "--algorithms", "split", "--all")
    assert split.found is not None


def test_gradients() -> None:
    """As many entries as asked, at different places, those of all ranks among them; as large as a top-k's are."""
    rng = np.random.default_rng(0)
    values = np.abs(simulate._largest(rng, 100_000, 0.001))
    assert values.min() > 3.29
    assert np.mean(values > 3.4808) == pytest.approx(0.5, abs=0.01)  # the normal distribution's tail of 0.0005
    assert simulate._largest(rng, 7, 1.0).shape == (7,)
    assert len(set(simulate._some(rng, 100, 90).tolist())) == 90


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulate, "_MAX", 4)
    file, drawn = tmp_path / "found.json", tmp_path / "drawn.png"
    given = [
        "--ranks",
        "2:8",
        "--n",
        "100K",
        "--algorithms",
        "tree,split,auto",
        "--json",
        str(file),
        "--plot",
        str(drawn),
    ]
    assert main(["model", *given]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    content = json.loads(file.read_text())
    assert content["schema"] == report.SCHEMA
    assert content["header"]["n"] == 100_000
    assert content["header"]["costs"]["link"] == {"alpha": 100e-6, "beta": 8e-9}
    got = content["rows"]
    assert len(got) == len(table) == 9
    assert [(r["ranks"], r["algorithm"]) for r in got] == [(P, a) for P in (2, 4, 8) for a in ("tree", "split", "auto")]
    assert [r["simulated"] for r in got] == [True] * 7 + [False, True]
    for row, line in zip(got, table, strict=True):
        words = line.split()
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


def test_needs_no_mpi() -> None:
    code = (
        "import sys; sys.modules['mpi4py.MPI'] = None\n"
        "from sparsecomm.cli import main; sys.exit(main(['model', '--ranks', '2', '--n', '10K']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
