"""One collective call, from checked arguments to its result, so that any thread can make it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from sparsecomm.algorithms import Algorithm
from sparsecomm.backends import CpuBackend, default_float_mode
from sparsecomm.calls.options import Options
from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.feedback import Gradient
from sparsecomm.interrupts import persevere
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.completion import complete
from sparsecomm.primitives.gather import ROUNDS, broadcast_words, sum_words
from sparsecomm.tensors.dtypes import FLOAT32, DType
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.wire import OPS, PLAIN, CallSignature, Messages

__all__ = ["Collective", "WordsBroadcast"]

_NOTHING: AbstractContextManager[object] = nullcontext()


@dataclass(slots=True)
class Collective:
    """A collective call that is ready to be made.

    However it is interrupted, it ends in one of two ways. The result is written and the gradient committed, or the
    other ranks know and the gradient is as after a rollback. What remains to be done follows from what was done.
    Where no call could be begun, for bad settings, nothing has changed.

    Attributes:
        ranks: the transport.
        gradient: this rank's contribution.
        dtype: the element type that the ranks agree on.
        k: entries that every rank selects.
        options: the options.
        label: what the ranks' calls must have in common besides; 0: nothing.
        write: called with the result, before the call counts as done; again if it was interrupted.
        held: the gradient of a call that went well is left as it is, for `settle`.
        within: entered around it.
        chunk: elements of a chunk, of each of which entries are selected; 0: they are selected from the whole.
        shape, residual, out: as of `CallSignature`, for calls whose label does not cover them.
        kept: even if the call cannot be begun, for bad settings, the gradient is as after a rollback.
    """

    ranks: Transport
    gradient: Gradient
    dtype: DType
    k: int
    options: Options
    label: int = 0
    write: Callable[[SparseVector], None] | None = None
    held: bool = False
    within: AbstractContextManager[object] | None = None
    kept: bool = False
    chunk: int = 0
    shape: int = 0
    residual: bool = False
    out: bool = False
    algorithm: Algorithm | None = field(default=None, init=False)  # which it was made with
    _comm: Communicator | None = field(default=None, init=False, repr=False)  # of the call, once it has begun
    _sums: tuple[SparseVector, SparseVector] | None = field(default=None, init=False, repr=False)  # and the result
    _counts: bool = field(default=False, init=False, repr=False)  # the call has succeeded
    _leaving: Leaving | None = field(default=None, init=False, repr=False)
    _last: int = field(default=-1, init=False, repr=False)  # number of the call before
    _failed: bool = field(default=False, init=False, repr=False)
    _settled: bool = field(default=False, init=False, repr=False)

    @default_float_mode
    def run(self) -> SparseVector:
        """Make the call, and return its result.

        Raises:
            CollectiveMismatchError, TransportError: see `sparsecomm.sparse_allreduce`. The gradient is as after a
                rollback.
        """
        self._last = self.ranks.number
        if self._failed:
            raise TransportError(f"rank {self.ranks.rank}: this call was made before, and failed")
        with self.within or _NOTHING:
            try:
                persevere(self._go_on)
            except BaseException:
                if self._counts and not (self.held or self._settled or self.gradient.committing):
                    self.gradient.rollback()  # there is no memory for the rest
                raise
            assert self._sums is not None
            options, ranks, result = self.options, self.ranks, self._sums[1]
            if options.explain and ranks.rank == 0:
                text = options.explanation(ranks, self.gradient.size, self.k, self.dtype.accumulator.itemsize)
                print(text, file=sys.stderr)
            return result

    @property
    def over(self) -> bool:
        """Whether the call has succeeded or failed. Otherwise it has not begun, or `leave` was interrupted."""
        return self._counts or self._failed

    @property
    def counts(self) -> bool:
        """Whether the call has succeeded, also if an interrupt was raised when it had."""
        return self._counts

    @default_float_mode
    def settle(self, *, usable: bool) -> None:
        """Commit the gradient of a call that went well; or roll it back where the result is not usable, on all ranks.

        Only with ``held``. After a call that failed there is nothing to do, nor the second time.
        """
        persevere(partial(self._settle, usable))

    @default_float_mode
    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why."""
        with self.within or _NOTHING:
            self._leaving = self._leaving or Leaving(self.ranks, self._begin, error, self.ranks.number)
            try:
                persevere(self._leaving.go_on)
            finally:
                persevere(self._roll_back)

    def _go_on(self, error: BaseException | None) -> None:
        """Go on with the call; ``error`` has interrupted it."""
        if error is None and not self._counts:
            self._make()
        if self._sums is not None and (self._counts or self.ranks.concluded):
            self._counts = True
            self._finish(*self._sums)
        else:
            assert error is not None
            self._abandon(error)

    def _make(self) -> None:
        """Do what can still fail on any rank."""
        gradient, options = self.gradient, self.options
        self._comm, self.algorithm = comm, algorithm = self._begin()
        total = result = algorithm.run(comm, gradient, self.k)
        if options.complete:
            total = result = complete(comm.subgroup(range(comm.size), 4), gradient, result)
        if options.op == "mean":
            result = gradient.backend.divide(total, self.ranks.size)
        self._sums = total, result
        self.ranks.conclude()
        self._counts = True

    def _abandon(self, error: BaseException) -> None:
        """Leave the call, which has not succeeded."""
        self._failed = True
        try:
            Leaving(self.ranks, self._begin, error, self._last).go_on()
        finally:
            if self.kept or self.ranks.number != self._last or isinstance(error, TransportError):
                self.gradient.rollback()

    def _finish(self, total: SparseVector, result: SparseVector) -> None:
        """Do what remains of a call that has succeeded."""
        assert self._comm is not None
        self._comm.end()
        if not self.held:
            self._settle(True)
        if self.write is not None:
            self.write(result)

    def _settle(self, usable: bool, interrupted: BaseException | None = None) -> None:
        if self._sums is None or not self._counts or self._settled or self.algorithm is None:
            return
        if usable:
            self.gradient.commit(self._sums[0], rejects=self.algorithm.rejects)
        else:
            self.gradient.rollback()
        self._settled = True

    def _roll_back(self, interrupted: BaseException | None) -> None:
        self.gradient.rollback()
        self._failed = True

    def _begin(self) -> tuple[Communicator, Algorithm]:
        ranks, gradient, options, accumulator = self.ranks, self.gradient, self.options, self.dtype.accumulator
        algorithm, wire, costs = options.chosen(ranks, gradient.size, self.k, accumulator.itemsize)
        op = OPS.index(options.op)
        signature = CallSignature(
            algorithm.name,
            self.dtype.code,
            op,
            wire.code,
            gradient.size,
            self.k,
            bool(options.complete),
            costs,
            self.label,
            self.chunk,
            self.shape,
            self.residual,
            self.out,
        )
        backend = gradient.backend
        memory = backend.memory(ranks.device_memory)
        messages = Messages(signature, ranks.rank, accumulator, gradient.shape, backend, memory)
        return Communicator(ranks, backend, messages, wire), algorithm


class WordsBroadcast:
    """A collective call after which all ranks have the words of rank 0.

    Attributes:
        words: whole numbers from 0 to 2^64 - 1, as many on all ranks.
    """

    name = "words of the first rank"  # in the call signature

    def __init__(self, ranks: Transport, words: list[int], label: int) -> None:
        self.words = words
        self._ranks, self._label = ranks, label
        self._received: list[int] | None = None
        self._counts = False
        self._last = -1  # number of the call before

    def run(self) -> SparseVector:
        """Make the call. Its result is empty; the words are in ``words``."""
        self._last = self._ranks.number
        persevere(self._go_on)
        return SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why."""
        persevere(Leaving(self._ranks, self._begin, error, self._ranks.number).go_on)

    def _go_on(self, error: BaseException | None) -> None:
        if error is None:
            self._received = self._exchange(self._begin())
            self._ranks.conclude()
            self._counts = True
        if self._received is not None and (self._counts or self._ranks.concluded):
            self.words = self._received
            self._ranks.end()
        else:
            assert error is not None
            Leaving(self._ranks, self._begin, error, self._last).go_on()

    def _exchange(self, comm: Communicator) -> list[int]:
        words = broadcast_words(comm, self.words, 0)
        sum_words(comm, [1], ROUNDS)  # no rank may be done before all have begun
        return words

    def _begin(self) -> Communicator:
        length = len(self.words)
        signature = CallSignature(self.name, FLOAT32.code, 0, PLAIN.code, length, 0, label=self._label)
        host = CpuBackend()
        messages = Messages(signature, self._ranks.rank, FLOAT32.accumulator, (length,), host)
        return Communicator(self._ranks, host, messages, PLAIN)


class Leaving:
    """The end of a call with an error. If it has not begun, it is begun only to be left, so that the others know."""

    def __init__(self, ranks: Transport, begin: Callable[[], object], error: BaseException, last: int) -> None:
        """Prepare it: ``last`` is the number of the call before."""
        self._ranks, self._begin, self._error, self._last = ranks, begin, error, last

    def go_on(self, interrupted: BaseException | None = None) -> None:
        """Begin the call, if that has not been done and it can be, and leave it."""
        try:
            if self._ranks.number == self._last and not isinstance(self._error, InvalidInputError):
                self._begin()
        finally:
            if self._ranks.number == self._last:
                self._ranks.skipped = type(self._error).__name__
            self._ranks.abort(self._error)
