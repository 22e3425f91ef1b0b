"""Save and load checkpoints: the protocol between the ranks.

**Save.** (1) Each rank writes its file under a temporary name (``.part``), syncs it to disk and verifies it. (2) When
all ranks have done so, each renames its file and syncs the folder. (3) When all ranks have done so, each removes older
files. A rank may die at any moment: before (2) the older checkpoint is untouched. Once any file is renamed, all ranks
have a verified file of the new checkpoint, and `load` reads both temporary and final names.

**Load.** The ranks gather which checkpoints each of them sees. They try the checkpoints that all of them see, newest
first, until all ranks have read and verified their files of the same save.

If a signal handler raises while a rank waits for other ranks, `save` or `load` first finishes, and then raises this
exception.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sparsecomm.checkpoints import lock
from sparsecomm.checkpoints.files import MAX_RUN, SUFFIXES, CheckpointId, Folder, Format, find, part_of, remove, sync
from sparsecomm.checks import quote, to_int
from sparsecomm.errors import InvalidInputError, SparseCommError, log
from sparsecomm.signals import deferred
from sparsecomm.states import loading
from sparsecomm.states.loading import InterruptedElsewhereError, Interrupts, OtherPartsError, Prepared, Undo
from sparsecomm.transport import Comm, transport_of

T = TypeVar("T")


class Checkpoint(NamedTuple):
    """A checkpoint that `load` has loaded.

    Attributes:
        step, ranks: the step and the world size that it was saved with.
        values: the values of objects without ``load_state_dict``, by name.
    """

    step: int
    values: dict[str, Any]
    ranks: int


def save(folder: Folder, step: int, objects: Mapping[str, object], *, comm: Comm = None, keep: int = 1) -> None:
    """Save a checkpoint, one file per rank. Collective. For PyTorch use `sparsecomm.torch.save`.

        found = sc.load(folder, {"weights": None, "sparse": reducer})
        if found:
            weights = found.values["weights"]
        for step in range(found.step if found else 0, steps):
            ...
            sc.save(folder, step + 1, {"weights": weights, "sparse": reducer})

    A checkpoint exists on all ranks or on none, even if a rank dies. Older checkpoints are removed when the new one is
    complete, verified and durable on all ranks. The newest checkpoint is the one that was saved last, not the one with
    the highest step. If training returns to an earlier step, the checkpoints of later steps are not removed.

    Args:
        folder: created if needed. All ranks may share it, or each node may have its own. Only one job at a time may
            save into it.
        step: the number of the checkpoint, in steps or in epochs.
        objects: objects by name. For an object with ``state_dict`` and ``load_state_dict``, `save` stores its state
            dict. Any other object is stored as a value, which `load` returns: ``None``, bools, numbers, strings, arrays
            (of NumPy, JAX, or another library with ``__dlpack__``), and lists, tuples and dictionaries of them. The
            files are .npz archives without pickles.
        comm: the ranks that save; ``None``: all ranks.
        keep: number of older checkpoints to keep: at least 1, the same on all ranks. Damaged ones do not count.

    Raises:
        InvalidInputError: an argument is invalid, a rank could not write its file, a state has a value that `load`
            would refuse, or another job saves into the folder. No rank has saved. (If only renaming a file failed,
            `load` finds the new checkpoint.)
        CollectiveMismatchError: another rank saves another step, or other objects. No rank has saved.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    CheckpointFolder(Format(), folder, comm).save(step, objects, keep)


def load(
    folder: Folder, objects: Mapping[str, object], *, comm: Comm = None, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks can read. Collective.

    A checkpoint with a damaged file is skipped with a warning, and the one before it is tried. If the world size has
    changed, residuals are distributed over the new ranks (`reshard`), and everything else comes from the old rank 0.
    The same happens if a state of `SparseAdamW` has other parts than its rank needs, because the nodes have changed.
    If you use `LocalSteps` and the world size has changed, start from the global parameters. The state of
    `sparsecomm.jax.sparsify` is a value that contains residuals, so load it with the same world size.

    Args:
        folder, objects, comm: as in `save`. Objects with ``load_state_dict`` load their state.
        step: load the checkpoint of this step; ``None``: the newest one.

    Returns:
        The checkpoint, or ``None`` if no rank sees a checkpoint.

    Raises:
        InvalidInputError: checkpoints exist, but none is readable on all ranks and contains all ``objects``. Or an
            object refuses its state; the objects before it, in the order of ``objects``, have then been loaded.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    return CheckpointFolder(Format(), folder, comm).load(objects, step)


@deferred
class CheckpointFolder:
    """A folder of checkpoints of one format, which the ranks of a communicator use."""

    def __init__(self, form: Format, folder: Folder, comm: Comm, exclusive: bool = True) -> None:
        """Check the arguments. With ``exclusive``, `save` refuses a folder into which another job saves."""
        try:
            self._folder = Path(folder)
        except TypeError:
            raise InvalidInputError(f"folder={quote(folder)}: expected a path") from None
        self._form, self._exclusive, self._transport = form, exclusive, transport_of(comm)
        self._interrupts: Interrupts = []

    def save(self, step: int, objects: Mapping[str, object], keep: int) -> None:
        step, keep, objects = _integer("step", step, 0), _integer("keep", keep, 1), _checked(objects)
        self._finish(lambda: self._save(step, objects, keep))

    def load(self, objects: Mapping[str, object], step: int | None) -> Checkpoint | None:
        step, objects = None if step is None else _integer("step", step, 0), _checked(objects)
        return self._finish(lambda: self._load(objects, step))

    def exists_on_all_ranks(self) -> bool:
        """Return whether there is a checkpoint for which each rank sees the files that it would load. Collective."""
        return self._finish(lambda: bool(self._survey("exists_on_all_ranks()").complete))

    def _finish(self, operation: Callable[[], T]) -> T:
        """Return the result of an operation. If a signal handler raised while it waited, raise that exception."""
        try:
            return operation()
        finally:
            interrupts, self._interrupts = self._interrupts, []
            if interrupts:
                raise interrupts[0]

    def _on_all_or_none(
        self, label: str, prepare: Callable[[Undo], Prepared], action: str, keys: Sequence[str] = ()
    ) -> list[str]:
        """Run ``prepare`` on all ranks, or undo it on all if one fails. Return each rank's `Prepared.note`."""
        return loading.load(self._transport, label, keys, prepare, action, self._interrupts)

    # -- save ---------------------------------------------------------------------------------------------------------

    def _save(self, step: int, objects: Mapping[str, object], keep: int) -> None:
        folder, rank = self._folder, self._transport.rank
        survey = self._survey("save()")
        checkpoint = CheckpointId(max(1, survey.last.run + (step <= survey.last.step)), step, self._transport.size)
        if checkpoint.run > MAX_RUN:
            raise InvalidInputError(
                f"rank {rank}: {folder} contains a file of {survey.last} with the largest run number, {MAX_RUN}, in "
                "its name, so no checkpoint can follow it; remove that file"
            )
        path = checkpoint.path(folder, rank, self._form.suffix)
        part = part_of(path)

        def write(undo: Undo) -> Prepared:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if self._exclusive:
                    lock.acquire(folder, survey.job_id)
                undo.append(lambda: remove(part))
                remove(part)
                self._form.write(part, checkpoint, rank, survey.job_id, survey.save_id, objects)
                sync(folder)
                return Prepared()
            except InvalidInputError as error:
                raise InvalidInputError(f"writing {path}: {error}") from error
            except Exception as error:
                raise InvalidInputError(f"writing {path} raised {type(error).__name__}: {error}") from error

        def rename(undo: Undo) -> Prepared:
            os.replace(part, path)
            sync(folder)
            return Prepared()

        label = f"save(step={step}, keep={keep}) of {', '.join(sorted(map(repr, objects)))}"
        self._on_all_or_none(label, write, "save the same checkpoint")
        self._on_all_or_none(f"the end of {label}", rename, "give its file the final name")
        self._remove_older(survey, keep, step)

    def _remove_older(self, survey: _Survey, keep: int, step: int) -> None:
        """Remove old checkpoints, except the newest ``keep`` that all ranks can read. Collective, after a save.

        Checkpoints of later steps stay, because they may belong to another training.
        """
        good = (checkpoint for checkpoint in survey.complete if self._is_good(checkpoint))
        oldest = next(islice(good, keep - 1, None), None)
        if oldest is None:
            return
        for older, ranks in find(self._folder, self._form.suffix).items():
            if older < oldest and older.step <= step:
                for rank in [rank for rank in ranks if rank in older.ranks_for(self._transport)]:
                    path = older.path(self._folder, rank, self._form.suffix)
                    remove(path)
                    remove(part_of(path))

    def _is_good(self, checkpoint: CheckpointId) -> bool:
        """Return whether a checkpoint can be read on all ranks. Collective."""
        try:
            self._read_all(checkpoint, self._form.verify)
        except InvalidInputError as error:
            log.warning("the checkpoint of %s cannot be read: %s", checkpoint, error)
            return False
        except SparseCommError:
            raise
        except BaseException as interrupt:
            self._interrupts.append(interrupt)
            return False
        return True

    # -- load ---------------------------------------------------------------------------------------------------------

    def _load(self, objects: Mapping[str, object], step: int | None) -> Checkpoint | None:
        survey = self._survey("load()" if step is None else f"load(step={step})")
        refused: InvalidInputError | None = None
        for checkpoint in survey.complete:
            if step is not None and checkpoint.step != step:
                continue
            try:
                states = self._read(checkpoint, objects)
            except InterruptedElsewhereError:
                raise
            except InvalidInputError as error:
                log.warning("the checkpoint of %s is skipped: %s", checkpoint, error)
                refused = refused or error
                continue
            values = self._adopt(objects, states, converts=checkpoint.size != self._transport.size)
            if values is None:
                try:
                    states = self._read(checkpoint, objects, range(checkpoint.size))
                except InvalidInputError as error:
                    raise type(error)(
                        f"the checkpoint of {checkpoint} was saved with other nodes; give each rank the files of all "
                        f"ranks, or pass nodes= as when it was saved. {error}"
                    ) from error
                values = self._adopt(objects, states, converts=True)
            return Checkpoint(checkpoint.step, values or {}, checkpoint.size)
        if refused is not None:
            raise refused
        if any(survey.steps_by_rank):
            of_step = "" if step is None else f" of step {step}"
            raise InvalidInputError(
                f"rank {self._transport.rank}: no checkpoint{of_step} in {self._folder} is complete on all ranks. "
                f"Steps that each rank sees: {quote(survey.steps_by_rank)}. Restore the missing files, or choose "
                "another folder to start without them"
            )
        if survey.foreign:
            raise InvalidInputError(
                f"rank {self._transport.rank}: {self._folder} contains only checkpoints that this call cannot read. "
                "Load .npz files with sparsecomm.load and .pt files with sparsecomm.torch.load, or choose another "
                "folder to start without them"
            )
        return None

    def _adopt(
        self, objects: Mapping[str, Any], states: list[dict[str, Any]], *, converts: bool
    ) -> dict[str, Any] | None:
        """Load objects from states, and return the other values. If an object refuses its state, all ranks raise.

        With ``converts``, ``states`` holds the states of all old ranks, from which this rank's states are made. Without
        it, return ``None`` on all ranks if that is necessary, because the nodes have changed.
        """
        transport, values = self._transport, dict[str, Any]()
        for name, obj in objects.items():

            def adopt(undo: Undo, name: str = name, obj: Any = obj) -> Prepared:
                state = states[0][name]
                if converts:
                    state = self._form.for_world([saved[name] for saved in states], transport.rank, transport.size)
                if not hasattr(obj, "load_state_dict"):
                    values[name] = state
                    return Prepared()
                try:
                    obj.load_state_dict(state)
                except OtherPartsError:
                    if converts:
                        raise
                    return Prepared(note="other nodes")
                return Prepared()

            if any(self._on_all_or_none(f"load() of {name!r}", adopt, f"load {name!r}")):
                return None
        return values

    def _read(
        self, checkpoint: CheckpointId, objects: Mapping[str, object], ranks: Collection[int] | None = None
    ) -> list[dict[str, Any]]:
        """Return one dictionary of states by name for each file that this rank loads, or for ``ranks``. Collective."""
        states: list[dict[str, Any]] = []

        def read(path: Path, checkpoint: CheckpointId, rank: int) -> str:
            save_id, by_name = self._form.read(path, checkpoint, rank)
            if missing := [name for name in objects if name not in by_name]:
                raise InvalidInputError(f"the checkpoint has no {missing[0]!r}; it has {', '.join(map(repr, by_name))}")
            states.append(by_name)
            return save_id

        self._read_all(checkpoint, read, ranks)
        return states

    def _read_all(
        self,
        checkpoint: CheckpointId,
        read: Callable[[Path, CheckpointId, int], str],
        ranks: Collection[int] | None = None,
    ) -> None:
        """Call ``read``, which returns the save ID, for each file that this rank loads, or for ``ranks``. Collective.

        If a rank cannot read a file, or the files were not saved together, all ranks raise `InvalidInputError`.
        """

        def prepare(undo: Undo) -> Prepared:
            save_ids: list[str] = []
            for rank in checkpoint.ranks_for(self._transport) if ranks is None else ranks:
                path = checkpoint.path(self._folder, rank, self._form.suffix)
                try:
                    save_ids.append(read(path if os.path.lexists(path) else part_of(path), checkpoint, rank))
                except FileNotFoundError:  # another rank may have renamed it meanwhile
                    save_ids.append(read(path, checkpoint, rank))
                if save_ids[-1] != save_ids[0]:
                    raise InvalidInputError(f"the file of rank {rank} was not saved together with that of rank 0")
            return Prepared({"save": save_ids[0]})

        self._on_all_or_none("load() of a checkpoint", prepare, "read a checkpoint", ["save"])

    # -- survey -------------------------------------------------------------------------------------------------------

    def _survey(self, caller: str) -> _Survey:
        """Return which checkpoints the ranks see. Collective: ``caller`` is the same on all ranks."""

        def look(undo: Undo) -> Prepared:
            seen = [
                [*checkpoint, any(ranks.values()), all(r in ranks for r in checkpoint.ranks_for(self._transport))]
                for checkpoint, ranks in find(self._folder, self._form.suffix).items()
            ]
            foreign = any(find(self._folder, suffix) for suffix in SUFFIXES if suffix != self._form.suffix)
            job_id, random = lock.job_id_of(self._folder), os.urandom(16).hex()
            return Prepared(note=json.dumps({"seen": seen, "foreign": foreign, "job": job_id, "random": random}))

        notes = self._on_all_or_none(caller, look, f"look for checkpoints in {self._folder}")
        by_rank = [json.loads(note) for note in notes]
        seen = [{CheckpointId(*row[:3]): row[3:] for row in rank["seen"]} for rank in by_rank]
        # If any rank has renamed its file, all ranks have written theirs.
        written = sorted(
            {checkpoint for rank in seen for checkpoint, (renamed, _) in rank.items() if renamed}, reverse=True
        )
        return _Survey(
            [checkpoint for checkpoint in written if all(checkpoint in rank and rank[checkpoint][1] for rank in seen)],
            written[0] if written else CheckpointId(0, 0, 0),
            [[checkpoint.step for checkpoint, (renamed, _) in rank.items() if renamed] for rank in seen],
            any(rank["foreign"] for rank in by_rank),
            next((rank["job"] for rank in by_rank if rank["job"]), by_rank[0]["random"][:16]),
            by_rank[0]["random"],
        )


class _Survey(NamedTuple):
    """The checkpoints that the ranks see."""

    complete: list[CheckpointId]  # those for which each rank sees the files that it would load, newest first
    last: CheckpointId  # the newest checkpoint that any rank sees
    steps_by_rank: list[list[int]]  # for each rank, the steps of the checkpoints that it sees, newest first
    foreign: bool  # whether a rank sees checkpoints of another format
    job_id: str  # the ID of this job
    save_id: str  # a new random ID for a save


def _integer(name: str, value: int, min_value: int) -> int:
    number = to_int(value, min_value, 10**18 - 1)
    if number is None:
        raise InvalidInputError(f"{name}={quote(value)}: must be an integer from {min_value} to 10^18 - 1")
    return number


def _checked(objects: Mapping[str, object]) -> dict[str, Any]:
    if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
        raise InvalidInputError(f"objects: got {quote(objects)}; expected a dictionary from names to objects")
    return dict(objects)
