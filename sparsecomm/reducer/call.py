"""The call that sums one bucket in one step, as the thread of the communicator's call queue makes it."""

from __future__ import annotations

import time

from sparsecomm.calls.collective import Collective
from sparsecomm.calls.options import Options
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.counters import Counters
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Transport

__all__ = ["BucketCall"]


class BucketCall:
    """The sum of a bucket over all ranks: a `sparsecomm.calls.queue.Task`.

    Attributes:
        finite: whether the result is finite; the same on all ranks, since the result is. True unless ``skip`` is.
        left: results of tensors that have no ``out``, by name.
    """

    def __init__(
        self,
        bucket: Bucket,
        ranks: Transport,
        k: int,
        options: Options,
        label: int,
        *,
        mean: bool,
        skip: bool,
        counters: Counters,
    ) -> None:
        """Prepare the call.

        Args:
            bucket: its gradients of this step are complete.
            ranks: who takes part.
            k: entries that every rank selects.
            options: of the call, whose ``op`` is "sum".
            label: what the ranks' calls must have in common besides.
            mean: divide the sum by the number of ranks.
            skip: keep the gradients of all ranks if the result is not finite.
            counters: where time and traffic are added up.
        """
        self.finite = True
        self.left: dict[str, SparseVector] = {}
        self._bucket, self._ranks, self._mean, self._skip, self._counters = bucket, ranks, mean, skip, counters
        self._writing = 0.0
        with bucket.backend.on_stream(bucket.last):  # it has all the work that the call must wait for
            self._backend, self._within = bucket.backend.side_stream()
            self._collective = Collective(
                ranks,
                bucket.contribution(self._backend),
                bucket.accumulator,
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
        counters.elements += self._bucket.size
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
        bucket, gradient = self._bucket, self._collective.gradient
        taken = gradient.taken
        if self.finite:
            bucket.result = result if self._skip else None
            whole = gradient.selected is None and isinstance(result, DenseSum)
            if not whole:  # where the whole is summed, nothing waits, and momentum goes on
                bucket.mask_velocity(self._backend, taken, result)
        self._counters.selected += bucket.size if taken is None else taken.nnz
        self._counters.applied += result.size if isinstance(result, DenseSum) else result.nnz
        if self._mean:
            result = self._backend.divide(result, self._ranks.size)
        self.left = bucket.write(self._backend, result)
        self._writing = time.perf_counter() - start
