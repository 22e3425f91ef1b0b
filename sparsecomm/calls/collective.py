"""One collective call, from checked arguments to its result, so that any thread can make it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from sparsecomm.algorithms import Algorithm
from sparsecomm.backends import CpuBackend
from sparsecomm.calls.options import Options
from sparsecomm.errors import InvalidInputError
from sparsecomm.feedback import Gradient
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.completion import complete
from sparsecomm.primitives.gather import ROUNDS, broadcast_words, sum_words
from sparsecomm.tensors.dtypes import FLOAT32, DType
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.wire import OPS, PLAIN, CallSignature, Messages

__all__ = ["Collective", "WordsBroadcast"]


@dataclass(slots=True)
class Collective:
    """A collective call that is ready to be made.

    Attributes:
        ranks: the transport.
        gradient: this rank's contribution.
        dtype: the element type that the ranks agree on.
        k: entries that every rank selects.
        options: the options.
        label: what the ranks' calls must have in common besides; 0: nothing.
        write: called with the result, before the call counts as done.
        held: the gradient of a call that went well is left as it is, for `settle`.
        within: entered around it.
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
    algorithm: Algorithm | None = field(default=None, init=False)  # which it was made with
    _total: SparseVector | None = field(default=None, init=False, repr=False)  # until `settle`

    def run(self) -> SparseVector:
        """Make the call, and return its result.

        Raises:
            CollectiveMismatchError, TransportError: see `sparsecomm.sparse_allreduce`. The gradient is as after a
                rollback.
        """
        with self.within or nullcontext():
            return self._run()

    def settle(self, *, usable: bool) -> None:
        """Commit the gradient of a call that went well; or roll it back where the result is not usable, on all ranks.

        Once, and only with ``held``. After a call that failed there is nothing to do.
        """
        total, self._total = self._total, None
        if total is None or self.algorithm is None:
            return
        if usable:
            self.gradient.commit(total, rejects=self.algorithm.rejects)
        else:
            self.gradient.rollback()

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why."""
        with self.within or nullcontext():
            try:
                _leave(self.ranks, self._begin, error)
            finally:
                self.gradient.rollback()

    def _run(self) -> SparseVector:
        comm, gradient, options = None, self.gradient, self.options
        try:
            comm, self.algorithm = self._begin()
            result = self.algorithm.run(comm, gradient, self.k)
            if options.complete:
                result = complete(comm.subgroup(range(comm.size), 4), gradient, result)
            total = result
            if options.op == "mean":
                result = gradient.backend.divide(total, self.ranks.size)
            self.ranks.conclude()
        except BaseException as error:
            refused = comm is None and isinstance(error, InvalidInputError)  # then no call has begun
            try:
                if not refused:  # a signal may come when it has begun and there is no communicator yet
                    self.ranks.abort(error)
            finally:
                if self.kept or not refused:
                    gradient.rollback()
            raise
        comm.end()
        self._total = total
        if not self.held:
            self.settle(usable=True)
        if self.write is not None:
            self.write(result)
        if options.explain and self.ranks.rank == 0:
            explanation = options.explanation(self.ranks, gradient.size, self.k, self.dtype.accumulator.itemsize)
            print(explanation, file=sys.stderr)
        return result

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

    def run(self) -> SparseVector:
        """Make the call. Its result is empty; the words are in ``words``."""
        try:
            comm = self._begin()
            words = self._exchange(comm)
            self._ranks.conclude()
            self.words = words
        except BaseException as error:
            self._ranks.abort(error)
            raise
        comm.end()
        return SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why."""
        _leave(self._ranks, self._begin, error)

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


def _leave(ranks: Transport, begin: Callable[[], object], error: BaseException) -> None:
    """Begin a call only to leave it."""
    try:
        begin()
    finally:
        ranks.abort(error)  # also if a signal comes when it has begun
