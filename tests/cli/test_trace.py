"""`sparsecomm trace`: the rank it blames, the clock offsets it finds, and the timeline."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.cli import main
from sparsecomm.tracing.events import Rank, clock_offsets, late_senders, messages, read
from sparsecomm.tuning.clocks import Offset
from tests.tracing.test_recorder import SimulatedTransport, traced, vector

P = 4


def tree(transport: SimulatedTransport, k: int = 9) -> None:
    sc.sparse_allreduce(vector(transport.rank), k, comm=transport, algorithm="tree", wire="plain")


class Traces:
    """A folder with the files of simulated ranks, and the command that reads them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.setenv("SPARSECOMM_PROFILE", "none")  # no call measures links

    def ranks(self, program: Callable[[SimulatedTransport], Any], size: int = P) -> dict[int, Rank]:
        def errors_are_expected(transport: SimulatedTransport) -> None:
            with suppress(sc.SparseCommError, MemoryError):
                program(transport)

        return traced(self.folder, size, errors_are_expected, self._monkeypatch)[1]

    def files(self, program: Callable[[SimulatedTransport], Any]) -> list[Path]:
        self.ranks(program)
        return sorted(self.folder.glob("trace.*.json"))

    def command(self, *arguments: object) -> tuple[int, str]:
        status = main(["trace", *map(str, arguments)])
        return status, "".join(self._capsys.readouterr())


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Traces:
    return Traces(tmp_path, monkeypatch, capsys)


# -- the rank to blame ------------------------------------------------------------------------------------------------


def another_call(transport: SimulatedTransport) -> None:
    tree(transport)
    tree(transport, 8 if transport.rank == 2 else 9)


def an_error_of_its_own(transport: SimulatedTransport) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no more of it")

    if transport.rank == 0:
        vars(transport)["receive"] = fail
    tree(transport)


def a_call_missing(transport: SimulatedTransport) -> None:
    for _ in range(3 - (transport.rank == 3)):
        tree(transport)


def lost(transport: SimulatedTransport) -> None:
    isend = transport.isend

    def to_nobody(data: Any, to: int, *arguments: Any) -> Any:
        return isend(data, transport.rank, *arguments)

    vars(transport)["isend"] = to_nobody
    sc.sparse_allreduce(vector(transport.rank), 9, comm=transport, algorithm="butterfly", wire="plain")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (another_call, r"Look at rank 2: rank 2 made tree sum of n=3000 float32, k=8"),
        (an_error_of_its_own, r"Look at rank 0, which left the call with an error of its own: MemoryError: no more"),
        (a_call_missing, r"Look at rank 3, which did not make call 3: rank 3 made 2 calls, and ended normally"),
        (lost, r"All ranks waited"),
    ],
)
def test_the_rank_to_look_at(program: Callable[[SimulatedTransport], None], said: str, traces: Traces) -> None:
    status, output = traces.command(*traces.files(program))
    assert status == 1
    assert f"=> {said}" in output


def test_a_rank_that_stopped_during_a_call(traces: Traces) -> None:
    """A killed rank's file ends anywhere after the event that begins the call, possibly within a line."""
    paths = traces.files(tree)
    text = paths[1].read_text()
    begun = text.index("\n", text.rindex('"ph":"B"')) + 1
    for end in (begun, begun + 20, text.index(",", begun) + 1, text.index("\n", begun) + 1):
        paths[1].write_text(text[:end])
        status, output = traces.command(*paths)
        assert status == 1
        assert "Look at rank 1, which began the call and wrote nothing more" in output
    status, output = traces.command(*paths[:3])
    assert status == 1
    assert "There is no file of rank 3" in output


def test_successful_calls(traces: Traces) -> None:
    status, output = traces.command(*traces.files(tree))
    assert status == 0
    assert "All calls ended well." in output


def test_files_that_are_not_traces_are_refused(traces: Traces) -> None:
    good, bad = traces.files(tree)[0], traces.folder / "bad.json"
    for text in ("", "[\n{},\n", "[\nhello,\n", '[\n{"name":"process_name","pid":1},\n', '{"traceEvents": []}'):
        bad.write_text(text)
        status, output = traces.command(good, bad)
        assert status == 1
        assert output.startswith(f"sparsecomm: {bad}: not a file of SPARSECOMM_TRACE")
    os.mkfifo(traces.folder / "fifo.json")
    with (traces.folder / "huge.json").open("wb") as file:
        file.truncate(2**40)
    special = "not a regular file"
    for name, said in (
        ("/dev/zero", special),
        ("fifo.json", special),
        ("huge.json", "not a file"),
        ("none", "No such"),
    ):
        status, output = traces.command(traces.folder / name)
        assert (status, said in output) == (1, True), output
    status, output = traces.command(good, good)
    assert (status, "are both of rank 0" in output) == (1, True), output


def test_unwritable_timelines_are_refused(traces: Traces) -> None:
    """Input files cannot be overwritten under any other name."""
    good, folder = traces.files(tree)[0], traces.folder
    contents = good.read_bytes()
    (folder / "soft").symlink_to(good)
    (folder / "hard").hardlink_to(good)
    (folder / "loop").symlink_to("loop")
    own = "is one of the files to be read"
    for output, why in (
        *((path, own) for path in (good, folder / "soft", folder / "hard", folder / ".." / folder.name / good.name)),
        ("/dev/full", "cannot be written: .*No space left"),
        (folder / "loop", "cannot be written: .*levels of symbolic links"),
    ):
        status, said = traces.command(good, "--output", output)
        assert status == 1
        assert re.search(why, said), said
    assert good.read_bytes() == contents


# -- clocks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(ahead=st.lists(st.floats(-1e4, 1e4), min_size=P, max_size=P), algorithm=st.sampled_from(list(sc.algorithms())))
def test_clocks_are_aligned(ahead: list[float], algorithm: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Offsets of any size are found within their bounds, which depend on the network's latency."""

    def program(transport: SimulatedTransport) -> None:
        sc.sparse_allreduce(vector(transport.rank), 9, comm=transport, algorithm=algorithm, wire="plain")

    with pytest.MonkeyPatch.context() as monkeypatch:
        _, ranks = traced(tmp_path_factory.mktemp("trace"), P, program, monkeypatch)
    for rank, seconds in zip(ranks.values(), ahead, strict=True):
        rank.node = str(rank.number)
        for call in (call for calls in rank.calls.values() for call in calls):
            for part in call.parts:
                part.start, part.end = part.start + seconds, part.end + seconds
    found_offsets = clock_offsets(ranks)
    for number, (seconds, bound) in found_offsets.items():
        assert abs(seconds - (ahead[number] - ahead[0])) <= bound + 1e-6
        assert bound < 0.2  # messages take 10 ms, and some queue
    for message in messages(ranks):
        sent = message.sent.start - found_offsets[message.sender].seconds
        assert sent <= message.received.end - found_offsets[message.receiver].seconds + 1e-6


def test_a_late_rank_makes_others_wait(traces: Traces) -> None:
    def program(transport: SimulatedTransport) -> None:
        transport.compute(3.0 if transport.rank == 2 else 0.0)
        sc.sparse_allreduce(vector(transport.rank), 9, comm=transport, algorithm="allgather", wire="plain")

    ranks = traces.ranks(program)
    late = late_senders(list(messages(ranks)), dict.fromkeys(ranks, Offset(0.0, 0.0)))
    assert {pair for pair, seconds in late.items() if seconds > 1} == {(0, 2), (1, 2), (3, 2)}
    assert all(seconds == pytest.approx(3.0, abs=0.1) for seconds in late.values() if seconds > 1)


# -- the timeline -----------------------------------------------------------------------------------------------------


def test_the_timeline_has_all_events_and_an_arrow_for_each_message(traces: Traces) -> None:
    paths, timeline = traces.files(a_call_missing), traces.folder / "timeline.json"
    traces.command(*paths, "--output", timeline)
    events, ranks = json.loads(timeline.read_text()), read(paths)
    arrows = [event for event in events if event.get("cat") == "message"]
    sent = list(messages(ranks))
    assert len(sent) > 0
    assert len(arrows) == 2 * len(sent)
    assert len(events) - len(arrows) == sum(len(rank.events) for rank in ranks.values())
    slices = [event for event in events if event["ph"] == "X" and event["cat"] == "exchange"]
    for arrow in arrows:  # each end of an arrow lies on a slice
        assert any(
            (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"])
            and s["ts"] - 0.01 <= arrow["ts"] <= s["ts"] + s["dur"] + 0.01
            for s in slices
        )
    begun, ended = ([e for e in events if e["ph"] == kind] for kind in "BE")
    assert len(begun) == len(ended) > 0
