"""The format of checkpoint files: a zip archive that says which file of which checkpoint it is."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from sparsecomm.checkpoints.names import Saved
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.states import values
from sparsecomm.states.schema import check, is_state, reshard

__all__ = ["Contents", "Folder", "Format"]

Folder: TypeAlias = "str | os.PathLike[str]"

_VERSION = 1
_good: set[tuple[str, int, int, int, int]] = set()  # files: path, device, inode, size and time of change


class Contents(NamedTuple):
    """What is in a file.

    Attributes:
        attempt: a random token that is the same in all files that were saved together.
        states: by the name of the object.
    """

    attempt: str
    states: dict[str, Any]


class Format:
    """Files of NumPy's arrays (.npz). Other formats are subclasses.

    Attributes:
        suffix: of the file names.
    """

    suffix = ".npz"

    # -- what subclasses change ---------------------------------------------------------------------------------------

    def dump(self, file: BinaryIO, value: dict[str, Any]) -> None:
        """Write a value, a zip archive of members that are not compressed, to a new file.

        Raises:
            InvalidInputError: it has parts that `parse` would refuse. Nothing was written.
        """
        values.write(file, value)

    def parse(self, file: BinaryIO, path: Path, *, verify: bool) -> Any:
        """Return the value that `dump` has written; with ``verify`` arrays may be missing. Code in it never runs."""
        return values.read(file, verify=verify)

    def state_of(self, one: Any) -> Any:
        """Return what `dump` can write of an object, or of a value.

        Raises:
            InvalidInputError: the object's own ``load_state_dict`` would refuse it.
        """
        state = one.state_dict() if hasattr(one, "state_dict") else one
        if is_state(state):
            check(state)
        return state

    # -- files --------------------------------------------------------------------------------------------------------

    def write(self, path: Path, saved: Saved, rank: int, job: str, attempt: str, objects: Mapping[str, Any]) -> None:
        """Write the states of objects to a new file, durably, and verify the file.

        Raises:
            InvalidInputError, OSError: it cannot be written, or could not be loaded.
        """
        states = {name: self.state_of(one) for name, one in objects.items()}
        identity = {**_identity(saved, rank), "job": job, "attempt": attempt, "names": list(states)}
        with path.open("xb") as file:
            self.dump(file, {"checkpoint": identity, "states": states})
            file.flush()
            os.fsync(file.fileno())
        del states  # a copy of large arrays, which takes no memory while others are read
        self.read(path, saved, rank, verify=True)

    def read(self, path: Path, saved: Saved, rank: int, *, verify: bool = False) -> Contents:
        """Return the contents of a file, after checking that all of it is as it was written.

        Args:
            path: of the file.
            saved, rank: of which it must be.
            verify: only check it: arrays may be missing in what is returned.

        Raises:
            InvalidInputError: it is damaged, or is not that file of that checkpoint; the message names the file.
            FileNotFoundError: it is not there.
        """
        with _described(path), _open(path) as file:
            _check_archive(file)
            return self._contents(self.parse(file, path, verify=verify), saved, rank)

    def mark_good(self, paths: Iterable[Path]) -> None:
        """Take note that all ranks have verified a checkpoint, of which these are this rank's files."""
        with suppress(OSError):
            _good.update(map(_key, paths))

    def are_good(self, paths: Iterable[Path]) -> bool:
        """Return whether `mark_good` was called for these files, and they have not changed since."""
        with suppress(OSError):
            return _good.issuperset(map(_key, paths))
        return False

    def for_world(self, states: list[Any], rank: int, size: int) -> Any:
        """Return an object's state for a rank of another world size, made from the states of all old ranks."""
        first = states[0]
        if is_state(first):
            return reshard(states, rank, size)
        if isinstance(first, dict) and any(is_state(value) for value in first.values()):
            return {key: self.for_world([state[key] for state in states], rank, size) for key in first}
        return first

    def _contents(self, value: Any, saved: Saved, rank: int) -> Contents:
        """Return the contents of a parsed file that must have this identity."""
        if not (isinstance(value, dict) and isinstance(value.get("checkpoint"), dict)):
            raise InvalidInputError(
                "this is not a checkpoint of this version of sparsecomm; if an earlier version has saved it, load it "
                "with that version, or remove it to start without it"
            )
        identity, states = value["checkpoint"], value.get("states")
        for key, expected in _identity(saved, rank).items():
            if identity.get(key) != expected:
                raise InvalidInputError(
                    f"it contains {key.replace('_', ' ')} {quote(identity.get(key))}, but its name says {expected}: "
                    "the file was renamed, or copied over another"
                )
        names, attempt = identity.get("names"), identity.get("attempt")
        if not isinstance(states, dict) or list(states) != names or not isinstance(attempt, str):
            raise InvalidInputError("its description does not fit its contents")
        return Contents(attempt, states)


def _identity(saved: Saved, rank: int) -> dict[str, int]:
    return {"version": _VERSION, "step": saved.step, "rank": rank, "world_size": saved.size, "run": saved.run}


def _key(path: Path) -> tuple[str, int, int, int, int]:
    found = os.stat(path)
    return str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file that fits into this machine's memory. FIFOs and devices are not opened.

    Raises:
        InvalidInputError: it is not such a file.
        OSError: it cannot be opened.
    """
    _check_regular(os.stat(path))
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        _check_regular(os.fstat(file.fileno()))
        yield file


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidInputError("it is not a regular file")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if found.st_size > memory:
        raise InvalidInputError(f"it has {found.st_size:,} bytes, and this machine's memory {memory:,}")


def _check_archive(file: BinaryIO) -> None:
    """Check the members of a zip archive by their checksums (CRC-32)."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise InvalidInputError("it has compressed members, which checkpoints never have")
        if sum(member.file_size for member in members) > os.fstat(file.fileno()).st_size:
            raise InvalidInputError("its members are longer than the file")
        if (damaged := archive.testzip()) is not None:
            raise InvalidInputError(f"the checksum of its member {damaged!r} is wrong")
    file.seek(0)


@contextmanager
def _described(path: Path) -> Iterator[None]:
    """Name the file in any exception raised within."""
    try:
        yield
    except FileNotFoundError:
        raise
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} cannot be used: {error}") from error
    except Exception as error:
        raise InvalidInputError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
