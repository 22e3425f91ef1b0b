"""What the ranks of a new communicator compare, so that their local steps go on together."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.reducer.rebuild import Members
from sparsecomm.transport import Comm, Transport

__all__ = ["compared_members", "settings_words"]

_LABEL = zlib.crc32(b"members of local steps") or 1


def _library() -> bytes:
    try:
        return version("sparsecomm").encode()
    except PackageNotFoundError:  # a checkout that was not installed
        return b"0"


def _checksum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _word(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little")


def _number(word: int) -> str:
    return f"{struct.unpack('<d', word.to_bytes(8, 'little'))[0]:g}"


def _version(word: int) -> str:
    return word.to_bytes(8, "little").decode(errors="replace").strip()


# What all ranks must have in common: a name, what makes a word of it, and what the word is told as; ``None``: it is a
# checksum.
_SETTINGS: tuple[tuple[str, Callable[[Any], int], Callable[[int], str] | None], ...] = (
    ("version of sparsecomm:", lambda text: int.from_bytes(text[:8].ljust(8), "little"), _version),
    ("model: names, shapes or types of its tensors differ", _checksum, None),
    ("division into fragments", _checksum, None),
    ("sync_every", int, str),
    ("by_speed", int, str),
    ("round_seconds", _word, _number),
    ("deadline", _word, _number),
    ("fragment_sync_delay", int, str),
    ("fragment_update_alpha", _word, _number),
    ("density", _word, _number),
    ("kind of outer optimizer, or none", _checksum, None),
    ("value of an option of the Reducer", _checksum, None),
)


def settings_words(*values: object) -> list[int]:
    """Return a word for each of these settings: all of the table above but the first, which is added."""
    return [word_of(value) for (_, word_of, _), value in zip(_SETTINGS, (_library(), *values), strict=True)]


def compared_members(transport: Transport, before: Comm, joining: bool, step: int, words: list[int]) -> Members:
    """Return what the ranks say, who have told each other. Collective.

    Args:
        ranks, before, joining, step: as `Members` has them.
        words: they begin with `settings_words`.

    Raises:
        InvalidInputError: all ranks join.
        CollectiveMismatchError: a rank has other settings than the lowest one that does not join; on all ranks.
        TransportError: a rank did not answer, or died.
    """
    try:
        members = Members(transport, before, joining, step, words, _LABEL)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"rank {transport.rank}: LocalSteps.rebuild: a rank makes another call, or has another version of "
            f"sparsecomm, of which this one is {_version(words[0])}. {error}"
        ) from error
    for rank, member in enumerate(members.all):
        for (name, _, text), ours, theirs in zip(_SETTINGS, members.stay[0].words, member.words, strict=False):
            if ours != theirs:
                differs = f"another {name}" if text is None else f"{name} {text(theirs)} instead of {text(ours)}"
                raise CollectiveMismatchError(
                    f"rank {transport.rank}: rank {rank} cannot go on with the others: it has {differs}, compared with "
                    f"rank {members.lead}. Make LocalSteps with the same model and settings there, and call rebuild "
                    "again on all ranks"
                )
    return members
