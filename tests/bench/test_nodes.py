"""`bench.nodes` on simulated ranks, and on ranks of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import mpirun, needs_mpirun
from tests.thinning import exhaustive

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

SIZE = 1 << 18


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPARSECOMM_THREADS", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows(stem: Path, what: str) -> list[dict[str, Any]]:
    content = json.loads(stem.with_suffix(".json").read_text())
    assert sorted({row["run"] for row in content["rows"]}) == list(range(len(content["runs"])))
    return [row for row in content["rows"] if row["what"] == what]


def test_bytes_memory_and_work_of_simulated_ranks(tmp_path: Path) -> None:
    from bench import nodes

    stem, few = tmp_path / "nodes", ["--elements", str(SIZE), "--steps", "2", "--write", str(tmp_path / "nodes")]
    nodes.main(["bytes", "--simulated", "2x1", "2x2", *few])
    sent = {(row["contender"], row["nodes"], row["per_host"]): row for row in rows(stem, "bytes")}
    for contender in ("Reducer", "SparseAdamW"):
        one, two = (sent[contender, False, per_host] for per_host in (1, 2))
        assert one["kB_inside"] == 0
        assert one["kB_to_other_hosts"] < SIZE / 1e3 / 5
        # Each of four ranks sends the same to each of its three peers. Two of them are on the other host.
        assert two["kB_to_other_hosts"] == pytest.approx(2 * two["kB_inside"], rel=0.05)
        assert two["kB_to_other_hosts"] == pytest.approx(2 * one["kB_to_other_hosts"], rel=0.15)
        if (contender, "auto", 2) in sent:
            assert sent[contender, "auto", 2]["kB_to_other_hosts"] < 1.2 * one["kB_to_other_hosts"]
    ratios = two["kB_to_other_hosts"] / one["kB_to_other_hosts"]
    assert f" {ratios:.2f} " in stem.with_suffix(".txt").read_text()

    nodes.main(["memory", "--simulated", "2x2", "4x2", *few])
    for row in rows(stem, "memory"):
        m = row["per_host"] if row["nodes"] == "auto" else 1
        assert row["sum"] == pytest.approx(8 + 5 / m + 16 / (row["hosts"] * row["per_host"]), rel=1e-3)
        assert row["all_allocated"] >= row["sum"]

    for _ in range(2):  # the second time replaces the results of the first
        nodes.main(["work", "--simulated", "4x1", "2x2", *few])
        assert all(0 < row["work_ms"][0] <= row["work_ms"][1] for row in rows(stem, "work"))
    kinds = [tuple(row[name] for name in nodes.KIND) for what in nodes.TITLES for row in rows(stem, what)]
    assert len(kinds) == len(set(kinds)) == len(sent) + 4 * (len(sent) // 4)


@needs_mpirun
@pytest.mark.parametrize("what", ["steps", exhaustive("bytes")])
def test_real_ranks(what: str, tmp_path: Path) -> None:
    stem = tmp_path / "nodes"
    status, said = mpirun(2, "-m", "bench.nodes", what, "--width", "64", "--steps", "2", "--write", str(stem))
    assert status == 0, said
    by_contender = {row["contender"]: row for row in rows(stem, what)}
    for row in by_contender.values():
        assert (row["hosts"], row["per_host"], row["rate"]) == (1, 2, None)
    if what == "bytes":
        assert set(by_contender) == {"DDP", "DDP with the hook", "SparseAdamW"}
        # Other programs may use the interface, too.
        assert by_contender["DDP"]["kB_inside"] > 2 * 4 * by_contender["DDP"]["parameters"] / 1e3
    else:
        assert set(by_contender) == {"computation alone", "DDP", "SparseAdamW"}
        assert all(0 < row["optimizer_ms"][1] < row["step_ms"][1] for row in by_contender.values())
