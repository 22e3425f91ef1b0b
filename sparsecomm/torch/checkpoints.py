"""Checkpoints in one call: a file per rank, written whole or not at all, for any number of ranks."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from sparsecomm.adamw import SparseAdamW as SparseAdamWOfArrays
from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.loading import Prepared, Undo
from sparsecomm.calls.loading import load as load_on_all
from sparsecomm.calls.queue import queue_of
from sparsecomm.checks import shown, whole
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps import LocalSteps, reshard
from sparsecomm.reducer import Reducer
from sparsecomm.torch.diloco import DiLoCo
from sparsecomm.torch.hook import SparseState
from sparsecomm.torch.optimizer import KEY, SparseOptimizer
from sparsecomm.torch.optimizer_state import mapped
from sparsecomm.torch.parameters import Parameters
from sparsecomm.torch.shards import is_sharded
from sparsecomm.transport import Comm, of

__all__ = ["Checkpoint", "Stateful", "load", "save"]

_log = logging.getLogger("sparsecomm")

Folder: TypeAlias = "str | os.PathLike[str]"
_NAME = re.compile(r"step(\d+)-rank(\d+)-of(\d+)\.pt")
_CANDIDATES = 16  # of the newest checkpoints, among which ranks look for one that all of them can read
_LABEL = 0x636B7074
_OF_ARRAYS = (Reducer, LocalSteps, SparseAdamWOfArrays)


class Checkpoint(NamedTuple):
    """What `load` has loaded.

    Attributes:
        step: that it was saved by.
        values: by name, of what has no ``load_state_dict``.
        ranks: how many ranks have saved it.
    """

    step: int
    values: dict[str, Any]
    ranks: int


def save(folder: Folder, step: int, objects: Mapping[str, object], *, comm: Comm = None, keep: int = 1) -> None:
    """Save a checkpoint, each rank its part. Collective.

        state = sparsecomm.torch.register(ddp, 0.01)
        objects = {"model": model, "optimizer": optimizer, "sparse": state}
        found = sparsecomm.torch.load(folder, objects)
        for epoch in range(found.step if found else 0, epochs):
            ...
            sparsecomm.torch.save(folder, epoch + 1, objects)

    Each rank writes one file, under another name at first. Only if all ranks have written theirs do the files get their
    names. So a checkpoint is there as a whole or not at all, whenever a rank dies. Older ones are then removed.

    Args:
        folder: of the checkpoints, made if need be; one that all ranks see, or each node its own.
        step: its number: of steps, or of epochs; larger ones are newer.
        objects: by name: what has ``state_dict`` and ``load_state_dict``; other values are returned by `load`. They are
            of the types that ``torch.load(weights_only=True)`` reads.
        comm: the ranks; ``None``: all.
        keep: how many older checkpoints stay.

    Raises:
        InvalidInputError: an argument cannot be used, or a rank could not write its file. No rank has saved.
        CollectiveMismatchError: another rank saves another step, or other objects. No rank has saved.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    number, older = whole(step, 0), whole(keep, 1)
    for name, value, read, lowest in (("step", step, number, 0), ("keep", keep, older, 1)):
        if read is None or read >= 1 << 63:
            raise InvalidInputError(f"{name}={shown(value)}: expected a number from {lowest} on")
    assert number is not None
    assert older is not None
    named, ranks = _named(objects), of(comm)
    path = Path(folder) / _file(number, ranks.rank, ranks.size)
    part = path.with_suffix(".part")

    def prepare(undo: Undo) -> Prepared:
        undo.append(lambda: _remove(part))
        with _telling(f"writing {part}"):
            part.parent.mkdir(parents=True, exist_ok=True)
            states = {name: _state_of(one) for name, one in named.items()}
            with part.open("wb") as file:
                torch.save(states, file)
                file.flush()
                os.fsync(file.fileno())
            try:
                torch.load(part, weights_only=True, mmap=True)  # which leaves tensors in the file
            except pickle.UnpicklingError as error:
                unknown = re.search(r"GLOBAL (\S+)", str(error))
                raise InvalidInputError(
                    f"objects: {unknown[1] if unknown else error} cannot be loaded again; expected tensors, numbers, "
                    "texts, and lists and dictionaries of them, or types that torch.serialization.add_safe_globals was "
                    "told of"
                ) from error

        def commit() -> None:
            if part.exists():  # unless it was interrupted, and is called again
                part.replace(path)
            before = [found for found in _found(path.parent) if found.step < number]
            stay = [found for found in before if found.is_whole(ranks.rank, ranks.size)][:older]
            for found in before:
                if found not in stay:
                    found.remove(ranks.rank, ranks.size)

        return Prepared({}, commit)

    what = f"checkpoint {number} of {', '.join(sorted(named))}"
    load_on_all(ranks, what, [], prepare, does="save the same checkpoint")


def load(
    folder: Folder, objects: Mapping[str, object], *, comm: Comm = None, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks can read, into all objects that can load it. Collective.

    Where the number of ranks has changed, residuals are shared out among the new ones (`sparsecomm.reshard`), and all
    else is that of the old rank 0. With `DiLoCo` all ranks then begin with the global parameters.

    Args:
        folder, objects, comm: as in `save`.
        step: load the one of this step, and no other.

    Returns:
        What was loaded; ``None``: there is no checkpoint that all ranks see.

    Raises:
        InvalidInputError: none of the checkpoints can be read on all ranks, or it lacks an object; or an object refuses
            its state, as its ``load_state_dict`` says. Those before it, in the order of ``objects``, have loaded.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    named, ranks = _named(objects), of(comm)
    rank, size = ranks.rank, ranks.size
    mine = [each for each in _found(Path(folder)) if each.is_whole(rank, size) and step in (None, each.step)]
    words = [word for each in mine[:_CANDIDATES] for word in (each.step, each.size)]
    gather = WordsGather(ranks, words + [0] * (2 * _CANDIDATES - len(words)), _LABEL)
    queue_of(ranks).submit(gather).wait()
    pairs = [*zip(gather.words[::2], gather.words[1::2], strict=True)]
    candidates = set.intersection(*(set(pairs[r * _CANDIDATES : (r + 1) * _CANDIDATES]) for r in range(size)))
    refused: Exception | None = None
    for saved, old in sorted(candidates - {(0, 0)}, reverse=True):
        files = [Path(folder) / _file(saved, r, old) for r in ([rank] if old == size else range(old))]
        states: list[dict[str, Any]] = []
        try:
            load_on_all(ranks, "a checkpoint", [], _reader(files, states, named, old == size), does="read a checkpoint")
        except InvalidInputError as error:
            _log.warning("the checkpoint of step %s, of %s ranks, cannot be read: %s", saved, old, error)
            refused = refused or error
            continue
        values = {}
        for name, one in named.items():
            if not hasattr(one, "load_state_dict"):
                values[name] = states[0][name]
            else:
                one.load_state_dict(_for_this_rank(one, [state[name] for state in states], rank, size, old != size))
        for one in named.values() if old != size else ():
            if isinstance(one, DiLoCo):
                one.write_global_parameters()
        return Checkpoint(saved, values, old)
    if refused is not None:
        raise refused
    return None


class Stateful:
    """An object of this library for `torch.distributed.checkpoint`, beside a model that has shards.

        dcp.save({"model": model, "sparse": Stateful(state)}, checkpoint_id=folder)
        dcp.load({"model": model, "sparse": Stateful(state, folder)}, checkpoint_id=folder)

    Each rank's state is a tensor of bytes of its own. Another number of ranks may load it.

    Args:
        one: what has ``state_dict`` and ``load_state_dict``: a `SparseState`, an optimizer, a `DiLoCo`, a `Reducer`.
        checkpoint: where to load from: a folder, or a ``StorageReader``. ``None``: it is to be saved.
        name: where several are saved together, each has its own.
        comm: the ranks; ``None``: all.
    """

    def __init__(self, one: Any, checkpoint: Any = None, *, name: str = "state", comm: Comm = None) -> None:
        self._one, self._name, self._checkpoint, self._comm = one, name, checkpoint, comm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's state as bytes; to load, room for what is to be loaded.

        Raises:
            InvalidInputError: the checkpoint has none of this name.
        """
        ranks = of(self._comm)
        if self._checkpoint is None:
            kept = io.BytesIO()
            torch.save(_state_of(self._one), kept)
            return {self._key(ranks.rank, ranks.size): torch.frombuffer(kept.getbuffer(), dtype=torch.uint8)}
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        path = isinstance(self._checkpoint, (str, os.PathLike))
        reader: Any = FileSystemReader(self._checkpoint) if path else self._checkpoint
        saved = reader.read_metadata().state_dict_metadata
        sizes = {key.rpartition(".")[2]: size.size for key, size in saved.items() if hasattr(size, "size")}
        own = self._key(ranks.rank, ranks.size)
        found = {key: size for key, size in sizes.items() if re.fullmatch(self._key(r"\d+", r"\d+"), key)}
        if not found:
            raise InvalidInputError(f"{self._checkpoint} has no {self._name!r} of a Stateful; it has {shown([*saved])}")
        return {key: torch.empty(found[key], dtype=torch.uint8) for key in ([own] if own in found else found)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the object, from what `state_dict` has made room for. Collective."""
        ranks, (*_, last) = of(self._comm), sorted(state)
        old = int(last.rpartition("of")[2])
        keys = [self._key(ranks.rank, old)] if old == ranks.size else [self._key(rank, old) for rank in range(old)]
        states = [torch.load(io.BytesIO(state[key].numpy().tobytes()), weights_only=True) for key in keys]
        self._one.load_state_dict(_for_this_rank(self._one, states, ranks.rank, ranks.size, old != ranks.size))

    def _key(self, rank: int | str, size: int | str) -> str:
        return f"{self._name}-rank{rank}-of{size}"


def _named(objects: Mapping[str, object]) -> dict[str, Any]:
    if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
        raise InvalidInputError(f"objects: got {shown(objects)}; expected objects by name")
    return dict(objects)


def _state_of(one: Any) -> Any:
    state = one.state_dict() if hasattr(one, "state_dict") else one
    return mapped(state, np.ndarray, torch.from_numpy) if isinstance(one, _OF_ARRAYS) else state


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


class _Found(NamedTuple):
    """Files of a checkpoint that this rank sees."""

    step: int
    size: int
    ranks: set[int]
    folder: Path

    def is_whole(self, rank: int, size: int) -> bool:
        """Return whether a rank of so many sees what it would load."""
        return rank in self.ranks if self.size == size else len(self.ranks) == self.size

    def remove(self, rank: int, size: int) -> None:
        """Remove what a rank of so many is to remove; others may be doing the same."""
        for its in self.ranks & {rank} if self.size == size else self.ranks:
            _remove(self.folder / _file(self.step, its, self.size))


def _file(step: int, rank: int, size: int) -> str:
    return f"step{step}-rank{rank}-of{size}.pt"


def _found(folder: Path) -> list[_Found]:
    """Return checkpoints, the newest first, of which there are files."""
    found: dict[tuple[int, int], _Found] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if name := _NAME.fullmatch(path.name):
            step, rank, size = map(int, name.groups())
            found.setdefault((step, size), _Found(step, size, set(), folder)).ranks.add(rank)
    return [found[key] for key in sorted(found, reverse=True)]


def _reader(
    files: list[Path], states: list[dict[str, Any]], named: Mapping[str, object], own: bool
) -> Callable[[Undo], Prepared]:
    """Return what reads files into ``states``, and checks that they have what is to be loaded."""

    def prepare(undo: Undo) -> Prepared:
        undo.append(states.clear)
        for path in files:
            with _telling(f"reading {path}"):
                # Of other ranks' tensors none goes to the GPU that it came from. Files are replaced, and never written
                # to, so that tensors may stay in them.
                state = torch.load(path, map_location=None if own else "cpu", weights_only=True, mmap=True)
            if lacking := [name for name in named if name not in state]:
                raise InvalidInputError(f"{path} has no {lacking[0]!r}; it has {', '.join(map(repr, state))}")
            if not own:
                mapped(state, torch.Tensor, partial(_check_whole, path))
            states.append(state)
        return Prepared({}, lambda: None)

    return prepare


def _check_whole(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    if is_sharded(tensor):
        raise InvalidInputError(
            f"{path} has shards of tensors, of a mesh of other ranks; start as many as have saved it"
        )
    return tensor


def _for_this_rank(one: object, states: list[Any], rank: int, size: int, other_ranks: bool) -> Any:
    """Return the state of an object: this rank's own, or made from those of another number of ranks."""
    if isinstance(one, _OF_ARRAYS):
        states = mapped(states, torch.Tensor, torch.Tensor.numpy)
    first = states[0]
    if other_ranks:
        if isinstance(one, SparseOptimizer):
            return {**first, KEY: reshard([state[KEY] for state in states], rank, size)}
        if isinstance(one, (Parameters, SparseState, DiLoCo, *_OF_ARRAYS)):
            return reshard(states, rank, size)
    return first


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Turn what is raised within into an error that says what was done."""
    try:
        yield
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(f"{what} raised {type(error).__name__}: {error}") from error
