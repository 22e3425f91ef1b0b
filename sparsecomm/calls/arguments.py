"""Arguments of calls, checked before a byte is sent, and the rank that errors name."""

from __future__ import annotations

import numbers
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from sparsecomm import transport
from sparsecomm.checks import MAX_SIZE, quote, to_float, to_int
from sparsecomm.contribution import Chunks
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Comm, job

__all__ = [
    "Comm",
    "chunk_of",
    "chunks_of",
    "count_of",
    "decay_of",
    "label_checksum",
    "name_rank",
    "naming_rank",
    "note_skipped",
    "rank_of",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def count_of(k: Any, size: int, what: str = "the number of elements") -> int:
    """Return how many entries ``k``, a count or a density, stands for, of ``size`` elements, which are ``what``.

    Raises:
        InvalidInputError: it is neither.
    """
    if type(k) is int and 0 < k <= size:  # the common case, before what takes longer
        return k
    if isinstance(k, numbers.Integral):
        if (count := to_int(k, 1, size or MAX_SIZE)) is not None:
            return min(count, size)
    elif 0 < (density := to_float(k)) <= 1:  # NaN is not
        return min(size, max(1, round(density * size)))
    raise InvalidInputError(
        f"k={quote(k)}: expected an int from 1 to {size} ({what}) or a float in (0, 1] (the density)"
    )


def chunk_of(chunk: Any) -> int:
    """Return how many elements a chunk has.

    Raises:
        InvalidInputError: it is no number of elements.
    """
    if (count := to_int(chunk, 1)) is None:
        raise InvalidInputError(f"chunk={quote(chunk)}: expected a number of elements, an int from 1 on")
    return count


def chunks_of(k: Any, chunk: Any) -> Chunks:
    """Return the selection by chunk for ``k``, a count or a density, of every ``chunk`` elements.

    Raises:
        InvalidInputError: they are not.
    """
    length = chunk_of(chunk)
    return Chunks(count_of(k, length, "the elements of a chunk"), length)


def decay_of(decay: object, residual: object, algorithm: object) -> float:
    """Return what the residual is multiplied by.

    Raises:
        InvalidInputError: it is no such number, or there is nothing that it would multiply.
    """
    part = to_float(decay)
    if not 0 < part <= 1:  # NaN is not
        raise InvalidInputError(f"decay={quote(decay)}: expected a number in (0, 1]; 1 keeps the residual whole")
    if part < 1 and residual is None:
        raise InvalidInputError(f"decay={part!r} without a residual, which it would make smaller; pass one")
    name = getattr(algorithm, "name", algorithm) if part < 1 else None  # it may not have been checked
    if isinstance(name, str) and name == "dense":
        raise InvalidInputError(f"decay={part!r} with algorithm='dense', which leaves no residual; leave one out")
    return part


def label_checksum(label: object) -> int:
    """Return the checksum of a label that messages carry; 0 for none.

    Raises:
        InvalidInputError: it is no text.
    """
    if not isinstance(label, str):
        raise InvalidInputError(f"label={quote(label)}: expected a text")
    try:
        return zlib.crc32(label.encode()) or 1 if label else 0
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"label={quote(label)}: expected characters that UTF-8 has") from error


def naming_rank(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function's `InvalidInputError` name the rank: other ranks may have passed their arguments.

    Its communicator is the keyword argument ``comm``.
    """

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except InvalidInputError as error:
            raise name_rank(error, kwargs.get("comm")) from error.__cause__

    return wrapper


def name_rank(error: InvalidInputError, comm: Any) -> InvalidInputError:
    """Return an error that names this rank of ``comm``, if that can be said."""
    rank = rank_of(comm)
    return error if rank is None else InvalidInputError(f"rank {rank}: {error}")


def note_skipped(comm: Comm, error: BaseException) -> None:
    """Note that ``error`` has kept this rank from beginning a call on ``comm``."""
    try:
        ranks = transport.existing_transport(comm)
        if ranks is not None:
            ranks.skipped = type(error).__name__
    except BaseException:
        pass  # not a communicator, a freed one, or an interrupt; the error that was there first is raised


def rank_of(comm: Any) -> int | None:
    """Return this process's rank, if that can be said without starting anything."""
    if isinstance(comm, transport.Transport):
        return comm.rank
    if (group := transport.group_of(comm)) is not None:
        return None if type(group) is int else int(group.rank())
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        world = MPI.COMM_WORLD
        with suppress(Exception):  # not a communicator, or a freed one: the error being raised says so
            if comm is not None and comm != world:
                return int(comm.Get_rank())
        if world.Get_size() > 1:
            return int(world.Get_rank())
        return job.rank() or 0  # MPI knows of no other rank, and a launcher may
    return job.rank()
