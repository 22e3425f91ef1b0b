"""Checkpoints in one call: a file per rank, written whole or not at all, for any number of ranks.

This module is compiled, so that no signal handler comes between what all ranks have decided and the name of a file.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.encoding import decode, encode
from sparsecomm.calls.loading import Prepared, Undo
from sparsecomm.calls.loading import load as load_on_all
from sparsecomm.calls.queue import queue_of
from sparsecomm.checks import shown, whole
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps import LocalSteps, reshard
from sparsecomm.optimizers.arrays import SparseAdamW
from sparsecomm.reducer import Reducer
from sparsecomm.transport import Comm, Transport, of

__all__ = ["OF_ARRAYS", "Checkpoint", "Files", "Folder", "load", "save"]

_log = logging.getLogger("sparsecomm")

Folder: TypeAlias = "str | os.PathLike[str]"
OF_ARRAYS = (Reducer, LocalSteps, SparseAdamW)  # whose states have NumPy's arrays, and can be made for other ranks
_CANDIDATES = 16  # of the newest checkpoints, among which ranks look for one that all of them can read
_LABEL = 0x636B7074


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
    """Save a checkpoint, each rank its part. Collective. For PyTorch there is `sparsecomm.torch.save`.

        found = sc.load(folder, {"weights": None, "sparse": reducer})
        if found:
            weights = found.values["weights"]
        for step in range(found.step if found else 0, steps):
            ...
            sc.save(folder, step + 1, {"weights": weights, "sparse": reducer})

    Each rank writes one file, under another name at first. Only if all ranks have written theirs do the files get their
    names. So a checkpoint is there as a whole or not at all, whenever a rank dies. Older ones are then removed. What is
    saved last is the newest, also where a training has gone back, or begins anew; later steps then stay.

    Args:
        folder: of the checkpoints, made if need be; one that all ranks see, or each node its own.
        step: its number: of steps, or of epochs.
        objects: by name: what has ``state_dict`` and ``load_state_dict``; other values are returned by `load`. They are
            ``None``, bools, numbers, texts, arrays (of NumPy, JAX, or others with ``__dlpack__``), and lists, tuples
            and dictionaries of such. Files are JSON and raw arrays; nothing in them is evaluated.
        comm: the ranks; ``None``: all.
        keep: how many older checkpoints stay, at least; the same on all ranks.

    Raises:
        InvalidInputError: an argument cannot be used, or a rank could not write its file. No rank has saved.
        CollectiveMismatchError: another rank saves another step, or other objects. No rank has saved.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    Files().save(folder, step, objects, comm, keep)


def load(
    folder: Folder, objects: Mapping[str, object], *, comm: Comm = None, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks can read, into all objects that can load it. Collective.

    Where the number of ranks has changed, residuals are shared out among the new ones (`reshard`), and all else is that
    of the old rank 0; with `LocalSteps` begin with the global parameters then. The state of `sparsecomm.jax.sparsify`
    is a value, and has residuals in it: load it with as many ranks as have saved it.

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
    return Files().load(folder, objects, comm, step)


class Files:
    """The files of checkpoints, and how states get into them. Other formats are subclasses.

    Attributes:
        suffix: of their names.
    """

    suffix = ".arrays"

    def write(self, file: BinaryIO, states: dict[str, Any]) -> None:
        """Write states by name to a new file, and check that `read` will take them."""
        encode(states).tofile(file)

    def read(self, path: Path, *, own: bool) -> dict[str, Any]:
        """Return the states in a file; ``own``: this rank's, of a checkpoint of as many ranks."""
        states: dict[str, Any] = decode(np.fromfile(path, np.uint8))
        return states

    def state_of(self, one: Any) -> Any:
        """Return what `write` can write of an object, or of a value."""
        return one.state_dict() if hasattr(one, "state_dict") else one

    def for_this_rank(self, one: object, states: list[Any], rank: int, size: int, *, own: bool) -> Any:
        """Return the state of an object: this rank's ``own``, or made of those of another number of ranks."""
        return states[0] if own or not isinstance(one, OF_ARRAYS) else reshard(states, rank, size)

    def save(self, folder: Folder, step: int, objects: Mapping[str, object], comm: Comm, keep: int) -> None:
        """See `save`."""
        at, number, older = _path(folder), _number("step", step, 0), _number("keep", keep, 1)
        named, ranks = _named(objects), of(comm)
        on_all, last = self._on_all(at, ranks, older + _CANDIDATES)
        saved = _Saved(max(1, last.run + (number <= last.step)), number, ranks.size)
        path = saved.path(at, ranks.rank, self.suffix)
        part = path.with_suffix(".part")

        def prepare(undo: Undo) -> Prepared:
            undo.append(lambda: _remove(part))
            with _telling(f"writing {part}"):
                at.mkdir(parents=True, exist_ok=True)
                states = {name: self.state_of(one) for name, one in named.items()}
                with part.open("wb") as file:
                    self.write(file, states)
                    file.flush()
                    os.fsync(file.fileno())

            def commit() -> None:
                os.replace(part, path)
                self._remove_older(at, ranks, on_all[older - 1 : older], number)

            return Prepared({}, commit)

        what = f"checkpoint {number} of {', '.join(sorted(named))}"
        load_on_all(ranks, what, [], prepare, does="save the same checkpoint")

    def _remove_older(self, folder: Path, ranks: Transport, than: list[_Saved], step: int) -> None:
        """Remove checkpoints, and parts of files that a rank which was killed has left.

        Later steps stay: a training that goes back, or begins anew, does not take those of another one along.

        Args:
            than: the oldest that is to stay, if there is one. All ranks have it; what only this one sees may be newer.
            step: that this rank has saved.
        """
        for each, files in self._found(folder).items():
            if than and each < than[0] and each.step <= step:
                for rank in files & {ranks.rank} if each.size == ranks.size else files:
                    _remove(each.path(folder, rank, self.suffix))
        for left in folder.glob(f"step*-rank{ranks.rank}-of*.part"):
            _remove(left)

    def load(self, folder: Folder, objects: Mapping[str, object], comm: Comm, step: int | None) -> Checkpoint | None:
        """See `load`."""
        at, wanted = _path(folder), None if step is None else _number("step", step, 0)
        named, ranks = _named(objects), of(comm)
        rank, size = ranks.rank, ranks.size
        refused: Exception | None = None
        for saved in self._on_all(at, ranks, _CANDIDATES, wanted)[0]:
            own = saved.size == size
            try:
                states = self._read_on_all(saved, at, ranks, named)
            except InvalidInputError as error:
                _log.warning(
                    "the checkpoint of step %s, of %s ranks, cannot be read: %s", saved.step, saved.size, error
                )
                refused = refused or error
                continue
            values = {}
            for name, one in named.items():
                state = self.for_this_rank(one, [its[name] for its in states], rank, size, own=own)
                if hasattr(one, "load_state_dict"):
                    one.load_state_dict(state)
                else:
                    values[name] = state
            return Checkpoint(saved.step, values, saved.size)
        if refused is not None:
            raise refused
        return None

    def _read_on_all(
        self, saved: _Saved, folder: Path, ranks: Transport, named: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        """Return this rank's states, or those of all ranks of another number. Collective.

        Raises:
            InvalidInputError: they cannot be read on some rank, or are not of all objects.
        """
        states: list[dict[str, Any]] = []
        own = saved.size == ranks.size

        def prepare(undo: Undo) -> Prepared:
            for rank in [ranks.rank] if own else range(saved.size):
                path = saved.path(folder, rank, self.suffix)
                with _telling(f"reading {path}"):
                    its = self.read(path, own=own)
                if lacking := [name for name in named if name not in its]:
                    raise InvalidInputError(f"{path} has no {lacking[0]!r}; it has {', '.join(map(repr, its))}")
                states.append(its)
            return Prepared({}, lambda: None)

        load_on_all(ranks, "a checkpoint", [], prepare, does="read a checkpoint")
        return states

    def _found(self, folder: Path) -> dict[_Saved, set[int]]:
        """Return checkpoints, the newest first, and the ranks whose files are there."""
        pattern = re.compile(
            rf"step(\d{{1,18}})-rank(\d{{1,9}})-of(\d{{1,9}})(?:-run(\d{{1,9}}))?{re.escape(self.suffix)}"
        )
        found: dict[_Saved, set[int]] = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if name := pattern.fullmatch(path.name):
                step, rank, size, run = map(int, name.groups("1"))
                found.setdefault(_Saved(run, step, size), set()).add(rank)
        return dict(sorted(found.items(), reverse=True))

    def _on_all(
        self, folder: Path, ranks: Transport, count: int, step: int | None = None
    ) -> tuple[list[_Saved], _Saved]:
        """Return which checkpoints all ranks see, the newest first, and the newest that any rank sees. Collective.

        Args:
            count: of each rank's newest, so many are looked at.
            step: only those of this step; ``None``: all.
        """
        none = _Saved(0, 0, 0)
        mine: list[_Saved] = []

        def prepare(undo: Undo) -> Prepared:
            with _telling(f"looking for checkpoints in {folder}"):
                found = self._found(folder)
            whole = [each for each, files in found.items() if step in (None, each.step) and each.is_whole(files, ranks)]
            mine[:] = [next(iter(found), none), *whole[:count], *[none] * (count - len(whole))]
            return Prepared({}, lambda: None)

        load_on_all(ranks, "checkpoints", [], prepare, does="look for checkpoints")
        gather = WordsGather(ranks, [word for each in mine for word in each], _LABEL)
        queue_of(ranks).submit(gather).wait()
        of_ranks = [[_Saved(*each) for each in its] for its in np.reshape(gather.words, (ranks.size, -1, 3)).tolist()]
        common = set.intersection(*(set(whole) for _, *whole in of_ranks))
        return sorted(common - {none}, reverse=True), max(last for last, *_ in of_ranks)


class _Saved(NamedTuple):
    """A checkpoint; later ones are larger."""

    run: int  # of the training, from 1: one that goes back to an earlier step, or begins anew, is another
    step: int
    size: int  # how many ranks have saved it

    def path(self, folder: Path, rank: int, suffix: str) -> Path:
        run = f"-run{self.run}" if self.run > 1 else ""
        return folder / f"step{self.step}-rank{rank}-of{self.size}{run}{suffix}"

    def is_whole(self, files: set[int], ranks: Transport) -> bool:
        """Return whether a rank that sees the files of these ranks sees what it would load."""
        return ranks.rank in files if self.size == ranks.size else len(files) == self.size


def _path(folder: Folder) -> Path:
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


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Turn what is raised within into an error that says what was done."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{what}: {error}") from error
    except Exception as error:
        raise InvalidInputError(f"{what} raised {type(error).__name__}: {error}") from error
