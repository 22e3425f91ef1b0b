"""The exceptions that sparsecomm raises.

A message says which rank, what was seen, what was expected and what to do.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable

__all__ = [
    "CollectiveMismatchError",
    "InvalidInputError",
    "RankFailedError",
    "SparseCommError",
    "TimeoutError",
    "TransportError",
    "WeightMismatchError",
    "describe",
    "text_of",
]


class SparseCommError(Exception):
    """The base class of all errors of this library."""


class InvalidInputError(SparseCommError, ValueError):
    """An argument cannot be used. It is raised before a byte is sent and before any array is written."""


class CollectiveMismatchError(SparseCommError):
    """Ranks made calls that do not belong together (shape, k, dtype, options or the order of calls)."""


class WeightMismatchError(CollectiveMismatchError):
    """Ranks hold other weights than rank 0. Every rank raises it; their calls match, and the next one may be made."""


class TransportError(SparseCommError):
    """Bytes could not be moved between ranks."""


class TimeoutError(TransportError, builtins.TimeoutError):
    """A peer did not answer within ``SPARSECOMM_TIMEOUT`` seconds."""


class RankFailedError(TransportError):
    """A rank died: MPI reports it, or its connection over the process group broke.

    Attributes:
        ranks: those that are known to be dead, by their numbers in the communicator of the call. Empty where it is
            only known that there are some.
    """

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.ranks)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, in characters that any encoding of Unicode has.

    Ranks tell each other why they leave a call, so it must not fail: what cannot be encoded, such as a byte of a file's
    name, is escaped, and for a text that raises its type stands.
    """
    try:
        text = str(error)
    except BaseException as failure:
        text = f"(its text raised {type(failure).__name__})"
    return text.encode(errors="backslashreplace").decode()


def describe(error: BaseException) -> str:
    """Return the type and the text of an exception: see `text_of`."""
    return f"{type(error).__name__}: {text_of(error)}"
