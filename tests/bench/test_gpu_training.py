"""`bench.gpu_training` with a tiny model on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

from bench import gpu_training  # noqa: E402

STEPS = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


def train(folder: Path, name: str, *arguments: object) -> tuple[int, dict[tuple[str, int], dict[str, Any]]]:
    """Return the exit status, and the rows of the file by way and step, without times and descriptions."""
    out = folder / f"{name}.jsonl"
    options = ["--tiny", "--device", "cpu", "--ranks", 2, "--steps", STEPS, "--every", 2, *arguments]
    status = gpu_training.main([*map(str, options), "--folder", str(folder), "--out", str(out)])
    rows = {}
    for row in map(json.loads, out.read_text().splitlines()):
        ms = row.pop("ms")
        assert min(ms["backward"], ms["step"]) > 0
        assert (ms["messages"] > 0) == (row["setting"]["way"] == "sparse")
        assert row.pop("about")["text"]["files"] > gpu_training.HELD_OUT
        rows[row["setting"]["way"], row["step"]] = row
    return status, rows


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_in_parts_has_the_losses_and_bytes_of_one_run(ranks: int, folder: Path) -> None:
    status, rows = train(folder, f"full-{ranks}", "--ranks", ranks)
    assert status == 0
    assert sorted(rows) == [(way, step) for way in ("dense", "sparse") for step in (2, 4, 5)]
    dense, sparse = rows["dense", STEPS], rows["sparse", STEPS]
    assert dense["bytes"] == pytest.approx(8 * (ranks - 1) / ranks, rel=1e-4)
    assert 0 < sparse["bytes"] < dense["bytes"] / 20
    for last in (dense, sparse):
        assert last["loss"] < rows[last["setting"]["way"], 2]["loss"] - 0.05
    name, part = f"parts-{ranks}", ("--ranks", ranks, "--part", 3)
    assert train(folder, name, *part)[0] == 3
    assert len(list(folder.glob("*.pt"))) == 2
    assert train(folder, name, *part) == (0, rows)
    assert not list(folder.glob("*.pt"))
    lines = (folder / f"{name}.jsonl").read_text()
    assert train(folder, name, *part) == (0, rows)
    assert (folder / f"{name}.jsonl").read_text() == lines  # nothing was trained


def test_sparse_adamw_at_density_1_equals_dense(folder: Path) -> None:
    """Without clipping, because sparse ranks clip by their own norms, and dense ranks by the norm of the mean."""
    _, rows = train(folder, "all", "--density", 1.0, "--clip", 1e9)
    _, one_rank = train(folder, "one", "--ranks", 1, "--batch", 4, "--clip", 1e9, "--ways", "dense")
    for step in (2, 4, 5):
        expected = one_rank["dense", step]["loss"]  # with the same samples
        assert rows["dense", step]["loss"] == pytest.approx(expected, abs=2e-3)
        assert rows["sparse", step]["loss"] == pytest.approx(expected, abs=2e-3)
