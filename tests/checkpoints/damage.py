"""Damaged checkpoint files on 2 to 4 ranks: all ranks load the newest undamaged checkpoint.

In each case ranks save several checkpoints as files of NumPy or PyTorch, in one folder or one per rank, and some files
are damaged. `load` must return the saved values of the same checkpoint on all ranks, which must not be older than the
newest undamaged one. If none can be loaded, all ranks must raise. A further save must keep a checkpoint that can be
loaded.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated

MAX_BYTES = 1 << 30  # largest file that is read
Damage = Callable[[Path, Path, np.random.Generator], object]  # (file, another file, random generator)


def _flip(path: Path, other: Path, rng: np.random.Generator) -> None:
    raw = bytearray(path.read_bytes())
    for at in rng.integers(0, len(raw), rng.integers(1, 4)):
        raw[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(raw)


def _swap(path: Path, other: Path, rng: np.random.Generator) -> None:
    between = path.with_suffix(".between")
    path.rename(between)
    other.rename(path)
    between.rename(other)


def _compress(path: Path, other: Path, rng: np.random.Generator) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
    except zipfile.BadZipFile:  # damaged before
        members = {}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _another(make: Callable[[Path], object]) -> Damage:
    def replace(path: Path, other: Path, rng: np.random.Generator) -> None:
        path.unlink()
        make(path)

    return replace


def _foreign(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, values=np.arange(5))


DAMAGES: dict[str, Damage] = {
    "flipped": _flip,
    "cut": lambda path, other, rng: os.truncate(path, int(rng.integers(0, path.stat().st_size))),
    "grown": lambda path, other, rng: os.truncate(path, path.stat().st_size + int(rng.integers(1, 10_000))),
    "huge": lambda path, other, rng: os.truncate(path, 1 << 40),
    "swapped": _swap,
    "copied over": lambda path, other, rng: shutil.copy(other, path),
    "compressed": _compress,
    "empty": _another(Path.touch),
    "FIFO": _another(lambda path: os.mkfifo(path)),
    "device": _another(lambda path: path.symlink_to("/dev/zero")),
    "folder": _another(Path.mkdir),
    "dangling link": _another(lambda path: path.symlink_to("/nowhere/at/all")),
    "missing": _another(lambda path: None),
    "pickle": _another(lambda path: path.write_bytes(pickle.dumps({"checkpoint": {}, "states": {}}))),
    "text": _another(lambda path: path.write_text("step 3\n")),
    "foreign": _another(_foreign),
}


class Case:
    """A case, determined by its number."""

    def __init__(self, seed: int, number: int) -> None:
        rng = self.rng = np.random.default_rng([seed, number])
        self.number, self.P, self.steps = number, int(rng.integers(2, 5)), int(rng.integers(1, 5))
        self.torch, self.shared = bool(rng.random() < 0.5), bool(rng.random() < 0.5)
        self.suffix = ".pt" if self.torch else ".npz"

    def play(self) -> str:
        """Play the case on simulated ranks and return its outcome. An AssertionError is a failure."""
        with tempfile.TemporaryDirectory() as folder:
            self.root = Path(folder)
            self._save(list(range(1, self.steps + 1)), self.steps)
            undamaged = set(range(1, self.steps + 1))
            kinds = [kind for kind in (self._damage(undamaged) for _ in range(int(self.rng.integers(1, 4)))) if kind]
            newest, began = max(undamaged, default=0), time.monotonic()
            results = self._load()
            assert time.monotonic() - began < 60, f"{kinds}: took as long as a timeout"
            errors = [result.error for result in results]
            if any(errors):
                assert all(isinstance(error, sc.InvalidInputError) for error in errors), f"{kinds}: {errors}"
                assert not undamaged, f"{kinds}: {newest} is whole, and was not loaded: {errors}"
                return "refused"
            steps = {result.value for result in results}
            assert len(steps) == 1, f"{kinds}: ranks have loaded steps {steps}"
            (step,) = steps
            assert step >= newest, f"{kinds}: {newest} is whole, and {step} was loaded"
            self._save([self.steps + 1], 1)
            last = {result.value for result in self._load()}
            assert last == {self.steps + 1}, f"{kinds}: after another save {last} was loaded"
            for path in self.root.rglob(f"step{self.steps + 1}-*"):
                path.unlink()
            loaded = {result.value for result in self._load()}
            assert loaded == {step}, f"{kinds}: the good one of step {step} was removed"
            return "loaded the newest" if step == self.steps else "loaded an older one"

    def _damage(self, undamaged: set[int]) -> str:
        """Damage a file, and remove its steps from ``undamaged``; return the kind of damage."""
        kind = list(DAMAGES)[self.rng.integers(len(DAMAGES))]
        paths = sorted(self.root.rglob(f"step*{self.suffix}"), reverse=True)
        regular = [path for path in paths if path.is_file() and 0 < path.stat().st_size < MAX_BYTES]
        path = regular[min(int(self.rng.exponential(2)), len(regular) - 1)] if regular else None
        others = [other for other in regular if path and other.name != path.name]
        if path is None or not others:
            return ""
        other = others[self.rng.integers(len(others))]
        before = {file: file.read_bytes() for file in (path, other)}
        DAMAGES[kind](path, other, self.rng)
        for file, content in before.items():
            if not (file.is_file() and file.stat().st_size < MAX_BYTES and file.read_bytes() == content):
                undamaged.discard(int(file.name[4:].partition("-")[0]))
        return kind

    # -- on all ranks -------------------------------------------------------------------------------------------------

    def _module(self) -> Any:
        return sc.torch if self.torch else sc

    def _folder(self, rank: int) -> Path:
        return self.root if self.shared else self.root / str(rank)

    def _value(self, step: int, rank: int) -> Any:
        array = np.random.default_rng([self.number, step, rank]).standard_normal(50).astype(np.float32)
        array[-2:] = step, rank
        if not self.torch:
            return array
        import torch

        return torch.from_numpy(array)

    def _save(self, steps: list[int], keep: int) -> None:
        def program(transport: simulated.SimulatedTransport) -> None:
            for step in steps:
                objects = {"x": self._value(step, transport.rank), "step": step}
                self._module().save(self._folder(transport.rank), step, objects, comm=transport, keep=keep)

        simulated.run(self.P, program)

    def _load(self) -> list[Any]:
        def program(transport: simulated.SimulatedTransport) -> Any:
            names = {"x": None, "step": None}
            loaded = self._module().load(self._folder(transport.rank), names, comm=transport)
            assert loaded is not None
            assert loaded.step == loaded.values["step"]
            np.testing.assert_array_equal(loaded.values["x"], self._value(loaded.step, transport.rank))
            return loaded.step

        return simulated.run(self.P, program, catch=True)
