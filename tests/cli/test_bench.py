"""`sparsecomm bench`: its checks, its measurements and its output."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import Backend
from sparsecomm.calls.queue import queue_of
from sparsecomm.cli import bench as command
from sparsecomm.cli import launch, main
from sparsecomm.tools import timing
from sparsecomm.tracing import observers
from sparsecomm.transport import simulated
from sparsecomm.wire import WIRES
from tests.cli.test_cli import shell
from tests.processes import needs_mpirun
from tests.thinning import exhaustive


@pytest.fixture(autouse=True)
def _not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, False),
        ({"PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),  # the shell of salloc
    ],
)
def test_launchers_are_detected(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: bool) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launch.launcher() is not None) == rank


def test_mpirun_beside_python_comes_first_and_torchrun_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside, other = tmp_path / "mpirun", tmp_path / "other" / "mpirun"
    other.parent.mkdir()
    for file in (beside, other):
        file.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(other.parent))
    for file in (beside, other):
        assert launch._launcher_command(2)[0] == str(file)
        file.unlink()
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 3 -m"
    assert " ".join(launch._launcher_command(3)[1:]) == torchrun
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sc.TransportError, match="there is no mpirun"):
        launch._launcher_command(3)


@pytest.mark.parametrize(("status", "ranks"), [(3, "--ranks=5"), (-9, "--rank 5")])
def test_ranks_run_the_same_command_and_its_status_is_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, ranks: str
) -> None:
    end = f"exit {status}" if status >= 0 else f"kill {status} $$"
    fake = tmp_path / "mpirun"
    fake.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > "{tmp_path}/said"\n{end}\n')
    fake.chmod(0o755)
    monkeypatch.setattr(launch, "_launcher_command", lambda ranks: [str(fake), str(ranks)])
    arguments = ["-b1K", "-e", "4 K", "-c", *ranks.split(), "-n", "7", "--wire=plain"]
    assert main(["bench", *arguments]) == (status if status >= 0 else 128 - status)
    assert (tmp_path / "said").read_text() == "5|sparsecomm|bench|-b1K|-e|4 K|-c|-n|7|--wire=plain|"


# -- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "waits"), [(0.05, True), (1e-5, False)])
def test_calls_begin_at_one_moment_on_slow_links(alpha: float, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses a time on its clock, and clock offsets do not matter."""
    ahead, moment, slept = [3.0, -700.0, 50.0], 100.0, list[float]()
    monkeypatch.setattr(timing, "time", SimpleNamespace(sleep=slept.append))

    def program(transport: simulated.SimulatedTransport) -> float | None:
        transport.clock = lambda: transport.seconds + ahead[transport.rank]  # type: ignore[method-assign]
        comm: Any = SimpleNamespace(bcast=lambda value: moment + ahead[0])
        timing.CommonStart(comm, transport).wait()
        return transport.seconds + slept.pop() if slept else None

    moments = [result.value for result in simulated.run(len(ahead), program, alpha=alpha, beta=8e-9)]
    assert moments == (pytest.approx([moment] * len(ahead), abs=1e-3) if waits else [None] * len(ahead))


# -- the clocks -------------------------------------------------------------------------------------------------------


def test_every_method_of_a_backend_is_in_a_part() -> None:
    methods = {name for name, _ in inspect.getmembers(Backend, callable) if not name.startswith("_")}
    in_no_part = {"on_stream", "side_stream", "memory", "empty", "empty_like", "as_tensor"}
    in_no_part |= {"memory_of", "not_zero", "quantize_values", "with_values"}  # run within other methods
    # No call of bench uses these.
    elsewhere = {"zeros", "finite", "split_at_indices", "timeline", "clear", "mixed", "mix_into", "largest"}
    elsewhere |= {"sums_of_squares", "add_entries", "adamw", "adamw_dense", "store_adamw"}
    elsewhere |= {"change_units", "values_of", "wait_for"}
    assert set(observers.PART_OF) == methods - in_no_part - elsewhere
    assert set(observers.PART_OF.values()) == set(observers.PARTS)


class Nested(timing.Clock):
    """A clock that fails if parts are nested, because their time would count twice."""

    inside = ""

    def around(self, part: str, name: str, function: Any) -> Any:
        timed = super().around(part, name, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            assert not self.inside, f"{part}, {name}, inside {self.inside}"
            self.inside = f"{part}, {name}"
            try:
                return timed(*args, **kwargs)
            finally:
                self.inside = ""

        return watched


@pytest.mark.parametrize(("algorithm", "wire"), [("tree", "plain"), *product(sc.algorithms(), ["packed_int8"])])
def test_clocks_change_nothing(algorithm: str, wire: str) -> None:
    n, k, P = 5000, 50, 3

    def call(transport: simulated.SimulatedTransport, with_clock: bool) -> tuple[Any, ...]:
        x, residual = timing.inputs(n, np.dtype(np.float32), np.dtype(np.float32), transport.rank)
        out, clock = np.empty_like(x), Nested()
        if with_clock:
            queue_of(transport).observe(transport, clock)
        result = sc.sparse_allreduce(x, k, comm=transport, algorithm=algorithm, residual=residual, out=out, wire=wire)
        if with_clock:
            for part in ("select", "exchange", "densify"):
                assert clock.seconds[part] > 0
            assert (clock.seconds["code"] > 0) == (
                wire != "plain" and algorithm != "dense" and transport.rank in leaders
            )
        return result.indices.tobytes(), result.values.tobytes(), residual.tobytes(), out.tobytes(), transport.counters

    nodes = [0, 0, 1] if algorithm.startswith("hierarchical") else [0, 1, 2]
    leaders = [nodes.index(node) for node in nodes]  # messages inside a machine are not packed
    plain, timed = (
        simulated.run(P, lambda transport, on=on: call(transport, on), node_of_rank=nodes) for on in (False, True)
    )
    assert [r.value for r in plain] == [r.value for r in timed]


# -- runs -------------------------------------------------------------------------------------------------------------


def bench(*options: str, ranks: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    return shell("-m", "sparsecomm", "bench", *options, ranks=ranks, **settings)


def counted(row: dict[str, Any], P: int, dtype: str) -> tuple[int, int, int]:
    """Return the bytes per call that simulated ranks send and receive, without the first call."""
    t = np.dtype(dtype)
    accumulator = np.dtype(np.float64) if t.itemsize == 8 else np.dtype(np.float32)

    def program(transport: simulated.SimulatedTransport) -> tuple[float, float]:
        x, residual = timing.inputs(row["count"], t, accumulator, transport.rank)
        options = {"algorithm": row["algorithm_taken"], "wire": row["wire_taken"]}
        sent, received = [], []
        for _ in range(1 + 3):
            sc.sparse_allreduce(x, row["k"], comm=transport, residual=residual.copy(), **options)
            sent.append(transport.counters.bytes_sent)
            received.append(transport.counters.bytes_received)
        return (sent[3] - sent[0]) / 3, (received[3] - received[0]) / 3

    sent, received = zip(*(r.value for r in simulated.run(P, program, node_of_rank=[0] * P)), strict=True)
    return int(max(sent)), int(max(received)), int(max(*sent, *received))


@needs_mpirun
@pytest.mark.parametrize(
    ("ranks", "dtype", "wires", "largest"),
    [(2, "float32", "auto,packed_int4", 16384), exhaustive(3, "float16", "all", 4096)],
)
def test_a_run(ranks: int, dtype: str, wires: str, largest: int, tmp_path: Path) -> None:
    file, drawn = tmp_path / "bench.json", tmp_path / "drawn.png"
    densities = (0.01, 0.5) if ranks > 2 else (0.01,)
    arguments = f"-b 4Ki -e {largest} --density {','.join(map(str, densities))} -n 3 -w 1 -c --breakdown"
    arguments += f" --algorithms all --wire {wires} --dtype {dtype}"
    files = "--json", str(file), "--plot", str(drawn)
    # Without a profile, costs are those of simulated ranks.
    ran = bench(*arguments.split(), *files, "--ranks", str(ranks), SPARSECOMM_PROFILE="none")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    content = json.loads(file.read_text())
    assert content["schema"] == command.SCHEMA
    assert content["header"]["ranks"] == ranks
    assert content["header"]["dtype"] == dtype
    rows = content["rows"]
    names = tuple(WIRES) if wires == "all" else tuple(wires.split(","))
    asked = list(product(dict.fromkeys((4096, largest)), densities, sc.algorithms(), names))
    assert [(r["size_bytes"], r["density"], r["algorithm"], r["wire"]) for r in rows] == asked
    for row in rows:
        assert row["wrong"] == 0
        assert 0 < row["time_min_us"] <= row["time_median_us"] <= row["time_p99_us"] <= row["time_max_us"]
        assert (row["sent_bytes_per_rank"], row["received_bytes_per_rank"], row["wire_bytes_per_rank"]) == counted(
            row, ranks, dtype
        )
        assert row["algbw_gb_per_s"] == pytest.approx(row["size_bytes"] / row["time_median_us"] / 1000)
        assert row["busbw_gb_per_s"] == pytest.approx(row["algbw_gb_per_s"] * 2 * (ranks - 1) / ranks)
        parts = row["breakdown_us"]
        assert list(parts) == [*observers.PARTS, "other"]
        assert all(value >= 0 for value in parts.values())
        assert sum(parts.values()) == pytest.approx(row["time_median_us"])
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    lines = ran.stdout.replace("\r", "").splitlines()
    table = [line.split() for line in lines if not line.startswith("#")]
    shown = [[str(r["size_bytes"]), str(r["count"]), str(r["k"]), r["algorithm"]] for r in rows]
    assert [line[:4] for line in table] == shown
    assert {(len(line), line[12]) for line in table} == {(13 + 7, "0")}
    assert "# every element is right" in lines
    assert re.search(rf"^# ranks +{ranks}\r?$", ran.stdout, re.MULTILINE)


def test_one_rank_without_mpirun() -> None:
    ran = bench("-b", "4K", "-e", "4K", "-n", "2", "-c", "--dtype", "bfloat16")
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch("sparsecomm: one rank, which sends nothing: start N with --ranks N.*\n", ran.stderr)
    assert "every element is right" in ran.stdout


def test_refused_under_mpirun_once() -> None:
    ran = bench("--json=/no/a.json", ranks=2)
    assert ran.returncode != 0
    assert ran.stderr.count("sparsecomm: ") == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "algbw" not in ran.stdout


ON_CUDA = ["-m", "tests.emulator.cli"]


@pytest.mark.exhaustive
def test_vectors_of_a_device() -> None:
    ran = shell(*ON_CUDA, "bench", "--device", "cuda", "-e", "64Ki", "-n", "1", "-c", "--breakdown", ranks=2)
    assert ran.returncode == 0, ran.stderr
    assert "every element is right" in ran.stdout
    assert re.search(r"^# device +cuda \(emulated\)\r?$", ran.stdout, re.MULTILINE)


FAULTY = """
import os, signal, sys
from mpi4py import MPI
from sparsecomm.cli import main
from sparsecomm.tools.timing import Ours
right = Ours.step
def wrong(self):
    result = right(self)
    if MPI.COMM_WORLD.rank == 1:
        exec(fault)
    return result
Ours.step = wrong
for fault in {faults}:
    status = main(["bench", "-b4K", "-e4K", "-n3", "-c", "--wire=plain,packed_int8", "--algorithms=tree,split"])
    assert status == 1, status
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [("os.kill(os.getpid(), signal.SIGKILL)", ""), ("raise ValueError('deliberate')", "rank 1: Traceback")],
)
def test_a_rank_that_dies_ends_the_others(fault: str, said: str) -> None:
    ran = shell("-c", FAULTY.format(faults=[fault]), ranks=2)
    assert ran.returncode != 0
    assert said in ran.stderr


def test_wrong_elements_are_counted() -> None:
    faults = ["self.vectors.out[7] += 1", "self.vectors.residual[7] += 1", "result.values[0] += 1"]
    ran = shell("-c", FAULTY.format(faults=faults), ranks=2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("elements are wrong") == len(faults)
    table = [line.split() for line in ran.stdout.replace("\r", "").splitlines() if not line.startswith("#")]
    assert len(table) == len(faults) * 2 * 2 * 2
    assert all(int(line[12]) > 0 for line in table)
