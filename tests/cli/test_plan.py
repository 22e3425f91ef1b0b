"""`sparsecomm plan`: its advice, its checks, and its measurement of the links between ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.cli import main, plan
from sparsecomm.cli.plan import methods
from sparsecomm.optimizers import options as adamw
from sparsecomm.primitives.costs import Costs
from sparsecomm.reducer.options import DENSITY
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.tuning.utilisation import Network, Training
from tests.cli.test_cli import shell
from tests.processes import torchrun

MODEL = ("--parameters", "30.8M", "--step-time", "30ms")
FAR = ("--ranks", "4", "--rate", "50mbit", "--rtt", "80ms", *MODEL)
TRAINING = Training(4, 30_800_000, 0.03)
MEASURE = ("-m", "sparsecomm", "plan", "--measure", "--seconds", "0.1s", *MODEL)


def best(network: Network, training: Training = TRAINING, costs: Costs = DEFAULT) -> methods.Way:
    return methods.best(list(methods.ways(training, network, (1, 8, 32, 128), costs)))


# -- output -----------------------------------------------------------------------------------------------------------


def test_the_file_says_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`test_the_page_shows_the_output_of_its_command` compares a table."""
    pytest.importorskip("matplotlib")
    file, drawn = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main(["plan", *FAR, "--loss", "0.1%", "--json", str(file), "--plot", str(drawn)]) == 0
    shown, content = capsys.readouterr().out, json.loads(file.read_text())
    header, rows = content["header"], content["rows"]
    assert content["schema"] == plan.SCHEMA
    assert (header["ranks"], header["parameters"], header["step_seconds"]) == (4, 30_800_000, 0.03)
    assert (header["rate"], header["rtt"], header["loss"], header["ranks_per_node"]) == (50e6, 0.08, 0.001, 1)
    assert len(rows) == sum(line.startswith(" ") and line[1] != " " for line in shown.splitlines()) == 13
    for row in rows:
        H = row["sync_every"] or 1
        assert row["utilisation"] == pytest.approx(H * 0.03 / row["round_seconds"])
        assert row["step_seconds"] == pytest.approx(row["round_seconds"] / H)
        assert (row["nats_above_dense"] is None) == (row["seconds_at_equal_loss"] is None)
        assert (row["nats_above_dense"] or 0) >= 0  # no row promises a lower loss than dense
    assert f"sync_every={rows[content['taken']]['sync_every']}" in shown
    assert content["advice"][0] == "Sparse sums pay off here."
    assert all(line in shown for line in content["advice"])
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_line_to_paste_can_be_run() -> None:
    torch = pytest.importorskip("torch")
    from mpi4py import MPI

    import sparsecomm.torch

    for network in (Network(50e6, 0.08), Network(50e6, 0.08, 0.001), Network(1e9)):
        taken = best(network)
        line = next(line for line in methods._code(taken) if line.startswith("diloco = "))
        model = torch.nn.Linear(64, 64)
        names = {"sparsecomm": sparsecomm, "model": model, "inner": torch.optim.AdamW(model.parameters())}
        pasted = line.removeprefix("diloco = ").replace("inner, ", "inner, comm=comm, ")
        with eval(pasted, names | {"comm": MPI.COMM_SELF}) as diloco:
            assert repr(diloco).find(f"sync_every={taken.H},") > 0


def test_the_page_shows_the_output_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "plan.md").read_text()
    command, shown = re.findall(r"```console\n\$ sparsecomm (plan .*?) --plot plan\.png\n(.*?)```", page, re.DOTALL)[0]
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown.replace("...", sc.__version__, 1)


@pytest.mark.parametrize("method", methods.SETTINGS)
def test_rows_are_the_settings_of_the_lines_to_paste(method: str) -> None:
    """The arguments are valid for a reducer. Without them, density and wire are the defaults of the library."""
    for arguments, exchange in methods.SETTINGS[method]:
        options = eval(f"dict({arguments})")
        _reducer(**options)
        default = DENSITY.density if method == methods.SGD else adamw.DENSITY
        assert exchange.density == options.get("density", default)
        if "algorithm" not in options:
            assert (exchange.algorithm, exchange.wire) == ("double", options.get("wire", "packed_int2"))


def _reducer(density: float = 0.1, **options: Any) -> sc.Reducer:
    from mpi4py import MPI

    return sc.Reducer({"x": np.zeros(4096, np.float32)}, density, comm=MPI.COMM_SELF, **options)


@pytest.mark.parametrize("size", [(8, 2), (64, 8), (8, 8), (8, 1)])
def test_nodes_count_as_one(size: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With several nodes of several ranks, there are rows with and without ``nodes=False``."""
    file, (ranks, per_node) = tmp_path / "plan.json", size
    words = f"--ranks {ranks} --ranks-per-node {per_node} --json {file}"
    assert main(["plan", *words.split(), *FAR[2:]]) == 0
    assert ("equal loss  nodes\n" in capsys.readouterr().out) == (1 < per_node < ranks)
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        assert row["participants"] == (ranks // per_node if row["nodes"] else ranks)
        assert (row["arguments"] == "nodes=False") <= (not row["nodes"])
    assert {row["nodes"] for row in rows} == ({True, False} if 1 < per_node < ranks else {False})


def test_it_does_not_advise_what_trains_badly() -> None:
    """On every network, the advice is neither an H with too few rounds nor a delay of most of a round."""
    for rate in (1e6, 1e7, 1e8, 1e9, 1e10):
        for rtt in (0.0, 0.02, 0.3):
            for loss in (0.0, 0.001, 0.01):
                ways = list(methods.ways(TRAINING, Network(rate, rtt, loss), (1, 8, 32, 128), DEFAULT))
                taken = methods.best(ways)
                min_seconds = min(way.seconds for way in ways)
                assert min_seconds <= taken.seconds <= 1.05 * min_seconds or taken.predicted.utilisation >= 0.9
                assert taken.exchange.delay <= 0.6 * taken.H
                assert taken.loss is not None
                assert taken.loss < 0.62


# -- measurements -----------------------------------------------------------------------------------------------------


def test_measures_under_mpirun(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    ran = shell(*MEASURE, "--rtt", "40ms", "--json", str(file), ranks=3)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^ranks +3 on 1 machine: .* \(3\)$", ran.stdout, re.MULTILINE)
    assert re.search(r"^rates +.* in messages of the library", ran.stdout, re.MULTILINE)
    assert "all ranks are on one machine: these are not measurements of a network" in ran.stdout
    assert ran.stdout.count("# training") == 1
    header = json.loads(file.read_text())["header"]
    assert (header["ranks"], header["rtt"]) == (3, 0.04)  # options override measurements
    assert 1e6 < header["rate"] < 1e13


@pytest.mark.exhaustive
def test_measures_under_torchrun() -> None:
    pytest.importorskip("torch")
    status, said = torchrun(2, *MEASURE)
    assert status == 0, said
    assert re.search(r"^interfaces +lo \(127.0.0.1\)$", said, re.MULTILINE)
    assert re.search(r"^rates +.* in one TCP stream, .* in 8 TCP streams$", said, re.MULTILINE)
    assert re.search(r"^losses +.* % of the packets$", said, re.MULTILINE)
    assert re.search(r"^TCP +(cubic|reno|bbr)", said, re.MULTILINE)
