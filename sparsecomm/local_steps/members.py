"""What the ranks of a new communicator tell each other, so that their local steps go on together."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.reducer.rebuild import Member, gather_members
from sparsecomm.transport import Transport

__all__ = ["compared_members", "settings_words"]

_LABEL = zlib.crc32(b"members of local steps") or 1


def settings_words(
    model: object,
    fragments: object,
    sync_every: int,
    delay: int,
    alpha: float,
    density: float,
    outer: object,
    options: object,
) -> list[int]:
    """Return what all ranks must have in common, each as one word; first of all the version of this library.

    Args:
        model: names, shapes and types of the parameters.
        fragments: the names of each.
        sync_every, delay, alpha: of the schedule.
        density: of the first exchange.
        outer: the kind of the outer optimizer.
        options: of the reducers.
    """
    try:
        text = version("sparsecomm")
    except PackageNotFoundError:  # a checkout that was not installed
        text = "0"
    return [
        int.from_bytes(text.encode()[:8].ljust(8), "little"),
        _checksum(model),
        _checksum(fragments),
        sync_every,
        delay,
        *(struct.unpack("<Q", struct.pack("<d", number))[0] for number in (alpha, density)),
        _checksum(outer),
        _checksum(options),
    ]


def _checksum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _version(word: int) -> str:
    return word.to_bytes(8, "little").decode(errors="replace").strip()


def _number(word: int) -> str:
    return f"{struct.unpack('<d', struct.pack('<Q', word))[0]:g}"


# The names of these words, and what they stand for; ``None``: they are checksums.
_WORDS: tuple[tuple[str, Callable[[int], str] | None], ...] = (
    ("version of sparsecomm:", _version),
    ("model: names, shapes or types of its tensors differ", None),
    ("division into fragments", None),
    ("sync_every", str),
    ("fragment_sync_delay", str),
    ("fragment_update_alpha", _number),
    ("density", _number),
    ("kind of outer optimizer, or none", None),
    ("value of an option of the Reducer", None),
)


def compared_members(ranks: Transport, mine: Member) -> list[Member]:
    """Tell all ranks ``mine``; return what each says, in order of rank. Collective.

    Args:
        mine: its words begin with `settings_words`.

    Raises:
        InvalidInputError: all ranks join.
        CollectiveMismatchError: a rank has other settings than the lowest one that does not join; on all ranks.
        TransportError: a rank did not answer, or died.
    """
    try:
        members = gather_members(ranks, mine, _LABEL)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"rank {ranks.rank}: LocalSteps.rebuild: a rank makes another call, or has another version of sparsecomm, "
            f"of which this one is {_version(mine.words[0])}. {error}"
        ) from error
    lead = next(rank for rank, member in enumerate(members) if not member.joining)
    for rank, member in enumerate(members):
        if difference := _difference(members[lead].words, member.words):
            raise CollectiveMismatchError(
                f"rank {ranks.rank}: rank {rank} cannot go on with the others: it has {difference}, compared with "
                f"rank {lead}. Make LocalSteps with the same model and settings there, and call rebuild again on all "
                "ranks"
            )
    return members


def _difference(words: Sequence[int], others: Sequence[int]) -> str:
    """Return in words what ``others`` has that differs; empty: nothing."""
    for (name, text), mine, theirs in zip(_WORDS, words, others, strict=False):
        if mine != theirs:
            return f"another {name}" if text is None else f"{name} {text(theirs)} instead of {text(mine)}"
    return ""
