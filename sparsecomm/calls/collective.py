"""One collective call, from checked arguments to its result, so that any thread can make it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecomm import algorithms as collectives
from sparsecomm.backends import Backend, CpuBackend
from sparsecomm.calls.options import Options
from sparsecomm.errors import InvalidInputError
from sparsecomm.feedback import Gradient
from sparsecomm.primitives.gather import ROUNDS, sum_words
from sparsecomm.tensors.dtypes import FLOAT32, DType
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.wire import OPS, PLAIN, CallSignature, Messages

__all__ = ["Collective", "FirstRanksWords"]


@dataclass(slots=True)
class Collective:
    """A call that is ready to be made.

    Attributes:
        backend: the arithmetic of the gradient's device.
        ranks: who takes part.
        gradient: this rank's contribution.
        shape, dtype: of the gradient.
        k: entries that every rank selects.
        how: the options.
        label: what the ranks' calls must have in common besides; 0: nothing.
        write: what is done with the result, before the call counts as done.
        usable: asked of the result; where it says no, on all ranks, every rank keeps its gradient, as after an error.
        within: entered around it.
        kept: even if the call cannot be begun, for bad settings, the gradient is as after a rollback.
    """

    backend: Backend
    ranks: Transport
    gradient: Gradient
    shape: tuple[int, ...]
    dtype: DType
    k: int
    options: Options
    label: int = 0
    write: Callable[[SparseVector], None] | None = None
    usable: Callable[[SparseVector], bool] | None = None
    within: AbstractContextManager[Any] | None = None
    kept: bool = False

    def run(self) -> SparseVector:
        """Make it.

        Raises:
            CollectiveMismatchError, TransportError: see `sparsecomm.sparse_allreduce`. The gradient is as after a
                rollback.
        """
        with self.within or nullcontext():
            return self._run()

    def leave(self, error: BaseException) -> None:
        """Do not make it, and tell the other ranks why."""
        with self.within or nullcontext():
            try:
                _leave(self.ranks, self._begin, error)
            finally:
                self.gradient.rollback()

    def _run(self) -> SparseVector:
        group = None
        try:
            group, algorithm = self._begin()
            result = algorithm.run(group, self.gradient, self.k)
            if self.options.complete:
                result = collectives.complete(group.subgroup(range(group.size), 4), self.gradient, result)
            if self.options.op == "mean":
                result = self.backend.divide(result, self.ranks.size)
        except BaseException as error:
            refused = group is None and isinstance(error, InvalidInputError)  # then no call has begun
            try:
                if not refused:  # a signal may come when it has begun and there is no group yet
                    self.ranks.abort(error)
            finally:
                if self.kept or not refused:
                    self.gradient.rollback()
            raise
        group.end()
        if self.usable is None or self.usable(result):
            self.gradient.commit()
        else:
            self.gradient.rollback()
        if self.write is not None:
            self.write(result)
        if self.options.explain and self.ranks.rank == 0:
            accumulator = self.dtype.accumulator.itemsize
            print(self.options.explanation(self.ranks, self._size, self.k, accumulator), file=sys.stderr)
        return result

    def _begin(self) -> tuple[collectives.Communicator, collectives.Algorithm]:
        accumulator = self.dtype.accumulator
        algorithm, wire, costs = self.options.chosen(self.ranks, self._size, self.k, accumulator.itemsize)
        call = CallSignature(
            algorithm.name,
            self.dtype.code,
            OPS.index(self.options.op),
            wire.code,
            self._size,
            self.k,
            self.options.complete,
            costs,
            self.label,
        )
        memory = self.backend.memory(self.ranks.device_memory)
        messages = Messages(call, self.ranks.rank, accumulator, self.shape, self.backend, memory)
        return collectives.Communicator(self.ranks, self.backend, messages, wire), algorithm

    @property
    def _size(self) -> int:
        return math.prod(self.shape)


class FirstRanksWords:
    """A call after which all ranks have the words of the first one.

    Attributes:
        words: whole numbers from 0 to 2^64 - 1, as many on all ranks.
    """

    def __init__(self, ranks: Transport, words: list[int], label: int) -> None:
        self.words = words
        self._ranks, self._label = ranks, label

    def run(self) -> SparseVector:
        try:
            group = self._begin()
            words = collectives.broadcast_words(group, self.words, 0)
            sum_words(group, [1], ROUNDS)  # no rank may be done before all have begun
            self.words = words
        except BaseException as error:
            self._ranks.abort(error)
            raise
        group.end()
        return SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))

    def leave(self, error: BaseException) -> None:
        _leave(self._ranks, self._begin, error)

    def _begin(self) -> collectives.Communicator:
        call = CallSignature(
            "words of the first rank", FLOAT32.code, 0, PLAIN.code, len(self.words), 0, label=self._label
        )
        host = CpuBackend()
        messages = Messages(call, self._ranks.rank, FLOAT32.accumulator, (len(self.words),), host)
        return collectives.Communicator(self._ranks, host, messages, PLAIN)


def _leave(ranks: Transport, begin: Callable[[], object], error: BaseException) -> None:
    """Begin a call only to leave it."""
    try:
        begin()
    finally:
        ranks.abort(error)  # also if a signal comes when it has begun
