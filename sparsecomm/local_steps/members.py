"""The comparison of settings by the ranks of a new communicator."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.reducer.connection import Members
from sparsecomm.transport import Comm, Transport

__all__ = ["compared_members"]

_LABEL = zlib.crc32(b"members of local steps") or 1


def _library() -> str:
    try:
        return version("sparsecomm")
    except PackageNotFoundError:  # a checkout that was not installed
        return "0"


def _word(value: object) -> int:
    """Return 64 bits for a setting: a number itself, otherwise a checksum."""
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<d", value), "little")
    return int(value) if isinstance(value, int) else zlib.crc32(repr(value).encode())


def _text(word: int, like: object) -> str:
    return f"{struct.unpack('<d', word.to_bytes(8, 'little'))[0]:g}" if isinstance(like, float) else str(word)


def compared_members(
    transport: Transport, before: Comm, joining: bool, step: int, settings: Mapping[str, object], word: int
) -> Members:
    """Gather the members of a new communicator, and check that they have the same settings. Collective.

    Args:
        transport, before, joining, step: as of `Members`.
        settings: values by name, with the same names in the same order on all ranks.
        word: one more word, the last of `Member.words`.

    Raises:
        InvalidInputError: all ranks join.
        CollectiveMismatchError: a setting differs from that of the lowest rank that does not join. All ranks raise.
        TransportError: a rank did not answer, or died.
    """
    settings = {"version of sparsecomm": _library(), **settings}
    try:
        members = Members(transport, before, joining, step, [*map(_word, settings.values()), word], _LABEL)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"rank {transport.rank}: LocalSteps.rebuild: another rank makes another call, or has another version of "
            f"sparsecomm than this one, {_library()}. {error}"
        ) from error
    for rank, member in enumerate(members.all):
        for (name, value), expected, got in zip(settings.items(), members.stay[0].words, member.words, strict=False):
            if got != expected:
                numbers = f": {_text(got, value)} instead of {_text(expected, value)}"
                raise CollectiveMismatchError(
                    f"rank {transport.rank}: rank {rank} has another {name} than rank {members.lead}"
                    f"{numbers if isinstance(value, (int, float)) else ''}. Create LocalSteps with the same model and "
                    "settings on all ranks, and call rebuild again"
                )
    return members
