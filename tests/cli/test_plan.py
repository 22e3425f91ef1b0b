"""`sparsecomm plan`: its advice, its checks, and its measurement of the links between ranks."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.cli import main, plan
from sparsecomm.cli.plan import methods
from sparsecomm.cli.plan import network as measurement
from sparsecomm.optimizers import options as adamw
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.reducer.options import DENSITY
from sparsecomm.tuning.links import _all_pairs
from sparsecomm.tuning.profile import DEFAULT, Profile
from sparsecomm.tuning.utilisation import Network, Training
from tests.cli.test_cli import shell
from tests.processes import LIMIT, torchrun

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
    assert set(rows[0]) == {
        "method", "arguments", "sync_every", "fragment_sync_delay", "nodes", "participants", "density", "algorithm",
        "wire", "exchange_seconds", "bytes_per_round", "round_seconds", "step_seconds", "utilisation",
        "nats_above_dense", "seconds_at_equal_loss",
    }  # fmt: skip
    for row in rows:
        H = row["sync_every"] or 1
        assert row["utilisation"] == pytest.approx(H * 0.03 / row["round_seconds"])
        assert row["step_seconds"] == pytest.approx(row["round_seconds"] / H)
        assert (row["nats_above_dense"] is None) == (row["seconds_at_equal_loss"] is None)
        assert (
            row["nats_above_dense"] is None or row["nats_above_dense"] >= 0
        )  # no row promises a lower loss than dense
    assert f"sync_every={rows[content['taken']]['sync_every']}" in shown
    assert content["advice"][0] == "Sparse sums pay off here."
    assert all(line in shown for line in content["advice"])
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(("method", "H"), [(methods.ADAMW, 1), (methods.LOCAL, 1), (methods.LOCAL, 8)])
def test_circles_lie_on_curves(method: str, H: int) -> None:
    pytest.importorskip("matplotlib")
    network, every = Network(50e6, 0.08), (1, 8)
    taken = [way for way in methods.ways(TRAINING, network, every, DEFAULT) if (way.method, way.H) == (method, H)][-1]
    for axes, x in zip(plan.draw(TRAINING, network, every, DEFAULT, taken, "adamw").axes, (50e6, H), strict=True):
        (circle,) = (line for line in axes.lines if line.get_fillstyle() == "none")
        assert circle.get_xydata().tolist() == [[x, 100 * taken.predicted.utilisation]]
        curve = next(line for line in axes.lines if line.get_color() == plan._STYLES[method]["color"])
        assert dict(curve.get_xydata()).get(x, curve.get_ydata()[0]) == circle.get_ydata()[0]


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


def test_the_optimizer_decides_which_rows_are_shown() -> None:
    training, network = Training(4, 30_800_000, 8.0), Network(200e6, 0.02)
    for optimizer, own in methods.OPTIMIZERS.items():
        ways = list(methods.ways(training, network, (1,), DEFAULT, optimizer))
        assert methods.best(ways).method == own
        assert {way.method for way in ways} & {*methods.OPTIMIZERS.values()} == {own}
        assert all(math.isinf(way.seconds) == (way.loss is None) for way in ways)


@pytest.mark.parametrize(
    ("options", "header", "assumed"),
    [
        ("--rate 100mbit", {"rtt": 0.2e-3}, "# assumed trips   as in a local network: measure round trips with `ping"),
        ("--rate 99mbit", {"rtt": 30e-3}, "# assumed trips   as over the internet"),
        ("--rate 1gbit --rtt 0ms --device cuda", {"rtt": 0.0}, "# assumed work    kernels of one NVIDIA H200. The "),
        ("--rate 1gbit --rtt 1ms", {"rtt": 1e-3}, ""),
    ],
)
def test_assumptions_are_printed(
    options: str, header: dict[str, float], assumed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", "--ranks", "4", *MODEL, *options.split(), "--json", str(file)]) == 0
    shown, content = capsys.readouterr().out, json.loads(file.read_text())["header"]
    assert shown.count("# assumed") == bool(assumed)
    assert assumed in shown
    assert header.items() <= content.items()
    assert (content["costs"]["select"] < DEFAULT.select) == ("cuda" in options)


@pytest.mark.parametrize(
    ("ranks", "per_node", "options", "memory", "participants"),
    [
        (8, 2, "", "385 MB", {"yes": 4, "no": 8, "-": 8}),  # 8 + 5/2 + 16/8 bytes per weight
        (8, 2, "--optimizer sgd", "", {"yes": 4, "no": 8, "-": 8}),
        (64, 8, "--device cuda", "273.4 MB", {"yes": 8, "no": 64, "-": 64}),
        (8, 8, "--device cuda", "462 MB", {}),
        (8, 1, "", "462 MB", {}),
    ],
)
def test_nodes_count_as_one(
    ranks: int, per_node: int, options: str, memory: str, participants: dict[str, int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file, size = tmp_path / "plan.json", f"--ranks {ranks} --ranks-per-node {per_node}"
    assert main(["plan", *size.split(), *FAR[2:], *options.split(), "--json", str(file)]) == 0
    shown, content = capsys.readouterr().out, json.loads(file.read_text())
    assert f"# memory          {memory}" in shown or "sgd" in options
    lines = [line.split() for line in shown.splitlines() if re.match(" [a-z S]", line) and line[1] != " "]
    assert shown.count("equal loss  nodes\n") == bool(participants)
    assert ("# assumed GPUs    200 Gb/s" in shown) == ("cuda" in options and bool(participants))
    assert content["header"]["ranks_per_node"] == per_node
    assert content["header"]["loss_participants"] == 8
    for line, row in zip(lines, content["rows"], strict=True):
        assert row["nodes"] == (line[-1] == "yes")
        assert row["participants"] == participants.get(line[-1], ranks)
        assert (line[-1] == "no") == (row["arguments"] == "nodes=False")
    assert sum(line[-1] == "no" for line in lines) == bool(participants)
    others = sorted({row["participants"] for row in content["rows"] if row["method"] != methods.DENSE} - {8})
    said = " ".join(shown.split())
    expected = f"Here, {' or '.join(map(str, others))} participate."
    assert (expected in said) == ("Losses were measured with 8 participants" in said) == bool(others)


def test_a_profile_does_not_replace_the_costs_of_a_gpu(tmp_path: Path) -> None:
    file, profile = tmp_path / "plan.json", tmp_path / "profile.json"
    costs = replace(DEFAULT, node=Link(1e-6, 1e-10), select=1.0)
    profile.write_text(Profile("Open MPI", 4, 4, costs).as_json())
    assert main(["plan", *FAR, "--device", "cuda", "--profile", str(profile), "--json", str(file)]) == 0
    content = json.loads(file.read_text())["header"]
    assert content["costs"] == asdict(replace(methods.CUDA, node=costs.node))
    assert content["inside"] == asdict(methods.PCIE)


def test_without_matplotlib_the_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", *FAR, "--plot", str(tmp_path / "plan.png")]) == 1
    shown = capsys.readouterr()
    assert "Sparse sums pay off here." in shown.out
    assert re.search(r"--plot needs matplotlib .*: pip install .*\[bench\]", shown.err)


@pytest.mark.parametrize(
    ("network", "step", "expected"),
    [
        (Network(400e9, 10e-6), 0.3, {methods.DENSE}),
        (Network(50e6, 0.08), 0.03, {methods.LOCAL, methods.DELAYED}),
        (Network(50e6, 0.08, 0.001), 0.03, {methods.DELAYED}),
        (Network(100e9, 0.3), 300.0, {methods.DENSE}),
        (Network(200e6, 0.02), 8.0, {methods.ADAMW}),
    ],
)
def test_the_best_way(network: Network, step: float, expected: set[str]) -> None:
    taken = best(network, Training(4, 30_800_000, step))
    assert taken.method in expected
    said = methods.advice(taken, [taken, *methods.ways(TRAINING, network, [32], DEFAULT)], TRAINING, network)
    assert said[0] == (
        "Sparse sums do not pay off here." if taken.method == methods.DENSE else "Sparse sums pay off here."
    )
    assert ("The simplest change: SparseAdamW" in " ".join(said)) == (taken.H > 1)
    assert all(len(line) <= 100 or line.startswith("    ") for line in said)


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


# -- checks -----------------------------------------------------------------------------------------------------------


def test_ranks_that_are_not_alike() -> None:
    same = {"sparsecomm": "0.1.0", "Python": "3.11.7", "torch": "2.13.0"}
    measurement.check_alike([("a", same), ("b", dict(same))])
    for other, message in (
        ({**same, "torch": "2.4.0"}, r"torch is 2.4.0 on rank 1 \(b\) and 2.13.0 on rank 0 \(a\): start all"),
        ({**same, "SPARSECOMM_THREADS": "1"}, r"SPARSECOMM_THREADS is 1 on rank 1 \(b\) and missing on rank 0"),
    ):
        with pytest.raises(sc.InvalidInputError, match=message):
            measurement.check_alike([("a", same), ("b", other)])


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


@pytest.mark.parametrize("count", range(2, 10))
def test_all_pairs_and_all_links_are_measured(count: int) -> None:
    turns = _all_pairs([list(range(count))])
    assert Counter(frozenset(pair) for turn in turns for pair in turn) == Counter(
        frozenset((i, j)) for i in range(count) for j in range(i)
    )
    assert all(max(Counter(rank for pair in turn for rank in pair).values()) == 1 for turn in turns)
    members = [10 * i for i in range(count)]
    one_way = measurement._one_way(members)
    assert sorted(pair for turn in one_way for pair in turn.items()) == sorted(
        zip(members, members[1:] + members[:1], strict=True)
    )
    assert not any({*turn} & {*turn.values()} for turn in one_way)


def test_a_warning_names_an_interface_inside_a_machine() -> None:
    """Ranks 0 and 1 communicate over docker0 and eth0; rank 2 has no visible connection."""
    a, b, stranger = ("172.17.0.1", 1), ("10.0.0.2", 2), ("10.0.0.9", 3)
    everyone = [([(a, b), (a, stranger)], {"docker0": a[0]}), ([(b, a)], {"eth0": b[0]}), ([], {"eth0": "10.0.0.3"})]
    comm: Any = SimpleNamespace(allgather=lambda mine: everyone)
    addresses, shown, wrong = measurement.addresses(comm, [0, 1, 2])
    assert addresses == [a[0], b[0], None]
    assert shown == ["docker0 (172.17.0.1)", "eth0 (10.0.0.2)"]
    assert len(wrong) == 1
    assert wrong[0].startswith(
        "rank 0 communicates over docker0 (172.17.0.1), an interface inside its machine: name the interface"
    )


def test_a_warning_names_unequal_numbers_of_ranks() -> None:
    ranks: Any = SimpleNamespace(size=3, node_of_rank=[0, 0, 1], num_nodes=2)
    assert measurement.placement(ranks, ["a", "a", "b"]) == "3 on 2 machines: a (2), b (1)"
    assert measurement.warnings(ranks) == ["machines have different numbers of ranks: 2, 1"]


def test_streams_that_cannot_be_made() -> None:
    """All ranks report the same error: one of them cannot listen at a foreign address."""
    values: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def work(number: int) -> measurement.Report:
        def allgather(mine: Any) -> list[Any]:
            values[number] = mine
            barrier.wait(LIMIT)
            everyone = list(values)
            barrier.wait(LIMIT)
            return everyone

        rank: Any = SimpleNamespace(Get_rank=lambda: number, allgather=allgather)
        return measurement._streams(rank, {0: 1}, ["127.0.0.1", "192.0.2.1"], 2, 0.4, 0.0)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second
    assert first.problem.startswith("rank 1 cannot listen on 192.0.2.1: ")
