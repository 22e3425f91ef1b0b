"""The names of checkpoint files, and which files are there."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sparsecomm.transport import Transport

__all__ = ["PART", "SUFFIXES", "Found", "Saved", "find", "remove", "sync"]

SUFFIXES = (".npz", ".pt", ".arrays")  # the last one of earlier development versions
PART = ".part"  # ends the name of a file until all ranks have written theirs
_NAME = re.compile(r"step(\d{1,18})-rank(\d{1,9})-of(\d{1,9})(?:-run(\d{1,18}))?(\.[a-z]+)(\.part)?")


class Saved(NamedTuple):
    """A checkpoint of all ranks. The one that was saved last is the largest.

    Attributes:
        run: counts up when a training goes back to an earlier step, or starts again in the same folder; from 1.
        step: that the user gave it.
        size: the world size.
    """

    run: int
    step: int
    size: int

    def path(self, folder: Path, rank: int, suffix: str) -> Path:
        """Return the path of a rank's file."""
        run = f"-run{self.run}" if self.run > 1 else ""
        return folder / f"step{self.step}-rank{rank}-of{self.size}{run}{suffix}"

    def ranks_for(self, transport: Transport) -> Collection[int]:
        """Return the ranks whose files a rank loads: its own, or those of all ranks of another world size."""
        return [transport.rank] if self.size == transport.size else range(self.size)


class Found(NamedTuple):
    """The ranks whose files of a checkpoint are in a folder.

    Attributes:
        final: files with their final names.
        parts: files that were written, but not renamed.
    """

    final: set[int]
    parts: set[int]

    @property
    def all(self) -> set[int]:
        """All of them."""
        return self.final | self.parts


def find(folder: Path, suffix: str) -> dict[Saved, Found]:
    """Return the checkpoints in a folder whose files have this suffix, the newest first.

    Raises:
        OSError: the folder is there, and cannot be listed.
    """
    found: dict[Saved, Found] = {}
    files: list[str] = []
    with suppress(FileNotFoundError):
        files = os.listdir(folder)
    for file in files:
        if (name := _NAME.fullmatch(file)) and name[5] == suffix:
            step, rank, size, run = int(name[1]), int(name[2]), int(name[3]), int(name[4] or 1)
            if rank < size:
                final, parts = found.setdefault(Saved(run, step, size), Found(set(), set()))
                (parts if name[6] else final).add(rank)
    return dict(sorted(found.items(), reverse=True))


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with suppress(OSError):
        os.unlink(path)


def sync(folder: Path) -> None:
    """Make the names of files in a folder survive a power failure, where the file system can do so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)
