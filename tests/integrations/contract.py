"""Cases of every framework: a resumed run ends like an uninterrupted one, and density 1.0 equals dense training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.integrations.cases import case, move, on_rank_0, only_rank_0_warned, residuals, same_sum, warned

Settings = dict[str, Any]


class Outcome(NamedTuple):
    """The weights at the end, the steps and residuals of the exchange, and the residuals with which it began."""

    weights: torch.Tensor
    sparse: Any
    begun: Mapping[str, np.ndarray]


class Framework:
    """Runs of a framework. `contract` registers its cases."""

    kinds: tuple[str, ...] = ("sgd", "adamw")
    dense: tuple[tuple[Settings, int], ...]  # settings that equal plain DDP, and steps for 4 batches
    compiled: tuple[tuple[str, Settings], ...]  # kinds, and settings that compile the model
    nodes: Settings | None = None  # settings with which each rank saves a full checkpoint

    def run(self, folder: Path, kind: str, steps: int, start: Any = None, density: Any = 0.05, **more: Any) -> Outcome:
        """Train for ``steps`` batches, with a checkpoint after every second one. With ``density=None``, use DDP."""
        raise NotImplementedError

    def checkpoint(self, folder: Path, step: int) -> Path:
        """Return the path of a checkpoint."""
        raise NotImplementedError

    def beside(self, checkpoint: Path) -> Path:
        """Return the folder with the residuals of a checkpoint."""
        return checkpoint / "sparsecomm"

    def move(self, source: Path, target: Path) -> None:
        """Move a checkpoint and its residuals."""
        move(source, target)

    def resumes(self, folder: Path, kind: str) -> None:
        """A run loads the checkpoint's residuals, also after the checkpoint was moved, and among other checkpoints."""
        start, moved = self.checkpoint(folder / "a", 2), folder / "moved/to"
        expected = self.run(folder / "a", kind, 4).weights
        self.run(folder / "b", kind, 2)
        with warned() as messages:
            assert torch.equal(self.run(folder / "b", kind, 4, start).weights, expected)
            on_rank_0(self.move, start, moved)
            assert torch.equal(self.run(folder / "c", kind, 4, moved).weights, expected)
        assert not messages
        on_rank_0(shutil.rmtree, self.beside(moved))
        with warned() as messages:
            assert not torch.equal(self.run(folder / "d", kind, 4, moved).weights, expected)
        only_rank_0_warned(messages, f"the residuals of this checkpoint are not in {self.beside(moved)}")

    def another_checkpoint(self, folder: Path, kind: str) -> None:
        """Residuals of another run are not loaded, also if the checkpoint's own run was dense."""
        start = self.checkpoint(folder / "own", 2)

        def replace_residuals() -> None:
            shutil.rmtree(self.beside(start), ignore_errors=True)
            shutil.copytree(self.beside(self.checkpoint(folder / "other", 2)), self.beside(start))

        self.run(folder / "other", kind, 2)
        for density, words in ((0.05, "residuals of this checkpoint are not in"), (None, "saved without residuals")):
            if density is None and kind != "sgd":
                continue
            on_rank_0(shutil.rmtree, folder / "own", True)
            self.run(folder / "own", kind, 2, density=density)
            on_rank_0(replace_residuals)
            with warned() as messages:
                begun = self.run(folder / "new", kind, 4, start).begun
            only_rank_0_warned(messages, words)
            assert not any(values.any() for values in begun.values())

    def as_dense(self, folder: Path, number: int) -> None:
        settings, steps = self.dense[number]
        dense = self.run(folder / "dense", "sgd", 4, density=None, **settings).weights
        sparse = self.run(folder / "ours", "sgd", 4, density=1.0, **settings)
        torch.testing.assert_close(sparse.weights, dense, rtol=1e-3, atol=1e-5)
        assert sparse.sparse.step == steps

    def trains_compiled(self, folder: Path, number: int) -> None:
        kind, settings = self.compiled[number]
        expected = self.run(folder / "plain", kind, 4).weights
        for start in (None, self.checkpoint(folder / "a", 2)):
            compiled = self.run(folder / ("a" if start is None else "b"), kind, 4, start, **settings).weights
            torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-6)

    def on_another_number_of_ranks(self, folder: Path, kind: str) -> None:
        """Three ranks resume from a checkpoint of two with the same sum of residuals."""
        if os.environ["WORLD_SIZE"] == "2":
            same_sum(folder, residuals(self.run(folder, kind, 2).sparse))
        else:
            same_sum(folder, self.run(folder / "on", kind, 4, self.checkpoint(folder, 2)).begun)

    def each_rank_has_its_own_folder(self, folder: Path, kind: str) -> None:
        """As on nodes without a shared file system, where one rank of each node saves the model."""
        if self.nodes is None or os.environ["LOCAL_WORLD_SIZE"] != "1":
            return
        own = folder / os.environ["RANK"]
        expected, start = self.run(own, kind, 4, **self.nodes).weights, self.checkpoint(own, 2)
        assert torch.equal(self.run(own, kind, 4, start, **self.nodes).weights, expected)
        on_rank_0(shutil.rmtree, self.beside(start))  # one rank lacks its residuals, so all ranks begin without
        with warned() as messages:
            begun = self.run(own, kind, 4, start, **self.nodes).begun
        only_rank_0_warned(messages, "are not in")
        assert not any(values.any() for values in begun.values())


def contract(it: Framework) -> None:
    """Register the cases for a framework."""
    for method in (it.resumes, it.on_another_number_of_ranks, it.each_rank_has_its_own_folder):
        case(kind=it.kinds)(method)
    case(kind=it.kinds[:2])(it.another_checkpoint)
    case(number=[*range(len(it.dense))])(it.as_dense)
    if "SPARSECOMM_TEST_ALL" in os.environ:  # compilation takes long
        case(number=[*range(len(it.compiled))])(it.trains_compiled)
