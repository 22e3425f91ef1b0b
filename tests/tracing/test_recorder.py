"""SPARSECOMM_TRACE records all messages, SPARSECOMM_RANGES marks the parts of calls, and results do not change."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.tracing import recorder
from sparsecomm.tracing.events import Rank, messages, read
from sparsecomm.tracing.observers import PARTS
from sparsecomm.transport import simulated
from tests.forks import Run
from tests.processes import mpirun, needs_mpirun, run_python
from tests.thinning import exhaustive

SimulatedTransport = simulated.SimulatedTransport
Program = Callable[[SimulatedTransport], Any]


def vector(rank: int, n: int = 3000) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(n).astype(np.float32)


def traced(
    folder: Path, P: int, program: Program, monkeypatch: pytest.MonkeyPatch, name: str = "trace.json"
) -> tuple[list[Any], dict[int, Rank]]:
    """Run simulated ranks; return their outcomes, and their trace files as read."""
    monkeypatch.setenv("SPARSECOMM_TRACE", str(folder / name))
    outcomes = simulated.run(P, program, alpha=0.01)
    monkeypatch.delenv("SPARSECOMM_TRACE")
    for path, file in recorder._files.items():
        if path.parent == folder:
            file.end()
    return outcomes, read(sorted(folder.glob("trace.*.json")))


@pytest.mark.parametrize(("P", "wire"), [(5, "packed_int8"), exhaustive(1, "plain"), exhaustive(2, "plain")])
@pytest.mark.parametrize("algorithm", sc.algorithms())
def test_both_ends_record_every_message_and_results_do_not_change(
    algorithm: str, P: int, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(transport: SimulatedTransport) -> tuple[Any, ...]:
        x, residual = vector(transport.rank), np.zeros(3000, np.float32)
        for _ in range(2):
            result = sc.sparse_allreduce(x, 30, comm=transport, residual=residual, algorithm=algorithm, wire=wire)
        return result.indices.tobytes(), result.values.tobytes(), residual.tobytes(), transport.counters

    plain = simulated.run(P, program, alpha=0.01)
    outcomes, ranks = traced(tmp_path, P, program, monkeypatch)
    assert [o.value for o in outcomes] == [o.value for o in plain]
    assert list(ranks) == list(range(P))
    for rank, outcome in zip(ranks.values(), outcomes, strict=True):
        ((members, _), calls), counters = next(iter(rank.calls.items())), outcome.value[3]
        assert members == tuple(range(P))
        assert [call.number for call in calls] == list(range(1, len(calls) + 1))
        assert all(call.end is not None and not call.error for call in calls)
        sent = [nbytes for call in calls for part in call.exchanges for _, nbytes in part.sent]
        received = [nbytes for call in calls for part in call.exchanges for _, nbytes in part.received]
        assert sum(sent) == sum(call.sent for call in calls) == counters.bytes_sent
        assert (len(sent), len(received)) == (counters.messages_sent, counters.messages_received)
        assert {part.name for call in calls for part in call.parts} <= set(PARTS)
        assert f"{algorithm.partition(':')[0]}" in calls[-1].description
    recorded = list(messages(ranks))
    assert len(recorded) == sum(outcome.value[3].messages_sent for outcome in outcomes)
    for message in recorded:
        assert (message.receiver, message.nbytes) in message.sent.sent
        assert message.sent.start <= message.received.end


def call(transport: SimulatedTransport) -> sc.SparseVector:
    return sc.sparse_allreduce(vector(transport.rank), 9, comm=transport)


def test_an_error_is_recorded_with_the_awaited_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: SimulatedTransport) -> None:
        if transport.rank != 1:
            with pytest.raises(sc.TransportError):
                sc.sparse_allreduce(vector(transport.rank), 9, comm=transport, algorithm="tree")

    _, ranks = traced(tmp_path, 2, program, monkeypatch)
    (call,) = next(iter(ranks[0].calls.values()))
    assert call.error.startswith("TimeoutError: rank 0 waited")
    assert [part.waited for part in call.exchanges if part.error] == [[1]]
    assert not ranks.get(1) or not any(ranks[1].calls.values())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("missing/trace.json", "FileNotFoundError"),
        ("a" * 300 + ".json", "File name too long"),
        ("fifo/trace.json", "not a regular file"),
    ],
)
def test_an_unwritable_file_is_logged_once(
    name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening a FIFO without a reader would block forever."""
    (tmp_path / "fifo").mkdir()
    for rank in range(2):
        os.mkfifo(tmp_path / "fifo" / f"trace.{rank}.json")
    monkeypatch.setenv("SPARSECOMM_TRACE", str(tmp_path / name))

    def program(transport: SimulatedTransport) -> int:
        return [call(transport).nnz for _ in range(3)][-1]

    with caplog.at_level(logging.WARNING):
        assert [outcome.value for outcome in simulated.run(2, program)] == [9, 9]
    assert [text[:24] for text in caplog.messages] == ["rank 0: SPARSECOMM_TRACE", "rank 1: SPARSECOMM_TRACE"]
    assert error in caplog.text
    assert all((tmp_path / "fifo" / f"trace.{rank}.json").is_fifo() for rank in range(2))


def test_long_files_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the path is a folder, files get default names."""
    monkeypatch.setattr(recorder, "MAX_BYTES", 5000)

    def program(transport: SimulatedTransport) -> None:
        for _ in range(100):
            call(transport)

    _, ranks = traced(tmp_path, 2, program, monkeypatch, name="")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["trace.0.json", "trace.0.json.before", "trace.1.json", "trace.1.json.before"]
    assert all(path.stat().st_size < 5000 + 3000 for path in tmp_path.iterdir())
    for rank, before in ((rank, read([tmp_path / f"trace.{rank}.json.before"])[rank]) for rank in (0, 1)):
        (first,), (then,) = before.calls.values(), ranks[rank].calls.values()
        assert then[-1].number >= 100
        assert [call.number for call in first + then] == list(range(first[0].number, then[-1].number + 1))


def test_two_jobs_do_not_write_to_one_file(tmp_path: Path) -> None:
    file = recorder.TraceFile(tmp_path / "trace.0.json", 0)
    before = (tmp_path / "trace.0.json").read_text()
    status, output = run_python(
        "-c", f"import os\nos.environ['SPARSECOMM_TRACE'] = {str(tmp_path / 'trace.json')!r}\n{CALL}"
    )
    assert status == 0, output
    (other,) = set(tmp_path.iterdir()) - {tmp_path / "trace.0.json"}
    assert re.fullmatch(r"trace\.0\.\d+\.json", other.name)
    assert [len(calls) for calls in read([other])[0].calls.values()] == [2]
    assert (tmp_path / "trace.0.json").read_text() == before
    file.end()


# -- ranges -----------------------------------------------------------------------------------------------------------

CALL = """
import numpy, sparsecomm
x = numpy.arange(1000, dtype=numpy.float32)
for _ in range(2):
    sparsecomm.sparse_allreduce(x, 5, residual=numpy.zeros_like(x))
"""
IN_TORCH = f"""
import os
os.environ["SPARSECOMM_RANGES"] = "torch"
import torch.profiler
with torch.profiler.profile() as profile:
{CALL.replace(chr(10), chr(10) + "    ")}
print(sorted(e.key + " " + str(e.count) for e in profile.key_averages() if e.key.startswith("sparsecomm: ")))
"""


def test_the_profiler_of_pytorch_records_the_parts_of_calls(forks: Run) -> None:
    pytest.importorskip("torch")
    status, output = forks("-c", IN_TORCH)
    assert status == 0, output
    said = output.splitlines()[-1]
    assert "'sparsecomm: select 2'" in said
    assert "sparsecomm: take-back" in said


def test_unknown_profilers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSECOMM_RANGES", "torch, vtune")

    def refused(transport: SimulatedTransport) -> None:
        with pytest.raises(sc.InvalidInputError, match="'vtune' is none of torch, nvtx"):
            call(transport)

    simulated.run(1, refused)


# -- real ranks -------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import numpy
from mpi4py import MPI
import sparsecomm
from sparsecomm import transport
from tests.waiting import until_awaited
os.environ["SPARSECOMM_TRACE"] = sys.argv[1]
half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
x = numpy.random.default_rng(MPI.COMM_WORLD.rank).standard_normal(10000).astype(numpy.float32)
for step in range(5):
    if MPI.COMM_WORLD.rank == 2 and step == 3:
        until_awaited(transport.transport_of(half))
        os.kill(os.getpid(), signal.SIGKILL)
    sparsecomm.sparse_allreduce(x, 0.01, comm=half, algorithm="tree")
    sparsecomm.sparse_allreduce(x, 0.01, algorithm="tree")
"""


@needs_mpirun
def test_the_rank_that_was_killed_is_found(tmp_path: Path) -> None:
    status, _ = mpirun(3, "-c", KILLED, str(tmp_path / "trace.json"))
    assert status != 0
    files = [str(tmp_path / f"trace.{rank}.json") for rank in range(3)]
    status, output = run_python("-m", "sparsecomm", "trace", *files)
    assert status == 1, output
    assert "Look at rank 2, which did not make call 4: rank 2 made 3 calls, and wrote nothing more" in output
    assert "Call 4 of ranks 0, 2 did not end well: tree sum of n=10000" in output
