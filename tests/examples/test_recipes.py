"""The recipes for frameworks train sparsely, with equal weights on all ranks, and resume without a difference."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forks import Run
from tests.processes import ROOT, mpirun
from tests.thinning import exhaustive

IMPORTS = "sklearn.datasets", "torch.distributed.fsdp", "lightning.pytorch", "transformers.trainer"
RANKS, EPOCHS = 2, 3
LINE = re.compile(
    r"rank (\d): accuracy ([\d.]+)%, (\d+) steps, sent (\d+) B per step \(dense: (\d+) B\), weights (\w{8})"
)


@dataclass(frozen=True)
class Report:
    """The final output of a rank."""

    accuracy: float
    steps: int
    sent: int
    dense: int
    weights: str


def needs(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def reports(said: str, ranks: int, runs: int = 1) -> list[list[Report]]:
    """Return the final output of all ranks of each run."""
    by_rank: dict[int, list[Report]] = defaultdict(list)
    for r, a, n, s, d, w in LINE.findall(said):
        by_rank[int(r)].append(Report(float(a), int(n), int(s), int(d), w))
    assert {rank: len(of_rank) for rank, of_rank in by_rank.items()} == dict.fromkeys(range(ranks), runs), said
    return [[by_rank[rank][run] for rank in range(ranks)] for run in range(runs)]


def run(forks: Run, recipe: str, folder: Path, epochs: int, ranks: int = RANKS, *options: str) -> list[Report]:
    status, said = forks(ROOT / f"examples/{recipe}.py", "--epochs", epochs, "--folder", folder, *options, ranks=ranks)
    assert status == 0, said
    return reports(said, ranks or RANKS)[0]


def check(complete: list[Report], resumed: list[Report]) -> None:
    """Check that a complete run and one that resumed after the first epoch end with equal weights on all ranks."""
    for report in complete + resumed:
        assert report.accuracy > 60  # chance is 10
        assert 0 < report.sent < 0.05 * report.dense
        assert report.weights == complete[0].weights
    assert [report.steps * (EPOCHS - 1) for report in complete] == [report.steps * EPOCHS for report in resumed]


def forget_later_folders(folder: Path, _: Run) -> None:
    """Remove all checkpoints but the first epoch's."""
    _, *later = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: (len(path.name), path))
    assert len(later) == EPOCHS - 1
    for path in later:
        shutil.rmtree(path)


def make_first_last(folder: Path, _: Run) -> None:
    shutil.copy(folder / "epoch=0.ckpt", folder / "last.ckpt")
    shutil.rmtree(folder / "last.ckpt.ranks")
    shutil.copytree(folder / "epoch=0.ckpt.ranks", folder / "last.ckpt.ranks")


def start_again(folder: Path, forks: Run) -> None:
    """Start again, if only the last checkpoint is stored."""
    shutil.rmtree(folder)
    run(forks, folder.name, folder, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "package", "go_back", "options"),
    [
        exhaustive("torch_ddp", "torch", start_again, ()),
        exhaustive("lightning_ddp", "lightning", make_first_last, ()),
        exhaustive("lightning_ddp", "lightning", make_first_last, ("--adamw",)),
        exhaustive("accelerate_loop", "accelerate", forget_later_folders, ()),
        exhaustive("accelerate_loop", "accelerate", forget_later_folders, ("--adamw",)),
        exhaustive("hf_trainer", "transformers", forget_later_folders, ()),
        exhaustive("hf_trainer", "transformers", forget_later_folders, ("--adamw",)),
    ],
)
def test_recipe(
    recipe: str,
    package: str,
    go_back: Callable[[Path, Run], None],
    options: tuple[str, ...],
    tmp_path: Path,
    forks: Run,
) -> None:
    needs("torch", "sklearn", package, *["accelerate"] * (package == "transformers"))
    first = 0 if recipe == "lightning_ddp" else RANKS  # Lightning starts its other ranks itself
    complete = run(forks, recipe, tmp_path / recipe, EPOCHS, first, *options)
    go_back(tmp_path / recipe, forks)
    check(complete, run(forks, recipe, tmp_path / recipe, EPOCHS, RANKS, *options))


SEVERAL = """
import runpy, sys
_, recipe, *words = sys.argv
for folder, epochs in zip(words[::2], words[1::2]):
    sys.argv = [recipe, "--folder", folder, "--epochs", epochs]
    runpy.run_path(recipe, run_name="__main__")
"""


@pytest.mark.slow
def test_recipe_over_mpi(tmp_path: Path) -> None:
    """Three runs share one process, since imports take longer than the runs."""
    needs("torch", "sklearn")
    runs = [(tmp_path / "whole", EPOCHS), (tmp_path / "again", 1), (tmp_path / "again", EPOCHS)]
    words = [str(word) for arguments in runs for word in arguments]
    status, said = mpirun(RANKS, "-c", SEVERAL, str(ROOT / "examples/torch_optimizer.py"), *words)
    assert status == 0, said
    complete, _, resumed = reports(said, RANKS, len(runs))
    check(complete, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [exhaustive(()), exhaustive(("--local-steps", "10"))], ids=["each step", "local steps"]
)
def test_shards(options: tuple[str, ...], tmp_path: Path, forks: Run) -> None:
    """Two replicas of two shards, with and without local steps, resume from their checkpoints."""
    needs("torch", "sklearn")
    for epochs in (1, EPOCHS):
        final = run(forks, "fsdp_hybrid", tmp_path / "run", epochs, 4, *options)
        assert len({report.weights for report in final}) == 1
        assert all(0 < report.sent < 0.05 * report.dense for report in final)
    assert final[0].accuracy > 60
