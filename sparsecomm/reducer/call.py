"""The call that sums one unit in one step, as the communicator's thread makes it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from sparsecomm.backends import Backend
from sparsecomm.calls.collective import Collective
from sparsecomm.calls.options import Options
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.unit import Unit
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Transport

__all__ = ["BucketCall"]


class BucketCall:
    """`sparsecomm.calls.queue.Work`.

    Attributes:
        finite: whether the result is; the same on all ranks, since the result is. True unless ``skip`` asks.
        left: results that have no place to go, by name.
    """

    def __init__(
        self,
        unit: Unit,
        last: Tensor | None,
        ranks: Transport,
        k: int,
        options: Options,
        label: int,
        *,
        mean: bool,
        skip: bool,
        counters: Counters,
    ) -> None:
        """``last``: the gradient that came last, whose stream has all the work that the call must wait for."""
        self.finite = True
        self.left: dict[str, SparseVector] = {}
        self._unit, self._ranks, self._mean, self._skip, self._counters = unit, ranks, mean, skip, counters
        self._writing = 0.0
        with unit.backend.on_stream(last):
            self._backend: Backend
            self._within: AbstractContextManager[Any]
            self._backend, self._within = unit.backend.side_stream()
            self._collective = Collective(
                self._backend,
                ranks,
                unit.contribution(self._backend),
                (unit.size,),
                unit.accumulator,
                k,
                options,
                label,
                self._write,
                self._usable,
                kept=True,
            )

    def run(self) -> SparseVector:
        counters, moved = self._counters, self._ranks.counters
        before = moved.bytes_sent, moved.bytes_received, moved.messages_sent
        start = time.perf_counter()
        with self._within:
            result = self._collective.run()
        counters.exchange += time.perf_counter() - start - self._writing
        counters.write += self._writing
        counters.bytes_sent += moved.bytes_sent - before[0]
        counters.bytes_received += moved.bytes_received - before[1]
        counters.messages_sent += moved.messages_sent - before[2]
        counters.calls += 1
        counters.elements += self._unit.size
        return result

    def leave(self, error: BaseException) -> None:
        with self._within:
            self._collective.leave(error)

    def _usable(self, result: SparseVector) -> bool:
        if self._skip:
            values = result.dense if isinstance(result, DenseSum) else result.values
            self.finite = self._backend.finite(self._backend.as_tensor(values, values.shape))
        return self.finite

    def _write(self, result: SparseVector) -> None:
        start = time.perf_counter()
        unit, taken = self._unit, self._collective.gradient.taken
        if self.finite:
            unit.result = result if self._skip else None
            if taken is not None:
                unit.sent(self._backend, taken)
        self._counters.selected += unit.size if taken is None else taken.nnz
        self._counters.applied += result.size if isinstance(result, DenseSum) else result.nnz
        if self._mean:
            result = self._backend.divide(result, self._ranks.size)
        self.left = unit.write(self._backend, result)
        self._writing = time.perf_counter() - start
