"""Reports: the chosen settings with reasons, and the traffic with each peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.quantities import bytes_text
from sparsecomm.transport import simulated
from sparsecomm.transport.base import PeerTraffic
from sparsecomm.tuning import profile
from tests.ranks import run
from tests.reducer.programs import gradients, reducer_of

NETWORK = {"alpha": 0.04, "beta": 4e-8, "node_alpha": 1e-6, "node_beta": 1e-10}
MEASURED = "measured at set-up: 40 ms, 200 Mb/s between nodes; 1 us, 80 Gb/s inside"


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSECOMM_PROFILE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile._costs_for.cache_clear()


def lines_of(report: str) -> dict[str, str]:
    return {line[:20].strip(): line[20:].strip() for line in report.splitlines()}


@pytest.mark.parametrize(
    ("options", "nodes", "costs"),
    [
        ({"algorithm": "fastest"}, [0, 0, 0, 1], MEASURED),
        ({"algorithm": "tree", "wire": "plain", "bucket_bytes": 1500}, [0, 0, 0, 1], MEASURED),
        ({"algorithm": "tree", "wire": "plain", "bucket_bytes": 1500}, [0] * 4, None),
    ],
)
def test_what_a_reducer_takes_and_why(options: dict[str, Any], nodes: list[int], costs: str | None) -> None:
    def program(transport: simulated.SimulatedTransport) -> dict[str, str]:
        reducer = reducer_of(transport, **({"bucket_bytes": None} | options))
        assert "algorithm" not in lines_of(reducer.report())
        for step in range(2):  # buckets are reordered after the first step
            reducer.reduce(gradients(10 * step + transport.rank))
        return lines_of(reducer.report())

    results = simulated.run(4, program, node_of_rank=nodes, **NETWORK)
    for report in (result.value for result in results):
        assert report.get("by costs") == costs
        assert " with " in report["algorithm"]
        if "wire" in options:
            assert report["algorithm"].startswith("tree with plain")
        if costs is not None:
            assert report["predicted"]


def test_set_up_is_apart_from_training() -> None:
    """Set-up plus training is all traffic of the transport. Resets and other calls do not mix them."""
    fields = "bytes_sent", "bytes_received", "setup_sent", "setup_received"

    def program(transport: simulated.SimulatedTransport) -> list[dict[str, int]]:
        def counted(counters: Any, *names: str) -> dict[str, int]:
            return {name: getattr(counters, name) for name in names}

        reducer, counts = reducer_of(transport, algorithm="fastest", bucket_bytes=None), []
        for step in range(3):
            reducer.reduce(gradients(10 * step + transport.rank))
            counts += [counted(reducer.counters, *fields), counted(transport.counters, *fields[:2])]
        sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=transport, algorithm="tree")
        reducer.counters.reset()
        sc.check_weights({"a": np.zeros(9)}, comm=transport)
        before = transport.counters.bytes_sent
        reducer.reduce(gradients(transport.rank))
        assert reducer.counters.bytes_sent == transport.counters.bytes_sent - before
        assert 0 < reducer.counters.setup_sent < 1000
        assert lines_of(reducer.report())["set-up"].startswith(f"{bytes_text(reducer.counters.setup_sent)} sent")
        return counts

    for counts in run(4, program, **NETWORK):
        for mine, total in zip(counts[::2], counts[1::2], strict=True):
            assert mine["bytes_sent"] + mine["setup_sent"] == total["bytes_sent"]
            assert mine["bytes_received"] + mine["setup_received"] == total["bytes_received"]
        assert counts[4]["setup_sent"] == counts[2]["setup_sent"]  # no further set-up
        assert counts[0]["setup_sent"] > 5000  # includes the measurement of links


@pytest.mark.parametrize(("P", "knows"), [(2, True), (2, False), (40, True)])
def test_traffic_with_peers(P: int, knows: bool) -> None:
    """The report shows the slowest peers, and none if the transport does not know its peers."""

    def program(transport: simulated.SimulatedTransport) -> str:
        others = [rank for rank in range(P) if rank != transport.rank and knows]
        traffic = [PeerTraffic(rank, 1000 * rank, 7, 0.5 if rank else 0.0, 0.08, rank, 1) for rank in others]
        transport.peers = lambda: traffic  # type: ignore[method-assign]
        reducer = reducer_of(transport)
        reducer.reduce(gradients(transport.rank))
        return reducer.report()

    for rank, report in enumerate(run(P, program)):
        lines = lines_of(report)
        shown = [int(name.removeprefix("rank ")) for name in lines if name.startswith("rank ")]
        assert shown == [other for other in range(P) if other != rank and knows][:16]
        assert ("peer" in report) == knows
        assert ("the slowest 16 of 39 peers" in report) == (P == 40)
        for other in shown:
            sent, _, received, unit, *rest = lines[f"rank {other}"].split()
            assert f"{sent} B" == bytes_text(1000 * other) or f"{sent} kB" == bytes_text(1000 * other)
            assert (received, unit) == ("7", "B")
            rate = ["-"] if other == 0 else [f"{16 * other}", "kb/s"]
            assert rest == [*rate, "80", "ms", str(other)]
