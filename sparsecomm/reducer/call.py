"""The call that sums one bucket in one step, as the thread of the communicator's call queue makes it."""

from __future__ import annotations

import time

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.backends import Backend
from sparsecomm.calls.call import SumCall
from sparsecomm.calls.options import Options
from sparsecomm.calls.plan import Plan
from sparsecomm.contribution import Chunks
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.counters import Counters
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Transport

__all__ = ["BucketCall"]


class BucketCall:
    """The sum of a bucket over all ranks: a `sparsecomm.calls.queue.Task`.

    Attributes:
        finite: whether the result is finite; the same on all ranks, since the result is. True unless ``skip`` is. The
            call then leaves the gradient as it is, for `settle`.
        left: results of tensors that have no ``out``, by name.
    """

    def __init__(
        self,
        bucket: Bucket,
        ranks: Transport,
        backend: Backend,
        k: int,
        options: Options,
        label: int,
        *,
        chunks: Chunks | None = None,
        mean: bool,
        skip: bool,
        counters: Counters,
    ) -> None:
        """Prepare the call.

        Args:
            bucket: its gradients of this step are complete.
            ranks: who takes part.
            backend: of the call queue, on the bucket's device.
            k: entries that every rank selects.
            options: of the call, whose ``op`` is not "mean": that is taken when the result is written.
            label: what the ranks' calls must have in common besides.
            chunks: how they are selected, if it is of each chunk of a tensor.
            mean: divide the sum by the number of ranks.
            skip: see whether the result is finite, and wait for `settle`.
            counters: where time and traffic are added up.
        """
        self.finite = True
        self.left: dict[str, SparseVector] = {}
        self._bucket, self._ranks, self._mean, self._skip, self._counters = bucket, ranks, mean, skip, counters
        self._writing = 0.0
        self._result: SparseVector | None = None  # until the call is settled
        self._backend = backend
        with bucket.on_stream(bucket.last):
            contribution = bucket.contribution(backend, chunks)
            self._within = backend.side_stream()  # after all work that the call must wait for
        plan = Plan(ranks, backend, bucket.accumulator, (bucket.size,), bucket.size, k, options, chunks)
        self._collective = SumCall(plan, contribution, label, self._write, deferred=skip, keeps=True)

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
        counters.bytes_dense += 2 * (self._ranks.size - 1) * self._bucket.nbytes // self._ranks.size
        counters.calls += 1
        counters.elements += self._bucket.size
        return result

    @property
    def over(self) -> bool:
        """See `sparsecomm.calls.queue.Task`."""
        return True

    @property
    def counts(self) -> bool:
        """Whether the sum was made and written, also if an interrupt was raised when it had been."""
        return self._collective.succeeded

    def leave(self, error: BaseException) -> None:
        with self._within:
            self._collective.leave(error)

    def settle(self, *, usable: bool) -> None:
        """End a call with ``skip`` that went well: the result is applied on all ranks, or it is not ``usable``.

        Otherwise there is nothing to do. The program calls it when it has waited for the call.
        """
        result = self._result
        if result is None:
            return
        start, bucket = time.perf_counter(), self._bucket
        with bucket.on_stream(bucket.last):
            self._backend = self._collective.contribution.backend = (
                bucket.backend
            )  # the queue may make other calls by now
            with bucket.backend.side_stream():
                self._collective.settle(usable=usable)
                if usable:
                    self._mask(result)
        self._result = None  # after an interrupt it is done again
        self._counters.exchange += time.perf_counter() - start

    def _mask(self, result: SparseVector) -> None:
        if self._collective.plan.algorithm is ALGORITHMS["dense"]:
            return  # nothing waits, and momentum goes on
        self._bucket.mask_velocity(self._backend, self._collective.contribution.taken, result)

    def _write(self, result: SparseVector) -> None:
        if self._skip:
            values = result.dense if isinstance(result, DenseSum) else result.values
            self.finite = self._backend.finite(self._backend.as_tensor(values, values.shape))
            self._result = result
        start = time.perf_counter()
        if not self._skip:
            self._mask(result)
        bucket, taken = self._bucket, self._collective.contribution.taken
        self._counters.selected += bucket.size if taken is None else taken.nnz
        self._counters.applied += result.size if isinstance(result, DenseSum) else result.nnz
        if self._mean:
            result = self._backend.divide(result, self._ranks.size)
        self.left = bucket.write(self._backend, result)
        self._writing = time.perf_counter() - start
