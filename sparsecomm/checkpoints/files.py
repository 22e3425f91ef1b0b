"""Checkpoint files: their names (`CheckpointId`, `find`) and their format (`Format`)."""

from __future__ import annotations

import errno
import os
import re
import stat
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.states import values
from sparsecomm.states.schema import check, is_state, reshard
from sparsecomm.transport import Transport

Folder: TypeAlias = "str | os.PathLike[str]"

SUFFIXES = (".npz", ".pt")
_NAME = re.compile(r"step(\d{1,18})-rank(\d{1,9})-of(\d{1,9})(?:-run(\d{1,15}))?(\.[a-z]+)(\.part)?")
MAX_RUN = 10**15 - 1  # more cannot be in a name; a save may write only names that `find` sees
_VERSION = 1
_MAX_SAVE_IDS = 1000
_save_ids: dict[tuple[int, ...], str] = {}  # of files that were read, by `_key`, which changes with the file


class CheckpointId(NamedTuple):
    """The identity of a checkpoint. IDs order as the checkpoints were saved."""

    run: int  # increases when training returns to an earlier step, or starts again in the same folder
    step: int  # that the user passed to `save`
    size: int  # the world size

    def __str__(self) -> str:
        return f"step {self.step} (world size {self.size})"

    def path(self, folder: Path, rank: int, suffix: str) -> Path:
        """Return the final path of a rank's file."""
        run = f"-run{self.run}" if self.run > 1 else ""
        return folder / f"step{self.step}-rank{rank}-of{self.size}{run}{suffix}"

    def ranks_for(self, transport: Transport) -> Collection[int]:
        """Return the ranks whose files this rank loads: only its own, or all ranks of another world size."""
        return [transport.rank] if self.size == transport.size else range(self.size)

    def identity(self, rank: int) -> dict[str, int]:
        """Return the numbers that a rank's file records about itself."""
        return {"version": _VERSION, "step": self.step, "rank": rank, "world_size": self.size, "run": self.run}


def find(folder: Path, suffix: str) -> dict[CheckpointId, dict[int, bool]]:
    """Return the checkpoints in a folder, newest first. For each rank with a file: whether it has its final name."""
    checkpoints: dict[CheckpointId, dict[int, bool]] = {}
    files: list[str] = []
    with suppress(FileNotFoundError):
        files = os.listdir(folder)
    for file in files:
        if (name := _NAME.fullmatch(file)) and name[5] == suffix:
            step, rank, size, run, renamed = int(name[1]), int(name[2]), int(name[3]), int(name[4] or 1), not name[6]
            checkpoint = CheckpointId(run, step, size)
            if rank < size and checkpoint.path(folder, rank, suffix).name == file.removesuffix(".part"):
                ranks = checkpoints.setdefault(checkpoint, {})
                ranks[rank] = ranks.get(rank, False) or renamed
    return dict(sorted(checkpoints.items(), reverse=True))


def part_of(path: Path) -> Path:
    """Return the temporary path of a file, which it has until all ranks have written their files."""
    return path.with_name(path.name + ".part")


def remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)


def sync(folder: Path) -> None:
    """Make the names of the files in a folder durable, if the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


class Format:
    """The format of files of NumPy arrays (.npz). A subclass for another format overrides the first four methods."""

    suffix = ".npz"

    def dump(self, file: BinaryIO, value: dict[str, Any]) -> None:
        """Write a value to a file as an uncompressed zip archive. Raise if `parse` could not read it."""
        values.write(file, value)

    def parse(self, file: BinaryIO, path: Path, *, arrays: bool) -> Any:
        """Return the value that `dump` wrote; run no code from the file. Without ``arrays``, arrays may be missing."""
        return values.read(file, arrays=arrays)

    def state_of(self, obj: Any) -> Any:
        """Return the checked ``state_dict`` of an object, or the object itself if it has none, for `dump`."""
        state = obj.state_dict() if hasattr(obj, "state_dict") else obj
        check(state)
        return state

    def for_world(self, states: list[Any], rank: int, size: int) -> Any:
        """Make an object's state for a rank of another world size from the states of all old ranks."""
        first = states[0]
        if is_state(first):
            return reshard(states, rank, size)
        if isinstance(first, dict) and any(is_state(value) for value in first.values()):
            return {key: self.for_world([state[key] for state in states], rank, size) for key in first}
        return first

    def write(
        self, path: Path, checkpoint: CheckpointId, rank: int, job_id: str, save_id: str, objects: Mapping[str, Any]
    ) -> None:
        """Write the states of objects to a new file, sync it to disk, and verify it.

        ``save_id``: the ID of the save, the same in all files that are saved together.
        """
        states = {name: self.state_of(obj) for name, obj in objects.items()}
        identity = {**checkpoint.identity(rank), "job": job_id, "attempt": save_id, "names": list(states)}
        with path.open("xb") as file:
            self.dump(file, {"checkpoint": identity, "states": states})
            file.flush()
            os.fsync(file.fileno())
        del states  # free the memory before the file is read
        self.verify(path, checkpoint, rank)

    def verify(self, path: Path, checkpoint: CheckpointId, rank: int) -> str:
        """Return the save ID of a file after the checks of `read`, unless this process has read the file before."""
        save_id = _save_ids.get(_key(path, checkpoint, rank))
        return self.read(path, checkpoint, rank, arrays=False)[0] if save_id is None else save_id

    def read(
        self, path: Path, checkpoint: CheckpointId, rank: int, *, arrays: bool = True
    ) -> tuple[str, dict[str, Any]]:
        """Return the save ID and the states of a file. If ``arrays`` is false, the states may lack arrays.

        Raise `InvalidInputError` if the file is damaged, or belongs to another checkpoint or rank; and
        `FileNotFoundError` if it does not exist.
        """
        try:
            key = _key(path, checkpoint, rank)
            # Opening a FIFO would otherwise wait for a writer.
            with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                _check_archive(file)
                save_id, states = _contents(self.parse(file, path, arrays=arrays), checkpoint.identity(rank))
        except FileNotFoundError:
            raise
        except InvalidInputError as error:
            raise InvalidInputError(f"{path} cannot be used: {error}") from error
        except Exception as error:
            raise InvalidInputError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        _save_ids[key] = save_id
        for oldest in list(_save_ids)[:-_MAX_SAVE_IDS]:
            del _save_ids[oldest]
        return save_id, states


def _key(path: Path, checkpoint: CheckpointId, rank: int) -> tuple[int, ...]:
    status = os.stat(path)
    return *checkpoint, rank, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_archive(file: BinaryIO) -> None:
    """Check that a file is a regular file that fits into memory, and an archive with correct checksums (CRC-32)."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInputError("it is not a regular file")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if status.st_size > memory:
        raise InvalidInputError(f"it has {status.st_size:,} bytes, and this machine has {memory:,} bytes of memory")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise InvalidInputError("it has compressed members, and checkpoints never have any")
        if sum(member.file_size for member in members) > status.st_size:
            raise InvalidInputError("its members are longer than the file")
        if (damaged := archive.testzip()) is not None:
            raise InvalidInputError(f"the checksum of its member {damaged!r} is wrong")
    file.seek(0)


def _contents(value: Any, expected: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
    """Return the save ID and the states of a parsed file, which must have the expected identity."""
    if not (isinstance(value, dict) and isinstance(value.get("checkpoint"), dict)):
        raise InvalidInputError(
            "this is not a checkpoint of this version of sparsecomm; if an earlier version saved it, load it with that "
            "version, or remove it to start without it"
        )
    identity, states = value["checkpoint"], value.get("states")
    for key, number in expected.items():
        if identity.get(key) != number:
            raise InvalidInputError(
                f"it contains {key.replace('_', ' ')} {quote(identity.get(key))}, but its name says {number}: the file "
                "was renamed, or copied over another one"
            )
    save_id = identity.get("attempt")
    if not isinstance(states, dict) or list(states) != identity.get("names") or not isinstance(save_id, str):
        raise InvalidInputError("its description does not match its contents")
    return save_id, states
