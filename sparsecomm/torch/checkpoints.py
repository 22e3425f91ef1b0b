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
from sparsecomm.transport import Comm, Transport, of

__all__ = ["Checkpoint", "Stateful", "load", "save"]

_log = logging.getLogger("sparsecomm")

Folder: TypeAlias = "str | os.PathLike[str]"
_NAME = re.compile(r"step(\d{1,18})-rank(\d{1,9})-of(\d{1,9})(?:-try(\d{1,9}))?\.pt")
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
        keep: how many older checkpoints stay; the same on all ranks.

    Raises:
        InvalidInputError: an argument cannot be used, or a rank could not write its file. No rank has saved.
        CollectiveMismatchError: another rank saves another step, or other objects. No rank has saved.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    path, number, older = _folder(folder), _number("step", step, 0), _number("keep", keep, 1)
    named, ranks = _named(objects), of(comm)
    on_all, tries = _on_all(path, ranks, older + _CANDIDATES, saving=number)
    saved = _Saved(number, tries + 1, ranks.size)
    path = saved.path(path, ranks.rank)
    part = path.with_suffix(".part")
    if ranks.rank == 0 and on_all and on_all[0].step > number:
        _log.warning(
            "%s: checkpoint %s is saved beside one of step %s, which load takes for the newest; remove that one",
            folder,
            number,
            on_all[0].step,
        )

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
            # A rank may have died before it gave its file the name: what this one sees is not there for all.
            stay = [each for each in on_all if each < saved][older - 1 : older]
            for each, files in _found(path.parent).items():
                if each < saved and (each < min(stay, default=each) or not each.is_whole(files, ranks)):
                    for rank in files & {ranks.rank} if each.size == ranks.size else files:
                        _remove(each.path(path.parent, rank))
            for left in path.parent.glob(f"step*-rank{ranks.rank}-of*.part"):  # of a process that was killed
                _remove(left)

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
    path, wanted = _folder(folder), None if step is None else _number("step", step, 0)
    named, ranks = _named(objects), of(comm)
    rank, size = ranks.rank, ranks.size
    refused: Exception | None = None
    for saved in _on_all(path, ranks, _CANDIDATES, wanted)[0]:
        old = saved.size
        files = [saved.path(path, r) for r in ([rank] if old == size else range(old))]
        states: list[dict[str, Any]] = []
        try:
            load_on_all(ranks, "a checkpoint", [], _reader(files, states, named, old == size), does="read a checkpoint")
        except InvalidInputError as error:
            _log.warning("the checkpoint of step %s, of %s ranks, cannot be read: %s", saved.step, old, error)
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
        return Checkpoint(saved.step, values, old)
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


def _folder(folder: Folder) -> Path:
    try:
        return Path(folder)
    except TypeError:
        raise InvalidInputError(f"folder={shown(folder)}: expected a path") from None


def _number(name: str, value: int, lowest: int) -> int:
    number = whole(value, lowest, 10**18 - 1)
    if number is None:
        raise InvalidInputError(f"{name}={shown(value)}: expected a number from {lowest} on, of 18 digits at most")
    return number


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


class _Saved(NamedTuple):
    """A checkpoint; later ones are larger."""

    step: int
    tries: int  # how often one of this step was begun, this one included
    size: int  # how many ranks have saved it

    def path(self, folder: Path, rank: int) -> Path:
        again = f"-try{self.tries}" if self.tries > 1 else ""
        return folder / f"step{self.step}-rank{rank}-of{self.size}{again}.pt"

    def is_whole(self, files: set[int], ranks: Transport) -> bool:
        """Return whether a rank that sees the files of these ranks sees what it would load."""
        return ranks.rank in files if self.size == ranks.size else len(files) == self.size


def _found(folder: Path) -> dict[_Saved, set[int]]:
    """Return checkpoints, the newest first, and the ranks whose files are there."""
    found: dict[_Saved, set[int]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if name := _NAME.fullmatch(path.name):
            step, rank, size, tries = map(int, name.groups("1"))
            found.setdefault(_Saved(step, tries, size), set()).add(rank)
    return dict(sorted(found.items(), reverse=True))


def _on_all(
    folder: Path, ranks: Transport, count: int, step: int | None = None, saving: int | None = None
) -> tuple[list[_Saved], int]:
    """Return which checkpoints all ranks see, the newest first, and how often a rank has saved one. Collective.

    Args:
        count: of each rank's newest, so many are looked at.
        step: only those of this step; ``None``: all.
        saving: the step of the other number.
    """
    words: list[int] = []

    def prepare(undo: Undo) -> Prepared:
        with _telling(f"looking for checkpoints in {folder}"):
            found = _found(folder)
        whole = [each for each, files in found.items() if step in (None, each.step) and each.is_whole(files, ranks)]
        words.append(max((each.tries for each in found if each.step == saving), default=0))
        words.extend(word for each in whole[:count] for word in each)
        return Prepared({}, lambda: None)

    load_on_all(ranks, "checkpoints", [], prepare, does="look for checkpoints")
    none = _Saved(0, 0, 0)
    gather = WordsGather(ranks, [*words, *none * count][: 1 + len(none) * count], _LABEL)
    queue_of(ranks).submit(gather).wait()
    of_ranks = np.reshape(gather.words, (ranks.size, -1)).tolist()
    theirs = ({_Saved(*triple) for triple in zip(*[iter(words)] * len(none), strict=True)} for _, *words in of_ranks)
    return sorted(set.intersection(*theirs) - {none}, reverse=True), max(tries for tries, *_ in of_ranks)


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
