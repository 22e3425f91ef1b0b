"""Save and load checkpoints: the protocol between the ranks.

**Save.** (1) Each rank writes, syncs and verifies its file under a temporary name (``.part``). (2) When all ranks have
done so, each renames its file and syncs the folder. (3) When all ranks have done so, each removes older files. A rank
may die at any moment: before (2) the older checkpoint is untouched; if any file was renamed, all ranks have a verified
file of the new checkpoint, under one name or the other, and `load` uses both.

**Load.** The ranks gather which checkpoints each of them sees. They try those that all see, the newest first, until all
ranks have read and verified their files, which must be of the same save.

This module is compiled, so no signal handler runs between a decision of all ranks and what follows from it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sparsecomm.checkpoints.claims import claim, job_of
from sparsecomm.checkpoints.formats import Contents, Folder, Format
from sparsecomm.checkpoints.names import PART, SUFFIXES, Saved, find, remove, sync
from sparsecomm.checks import quote, to_int
from sparsecomm.errors import InvalidInputError, SparseCommError
from sparsecomm.states import loading
from sparsecomm.states.loading import Prepared, Undo
from sparsecomm.transport import Comm, Transport, transport_of

__all__ = ["Checkpoint", "Files", "load", "save"]

_log = logging.getLogger("sparsecomm")


class Checkpoint(NamedTuple):
    """What `load` has loaded.

    Attributes:
        step: that it was saved with.
        values: by name, of what has no ``load_state_dict``.
        ranks: the world size that has saved it.
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

    A checkpoint is there as a whole or not at all, whenever a rank dies. Older checkpoints are removed when the new one
    is whole, verified and durable on all ranks. The checkpoint that was saved last is the newest, also after a training
    has gone back or has started again in the same folder; checkpoints of later steps then stay.

    Args:
        folder: created if needed. All ranks may share it, or each node may have its own. Only one job at a time may
            save into it.
        step: the number of the checkpoint: of steps, or of epochs.
        objects: by name. Objects that have ``state_dict`` and ``load_state_dict`` are saved by these. `load` returns
            all others: ``None``, bools, numbers, strings, arrays (of NumPy, JAX, or another library with
            ``__dlpack__``), and lists, tuples and dictionaries of them. The files are .npz archives without pickles.
        comm: the ranks; ``None``: all.
        keep: how many older checkpoints stay, at least. Damaged ones do not count. The same on all ranks.

    Raises:
        InvalidInputError: an argument cannot be used, a rank could not write its file, a state could not be loaded
            again, or another job saves into the folder. No rank has saved. (If only the renaming of a file failed, all
            ranks raise, and `load` finds the new checkpoint.)
        CollectiveMismatchError: another rank saves another step, or other objects. No rank has saved.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    Files(Format(), folder, comm).save(step, objects, keep)


def load(
    folder: Folder, objects: Mapping[str, object], *, comm: Comm = None, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks can read into all objects that can load it. Collective.

    A file that is damaged, or is not what its name says, is left out with a warning, and the checkpoint before it is
    tried. If the world size has changed, residuals are shared out among the new ranks (`reshard`), and everything else
    is that of the old rank 0; with `LocalSteps` start from the global parameters then. The state of
    `sparsecomm.jax.sparsify` is a value that contains residuals: load it with the same world size.

    Args:
        folder, objects, comm: as in `save`.
        step: load the checkpoint of this step only.

    Returns:
        What was loaded. ``None``: no rank sees a checkpoint.

    Raises:
        InvalidInputError: there are checkpoints, and none of them can be read on all ranks, or has all objects; or an
            object refuses its state. The objects before it, in the order of ``objects``, have loaded then.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died.
    """
    return Files(Format(), folder, comm).load(objects, step)


class Files:
    """The checkpoints in a folder."""

    def __init__(self, form: Format, folder: Folder, comm: Comm, exclusive: bool = True) -> None:
        """Check the arguments.

        Args:
            form: of the files.
            folder, comm: as in `save`.
            exclusive: refuse a second job in the folder.
        """
        try:
            self._folder = Path(folder)
        except TypeError:
            raise InvalidInputError(f"folder={quote(folder)}: expected a path") from None
        self._form, self._comm, self._exclusive = form, comm, exclusive

    def save(self, step: int, objects: Mapping[str, object], keep: int) -> None:
        """See `save`."""
        number, older, named = _number("step", step, 0), _number("keep", keep, 1), _named(objects)
        form, folder, transport = self._form, self._folder, transport_of(self._comm)
        rank = transport.rank
        survey = self._survey(transport, "save")
        saved = Saved(max(1, survey.last.run + (number <= survey.last.step)), number, transport.size)
        path = saved.path(folder, rank, form.suffix)
        part = path.with_name(path.name + PART)
        what = f"checkpoint {number} of {', '.join(sorted(map(repr, named)))}, keeping {older}"

        def write(undo: Undo) -> Prepared:
            if survey.interrupt is not None:
                raise survey.interrupt
            with _writing(path):
                folder.mkdir(parents=True, exist_ok=True)
                if self._exclusive:
                    claim(folder, survey.job)
                undo.append(lambda: remove(part))
                remove(part)
                form.write(part, saved, rank, survey.job, survey.attempt, named)
                sync(folder)
            return Prepared({}, lambda: None)

        def rename(undo: Undo) -> Prepared:
            os.replace(part, path)
            sync(folder)
            return Prepared({}, lambda: None)

        interrupts: list[BaseException | None] = [
            loading.decide(transport, what, [], write, "save the same checkpoint"),
            loading.decide(transport, f"rename {what}", [], rename, "give its file the final name"),
        ]
        form.mark_good([path])
        self._remove_older(transport, survey, older, number, interrupts)
        _raise_first(interrupts)

    def load(self, objects: Mapping[str, object], step: int | None) -> Checkpoint | None:
        """See `load`."""
        wanted, named = None if step is None else _number("step", step, 0), _named(objects)
        transport = transport_of(self._comm)
        survey = self._survey(transport, "load the newest" if wanted is None else f"load {wanted}")
        interrupt, refused = survey.interrupt, None
        for saved in survey.whole:
            if wanted is not None and saved.step != wanted:
                continue
            try:
                states, after = self._read(saved, transport, named, interrupt)
            except InvalidInputError as error:
                _log.warning("the checkpoint of step %s (world size %s) is left out: %s", saved.step, saved.size, error)
                refused, interrupt = refused or error, None
                continue
            found, interrupts = self._adopt(saved, transport, named, states)
            _raise_first([after, *interrupts])
            return found
        _raise_first([interrupt, refused])
        if any(survey.seen):
            which = "no checkpoint" if wanted is None else f"no checkpoint of step {wanted}"
            raise InvalidInputError(
                f"rank {transport.rank}: {which} in {self._folder} is complete on all ranks. {survey.described()}. "
                "Restore the missing files, or choose another folder to start without them"
            )
        if survey.others:
            raise InvalidInputError(
                f"rank {transport.rank}: {self._folder} has only checkpoints that this call cannot read. Load .npz "
                "files with sparsecomm.load, .pt files with sparsecomm.torch.load, and .arrays files with the earlier "
                "version of sparsecomm that saved them, or choose another folder to start without them"
            )
        return None

    def any_on_all(self) -> bool:
        """Return whether all ranks see a checkpoint whose files are all there. Collective."""
        survey = self._survey(transport_of(self._comm), "look")
        _raise_first([survey.interrupt])
        return bool(survey.whole)

    def _adopt(
        self, saved: Saved, transport: Transport, named: Mapping[str, Any], states: list[dict[str, Any]]
    ) -> tuple[Checkpoint, list[BaseException | None]]:
        """Load objects from the states that were read. If one refuses its state on a rank, all ranks raise."""
        values: dict[str, Any] = {}
        interrupts: list[BaseException | None] = []
        for name, one in named.items():

            def adopt(undo: Undo, name: str = name, one: Any = one) -> Prepared:
                its = [each[name] for each in states]
                own = saved.size == transport.size
                state = its[0] if own else self._form.for_world(its, transport.rank, transport.size)
                if hasattr(one, "load_state_dict"):
                    one.load_state_dict(state)
                else:
                    values[name] = state
                return Prepared({}, lambda: None)

            interrupts.append(loading.decide(transport, f"object {name!r}", [], adopt, f"load {name!r}"))
        return Checkpoint(saved.step, values, saved.size), interrupts

    def _read(
        self,
        saved: Saved,
        transport: Transport,
        named: Mapping[str, object],
        interrupt: BaseException | None = None,
        verify: bool = False,
    ) -> tuple[list[dict[str, Any]], BaseException | None]:
        """Return this rank's states, or those of all ranks of another world size, by name. Collective.

        If ``interrupt`` is given, no rank reads, and this rank raises it. An interrupt that comes later is returned.

        Raises:
            InvalidInputError: they cannot be read on some rank, are not of one save, or not of all objects.
        """
        read: list[Contents] = []

        def prepare(undo: Undo) -> Prepared:
            if interrupt is not None:
                raise interrupt
            for rank in saved.ranks_for(transport):
                contents = self._contents(saved, rank, verify)
                if lacking := [name for name in named if name not in contents.states]:
                    its = ", ".join(map(repr, contents.states))
                    raise InvalidInputError(f"the checkpoint has no {lacking[0]!r}; it has {its}")
                if read and contents.attempt != read[0].attempt:
                    raise InvalidInputError(f"the file of rank {rank} was not saved together with that of rank 0")
                read.append(contents)
            return Prepared({"save": read[0].attempt}, lambda: None)

        after = loading.decide(transport, "a checkpoint", ["save"], prepare, "read a checkpoint")
        self._form.mark_good(self._paths(saved, transport))
        return [contents.states for contents in read], after

    def _contents(self, saved: Saved, rank: int, verify: bool) -> Contents:
        """Return the contents of a rank's file, which may be renamed meanwhile."""
        try:
            return self._form.read(self._path(saved, rank), saved, rank, verify=verify)
        except FileNotFoundError:
            return self._form.read(saved.path(self._folder, rank, self._form.suffix), saved, rank, verify=verify)

    def _path(self, saved: Saved, rank: int) -> Path:
        """Return the path of a rank's file: with its final name, if it has that."""
        path = saved.path(self._folder, rank, self._form.suffix)
        return path if os.path.lexists(path) else path.with_name(path.name + PART)

    def _paths(self, saved: Saved, transport: Transport) -> list[Path]:
        """Return the paths of the files that this rank would load."""
        return [self._path(saved, rank) for rank in saved.ranks_for(transport)]

    def _survey(self, transport: Transport, why: str) -> _Survey:
        """Return what all ranks see. Collective: all do so for the same reason."""

        def look() -> dict[str, Any]:
            seen = find(self._folder, self._form.suffix)
            whole = [saved for saved, ranks in seen.items() if ranks.all.issuperset(saved.ranks_for(transport))]
            return {
                "job": job_of(self._folder),
                "random": os.urandom(16).hex(),
                "others": any(find(self._folder, suffix) for suffix in SUFFIXES if suffix != self._form.suffix),
                "final": [list(saved) for saved in seen if seen[saved].final],
                "whole": [[*saved, self._form.are_good(self._paths(saved, transport))] for saved in whole],
            }

        does = f"look for checkpoints in {self._folder}"
        by_rank, interrupt = loading.gather_values(transport, f"checkpoints to {why}", look, does)
        final = [[Saved(*each) for each in its["final"]] for its in by_rank]
        good = [{Saved(*each[:3]): each[3] for each in its["whole"]} for its in by_rank]
        begun = {saved for its in final for saved in its}  # where a file was renamed, all ranks have written theirs
        return _Survey(
            {saved: all(its[saved] for its in good) for saved in sorted(begun.intersection(*good), reverse=True)},
            max(begun, default=Saved(0, 0, 0)),
            [[saved.step for saved in its] for its in final],
            next((its["job"] for its in by_rank if its["job"]), by_rank[0]["random"][:16]),
            by_rank[0]["random"],
            any(its["others"] for its in by_rank),
            interrupt,
        )

    def _remove_older(
        self, transport: Transport, survey: _Survey, keep: int, step: int, interrupts: list[BaseException | None]
    ) -> None:
        """Remove checkpoints beyond the newest ``keep`` older ones that are good on all ranks. Collective.

        Checkpoints of later steps stay, so that a training that goes back does not remove those of another.
        """
        good = 0
        for saved, known in survey.whole.items():
            good += known or self._is_good(saved, transport, interrupts)
            if good == keep:
                for older, ranks in find(self._folder, self._form.suffix).items():
                    if older < saved and older.step <= step:
                        for rank in ranks.all.intersection(older.ranks_for(transport)):
                            path = older.path(self._folder, rank, self._form.suffix)
                            remove(path)
                            remove(path.with_name(path.name + PART))
                return

    def _is_good(self, saved: Saved, transport: Transport, interrupts: list[BaseException | None]) -> bool:
        """Return whether a checkpoint can be read on all ranks. Collective."""
        try:
            interrupts.append(self._read(saved, transport, {}, verify=True)[1])
        except InvalidInputError as error:
            _log.warning("the checkpoint of step %s (world size %s) cannot be read: %s", saved.step, saved.size, error)
            return False
        except SparseCommError:
            raise
        except BaseException as interrupt:  # the other ranks have been told
            interrupts.append(interrupt)
            return False
        return True


class _Survey(NamedTuple):
    """What all ranks see in their folders.

    Attributes:
        whole: the checkpoints of which all ranks see all files, the newest first; and whether all ranks know that they
            are good.
        last: the newest checkpoint that any rank sees.
        seen: for each rank, the steps of the checkpoints that it sees, newest first.
        job: the token of this job.
        attempt: a new random token for a save.
        others: whether a rank sees checkpoints in another format.
        interrupt: an exception of a signal handler that came meanwhile.
    """

    whole: dict[Saved, bool]
    last: Saved
    seen: list[list[int]]
    job: str
    attempt: str
    others: bool
    interrupt: BaseException | None

    def described(self) -> str:
        """Return in words which steps the first rank sees, and the first that does not see the same."""
        texts = [f"steps {', '.join(map(str, steps[:8]))}" if steps else "none" for steps in self.seen]
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        end = "" if other is None else f", and rank {other}: {texts[other]}"
        return f"Rank 0 sees: {texts[0]}{end}"


def _raise_first(errors: list[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert any exception raised within into one that says which file could not be written."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"writing {path}: {error}") from error
    except Exception as error:
        raise InvalidInputError(f"writing {path} raised {type(error).__name__}: {error}") from error


def _number(name: str, value: int, lowest: int) -> int:
    number = to_int(value, lowest, 10**18 - 1)
    if number is None:
        raise InvalidInputError(f"{name}={quote(value)}: must be an integer from {lowest} to 10^18 - 1")
    return number


def _named(objects: Mapping[str, object]) -> dict[str, Any]:
    if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
        raise InvalidInputError(f"objects: got {quote(objects)}; expected objects by name")
    return dict(objects)
