"""What the ranks of a new communicator tell each other, so that their local steps go on together."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import queue_of
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError
from sparsecomm.transport import Transport

__all__ = ["Member", "Settings", "gather_members", "number_word", "text_word", "version_word"]

_LABEL = zlib.crc32(b"members of local steps") or 1


def text_word(text: object) -> int:
    """Return a checksum of a text, as a word."""
    return zlib.crc32(repr(text).encode())


def number_word(number: float) -> int:
    """Return a number as a word, from which `_number` finds it."""
    (word,) = struct.unpack("<Q", struct.pack("<d", number))
    return int(word)


def version_word() -> int:
    """Return the first eight letters of the version of this library."""
    try:
        text = version("sparsecomm")
    except PackageNotFoundError:  # a checkout that was not installed
        text = "0"
    return int.from_bytes(text.encode()[:8].ljust(8), "little")


def _number(word: int) -> str:
    return f"{struct.unpack('<d', struct.pack('<Q', word))[0]:g}"


def _version(word: int) -> str:
    return word.to_bytes(8, "little").decode(errors="replace").strip()


def _differs(word: int) -> str:
    return "something else"


@dataclass(frozen=True)
class Settings:
    """What all ranks must have in common, each as one word.

    Attributes:
        version: of the library.
        model: names, shapes and types of the parameters.
        fragments: the names of each.
        sync_every, delay: of the schedule.
        alpha, density: numbers.
        outer: the kind of the outer optimizer.
        options: of the reducers.
    """

    version: int
    model: int
    fragments: int
    sync_every: int
    delay: int
    alpha: int
    density: int
    outer: int
    options: int

    def difference(self, other: Settings) -> str:
        """Return in words what ``other`` has that differs; empty: nothing."""
        for (name, told), mine, theirs in zip(_TOLD, self._words(), other._words(), strict=True):
            if mine != theirs:
                return f"another {name}" if told is _differs else f"{name} {told(theirs)} instead of {told(mine)}"
        return ""

    def _words(self) -> list[int]:
        return [getattr(self, field) for field in self.__dataclass_fields__]


_TOLD: tuple[tuple[str, Callable[[int], str]], ...] = (
    ("version of sparsecomm:", _version),
    ("model: names, shapes or types of its tensors differ", _differs),
    ("division into fragments", _differs),
    ("sync_every", str),
    ("fragment_sync_delay", str),
    ("fragment_update_alpha", _number),
    ("density", _number),
    ("kind of outer optimizer, or none", _differs),
    ("value of an option of the Reducer", _differs),
)


@dataclass(frozen=True)
class Member:
    """What one rank says.

    Attributes:
        joining: it is new, and takes what the others have.
        rank, size: its place in the communicator before; -1 and 0: it had none.
        step: local steps that it has taken, over all rounds.
        outer_bytes: of its outer optimizer's state, if it would be sent.
        settings: its own.
    """

    joining: bool
    rank: int
    size: int
    step: int
    outer_bytes: int
    settings: Settings

    def words(self) -> list[int]:
        """Return it as words."""
        return [self.joining, self.rank + 1, self.size, self.step, self.outer_bytes, *self.settings._words()]

    @classmethod
    def of(cls, words: list[int]) -> Member:
        """Return what `words` stand for."""
        joining, place, size, step, outer_bytes, *settings = words
        return cls(bool(joining), place - 1, size, step, outer_bytes, Settings(*settings))


def gather_members(ranks: Transport, mine: Member) -> list[Member]:
    """Tell all ranks ``mine``; return what each says, in order of rank. Collective.

    Raises:
        InvalidInputError: all ranks join.
        CollectiveMismatchError: a rank has other settings than the lowest one that does not join; on all ranks.
        TransportError: a rank did not answer, or died.
    """
    told = WordsGather(ranks, mine.words(), _LABEL)
    try:
        queue_of(ranks).submit(told).wait()
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"rank {ranks.rank}: LocalSteps.rebuild: a rank makes another call, or has another version of sparsecomm, "
            f"of which this one is {_version(mine.settings.version)}. {error}"
        ) from error
    each = len(told.words) // ranks.size
    members = [Member.of(told.words[rank * each : (rank + 1) * each]) for rank in range(ranks.size)]
    lead = next((rank for rank, member in enumerate(members) if not member.joining), None)
    if lead is None:
        raise InvalidInputError(
            f"rank {ranks.rank}: all {ranks.size} ranks join; expected one at least that goes on with what it has"
        )
    for rank, member in enumerate(members):
        if difference := members[lead].settings.difference(member.settings):
            raise CollectiveMismatchError(
                f"rank {ranks.rank}: rank {rank} cannot go on with the others: it has {difference}, compared with "
                f"rank {lead}. Make LocalSteps with the same model and settings there, and call rebuild again on all "
                "ranks"
            )
    return members
