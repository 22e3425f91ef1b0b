"""Arguments of a call: checked before a byte is sent, then made into a `Collective`."""

from __future__ import annotations

import numbers
import sys
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from sparsecomm import backends, transport
from sparsecomm.backends import Backend
from sparsecomm.calls.collective import Collective
from sparsecomm.calls.options import Options
from sparsecomm.checks import MAX_SIZE, number, shown, whole
from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.feedback import Chunks, Gradient
from sparsecomm.interrupts import persevere
from sparsecomm.tensors import interop
from sparsecomm.transport import Comm, job
from sparsecomm.wire import shape_checksum

__all__ = ["Arguments", "Comm", "chunk_of", "chunks_of", "count_of", "naming_rank", "note_skipped", "rank_of"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True)
class Arguments:
    """Checked arguments of `sparsecomm.sparse_allreduce`.

    Attributes:
        x, residual, out: the tensors.
        k: entries that every rank selects.
        options: the options.
        label: a checksum of the caller's label; 0 for none.
        chunks: how they are selected; ``None``: from the whole.
        decay: what is left of the residual.
    """

    x: interop.Tensor
    k: int
    residual: interop.Tensor | None
    out: interop.Tensor | None
    options: Options
    label: int = 0
    chunks: Chunks | None = None
    decay: float = 1.0

    @classmethod
    def checked(
        cls,
        x: object,
        k: int | float,
        residual: object,
        out: object,
        options: Options,
        label: str = "",
        chunk: int | None = None,
        decay: float = 1.0,
    ) -> Arguments:
        """Return the arguments.

        Raises:
            InvalidInputError: one of them cannot be used.
        """
        t = interop.tensor(x, "x")
        r = None if residual is None else interop.as_residual(residual, t)
        o = None if out is None else interop.as_out(out, t, residual=r)
        chunks = None if chunk is None else chunks_of(k, chunk)
        count = count_of(k, t.size) if chunks is None else chunks.total(t.size)
        options.check(t.dtype.name)
        return cls(t, count, r, o, options, _checksum(label), chunks, _decay_of(decay, r, options))

    def connect(self, comm: Comm) -> transport.Transport:
        """Return the transport of ``comm``.

        Raises:
            TransportError: see `sparsecomm.transport.of`. The residual is as after a call that failed.
            BaseException: anything else, such as `InvalidInputError` or an interrupt. Nothing has changed.
        """
        try:
            return transport.of(comm)
        except TransportError:
            backend = backends.of(self.x.device)
            gradient = self._gradient(backend)

            def keep(interrupted: BaseException | None) -> None:
                with backend.on_stream(self.x):
                    gradient.rollback()

            try:  # noqa: SIM105 - an interrupt may come when a context is left
                persevere(keep)
            except BaseException:
                pass  # the error that was there first says what has become of the residual
            raise

    def collective(
        self, ranks: transport.Transport, backend: Backend, within: AbstractContextManager[object] | None = None
    ) -> Collective:
        """Return the call, ready to be made, on a ``backend`` of its queue, ``within`` a context of that."""
        write = None if self.out is None else partial(backend.densify, self.out)
        return Collective(
            ranks,
            self._gradient(backend),
            self.x.dtype,
            self.k,
            self.options,
            self.label,
            write,
            within=within,
            chunk=0 if self.chunks is None else self.chunks.length,
            shape=shape_checksum(self.x.shape),
            residual=self.residual is not None,
            out=self.out is not None,
        )

    def _gradient(self, backend: Backend) -> Gradient:
        return Gradient(backend, self.x, self.residual, self.chunks, self.decay)


def count_of(k: Any, size: int, what: str = "the number of elements") -> int:
    """Return how many entries ``k``, a count or a density, stands for, of ``size`` elements, which are ``what``.

    Raises:
        InvalidInputError: it is neither.
    """
    if type(k) is int and 0 < k <= size:  # the common case, before what takes longer
        return k
    if isinstance(k, numbers.Integral):
        if (count := whole(k, 1, size or MAX_SIZE)) is not None:
            return min(count, size)
    elif 0 < (density := number(k)) <= 1:  # NaN is not
        return min(size, max(1, round(density * size)))
    raise InvalidInputError(
        f"k={shown(k)}: expected an int from 1 to {size} ({what}) or a float in (0, 1] (the density)"
    )


def chunk_of(chunk: Any) -> int:
    """Return how many elements a chunk has.

    Raises:
        InvalidInputError: it is no number of elements.
    """
    if (count := whole(chunk, 1)) is None:
        raise InvalidInputError(f"chunk={shown(chunk)}: expected a number of elements, an int from 1 on")
    return count


def chunks_of(k: Any, chunk: Any) -> Chunks:
    """Return the selection by chunk for ``k``, a count or a density, of every ``chunk`` elements.

    Raises:
        InvalidInputError: they are not.
    """
    length = chunk_of(chunk)
    return Chunks(count_of(k, length, "the elements of a chunk"), length)


def _decay_of(decay: object, residual: object, options: Options) -> float:
    part = number(decay)
    if not 0 < part <= 1:  # NaN is not
        raise InvalidInputError(f"decay={shown(decay)}: expected a number in (0, 1]; 1 keeps the residual whole")
    if part < 1 and residual is None:
        raise InvalidInputError(f"decay={part!r} without a residual, which it would make smaller; pass one")
    if part < 1 and options.algorithm == "dense":
        raise InvalidInputError(f"decay={part!r} with algorithm='dense', which leaves no residual; leave one out")
    return part


def _checksum(label: object) -> int:
    if not isinstance(label, str):
        raise InvalidInputError(f"label={shown(label)}: expected a text")
    try:
        return zlib.crc32(label.encode()) or 1 if label else 0
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"label={shown(label)}: expected characters that UTF-8 has") from error


def naming_rank(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function's `InvalidInputError` name the rank: other ranks may have passed their arguments.

    Its communicator is the keyword argument ``comm``.
    """

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except InvalidInputError as error:
            rank = rank_of(kwargs.get("comm"))
            if rank is None:
                raise
            raise InvalidInputError(f"rank {rank}: {error}") from error.__cause__

    return wrapper


def note_skipped(comm: Comm, error: BaseException) -> None:
    """Note that ``error`` has kept this rank from beginning a call on ``comm``."""
    try:
        ranks = transport.existing(comm)
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
