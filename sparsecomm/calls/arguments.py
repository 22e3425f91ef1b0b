"""Checks of a call's arguments, made before anything is sent, and the rank that error messages name.

Each function raises `InvalidInputError` if its argument cannot be used.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from sparsecomm.calls.label import UNLABELLED, Label
from sparsecomm.checks import MAX_SIZE, quote, to_float, to_int
from sparsecomm.contribution import Chunks
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Comm, Transport, existing_transport, group_of, job

_P = ParamSpec("_P")
_R = TypeVar("_R")


def count_of(k: Any, size: int, what: str = "the number of elements") -> int:
    """Return the number of entries that ``k``, a count or a density, selects from ``size`` elements (``what``)."""
    if type(k) is int and 0 < k <= size:  # fast path
        return k
    if isinstance(k, numbers.Integral):
        if (count := to_int(k, 1, size or MAX_SIZE)) is not None:
            return min(count, size)
    elif 0 < (density := to_float(k)) <= 1:  # false for NaN
        return min(size, max(1, round(density * size)))
    raise InvalidInputError(
        f"k={quote(k)}: expected an int from 1 to {size} ({what}) or a float in (0, 1] (the density)"
    )


def chunk_of(chunk: Any) -> int:
    """Return the number of elements of a chunk."""
    if (length := to_int(chunk, 1)) is None:
        raise InvalidInputError(f"chunk={quote(chunk)}: expected a number of elements, an int of at least 1")
    return length


def chunks_of(k: Any, chunk: Any) -> Chunks:
    """Return the selection of ``k``, a count or a density, from every ``chunk`` elements."""
    length = chunk_of(chunk)
    return Chunks(count_of(k, length, "the elements of a chunk"), length)


def label_of(label: str | Label) -> Label:
    """Return the label of a call that a user has labelled, or ``label`` itself if it is a `Label` of this library."""
    if isinstance(label, Label):
        return label
    return Label.of(("call", "sparse_allreduce"), ("label", repr(label))) if label else UNLABELLED


def naming_rank(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that its `InvalidInputError` names the rank in the keyword argument ``comm``."""

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except InvalidInputError as error:
            raise name_rank(error, kwargs.get("comm")) from error.__cause__

    return wrapper


def name_rank(error: InvalidInputError, comm: Any) -> InvalidInputError:
    """Return ``error`` with this rank's number in ``comm`` added, if it is known."""
    rank = rank_of(comm)
    return error if rank is None else InvalidInputError(f"rank {rank}: {error}")


def note_skipped(comm: Comm, error: BaseException) -> None:
    """Record on the transport of ``comm`` that ``error`` prevented this rank's call."""
    with suppress(BaseException):  # the caller raises the first error
        transport = existing_transport(comm)
        if transport is not None:
            transport.skip_reason = type(error).__name__


def rank_of(comm: Any) -> int | None:
    """Return this process's rank if it is known without starting anything, or None."""
    if isinstance(comm, Transport):
        return comm.rank
    if (group := group_of(comm)) is not None:
        return None if type(group) is int else int(group.rank())
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        world = MPI.COMM_WORLD
        with suppress(Exception):  # the caller reports an object that is not a communicator, or a freed one
            if comm is not None and comm != world:
                return int(comm.Get_rank())
        if world.Get_size() > 1:
            return int(world.Get_rank())
        return job.rank() or 0  # MPI was started for one rank, but a launcher may have started more
    return job.rank()
