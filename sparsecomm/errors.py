"""The exceptions of sparsecomm, texts for their messages, and the logger of all modules."""

from __future__ import annotations

import builtins
import difflib
import logging
import shlex
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

log = logging.getLogger("sparsecomm")


class SparseCommError(Exception):
    """Base class of all errors of this library."""


class InvalidInputError(SparseCommError, ValueError):
    """An argument cannot be used. It is raised before anything is sent or any array is written."""


class CollectiveMismatchError(SparseCommError):
    """The ranks made different calls: another shape, k, dtype, option or order of calls.

    Attributes:
        peer: a rank whose call differs from this rank's, if it is known.
    """

    peer: int | None = None


class WeightMismatchError(CollectiveMismatchError):
    """The ranks hold different weights. Every rank raises it. Their calls match, so they can make further calls."""


class PatchError(SparseCommError):
    """A patch or a published version of weights cannot be used: it is damaged, or made for other weights."""


class TransportError(SparseCommError):
    """Bytes could not be moved between ranks."""


class TimeoutError(TransportError, builtins.TimeoutError):
    """A rank did not answer within ``SPARSECOMM_TIMEOUT`` seconds, or the ``timeout`` of a process group."""


class RankFailedError(TransportError):
    """A rank died: MPI reports it, or its connection in the process group broke.

    Attributes:
        ranks: the ranks known to be dead, as numbered in the communicator of the call. Empty if they are not known.
    """

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.ranks)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, encodable in UTF-8. Never raises, since ranks send it to each other."""
    try:
        text = str(error)
    except BaseException as failure:
        text = f"(its message raised {type(failure).__name__})"
    return text.encode(errors="backslashreplace").decode()


def describe(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    return f"{type(error).__name__}: {text_of(error)}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'butterfly'?" for example, or "" if no known name is similar."""
    similar = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    return f"; did you mean {similar[0]!r}?" if similar else ""


def listed(names: Collection[str], max_names: int = 8) -> str:
    """Return a list of names, or the first ones and the number of others; "nothing" for an empty list."""
    first = ", ".join(map(repr, islice(names, max_names)))
    return f"{first} and {len(names) - max_names} others" if len(names) > max_names else first or "nothing"


def pip_install(extra: str) -> str:
    """Return the shell command that installs an extra, from this checkout if sparsecomm runs in one."""
    folder = Path(__file__).resolve().parent.parent
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install 'sparsecomm[{extra}]'"


@contextmanager
def needing(library: str, user: str, extra: str, advice: str = "") -> Iterator[None]:
    """Import an optional library. The error says which extra installs it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{user} needs {library} ({error}): {pip_install(extra)}{advice}") from error
