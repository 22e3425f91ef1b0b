"""`OpenStep`: one step of a reducer. `Step`: its outcome. `BucketCall`: the call that sums a bucket."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.calls.collectives import SumCall
from sparsecomm.calls.queue import Handle, Task
from sparsecomm.primitives.communicator import gather_words
from sparsecomm.reducer.bucket import Add, Bucket, TensorSpec
from sparsecomm.reducer.connection import Connection
from sparsecomm.reducer.counters import Counters
from sparsecomm.tensors.interop import CPU, Tensor
from sparsecomm.tensors.sparse import DenseSum, SparseVector

__all__ = ["Accept", "BucketCall", "OpenStep", "Step", "error_of"]

# Returns whether a step is usable, given `Step.left` and the largest magnitude in all sums.
Accept: TypeAlias = Callable[[Mapping[str, SparseVector], float], bool]

_ABSENCE = 1 << 19  # round number of the exchange of absent gradients, above those of algorithms


@dataclass(frozen=True)
class Step:
    """The outcome of a step.

    Attributes:
        number, density: the number of the step, from 0, and its density.
        usable: if False, apply nothing: a gradient was not finite on some rank (with ``skip_nonfinite``), or the step
            would make a sum, a parameter or the optimizer's state infinite.
        left: sums that had no ``out``, by name. This rank had no gradient for these tensors, but another rank had one.
        without_gradient: names of tensors for which no rank had a gradient, the same on all ranks. Do not change
            their parameters or the optimizer's state.
        nonfinite: whether a sparse sum contains NaN or infinity (without ``skip_nonfinite``), the same on all ranks.
            Such entries of residuals and velocities were set to zero.
    """

    number: int
    density: float
    usable: bool = True
    left: Mapping[str, SparseVector] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()
    nonfinite: bool = False


class OpenStep:
    """A step that has not ended, and the outcome of the previous step.

    A reducer begins the next step with a new object. All methods may be called again after an interrupt.

    Attributes:
        number: the number of the step.
        before: the outcome of the previous step; ``None`` if it failed or there was none.
        unsummed_before: names of tensors that the previous step did not sum.
        opening: calls before the first gradient, by name: see `Reducer.opening_call`.
        density, label: density of the step, and a text that must be equal on the ranks; set before the first push.
        pushed: gradients by name; ``None`` for an absent gradient.
        unsummed: after `settle`, names of tensors that this step did not sum.
    """

    density: float
    label: str

    def __init__(
        self,
        connection: Connection,
        counters: Counters,
        number: int,
        before: Step | None,
        unsummed_before: tuple[str, ...],
    ) -> None:
        """Begin a step. It adds its time and traffic to ``counters``."""
        self.number, self.before, self.unsummed_before = number, before, unsummed_before
        self._connection, self._settings, self._counters = connection, connection.settings, counters
        self._clips = connection.settings.clip is not None
        self.pushed: dict[str, Tensor | None] = {}
        self.unsummed: tuple[str, ...] = ()
        self.opening: dict[str, tuple[Handle, Task]] = {}
        self._calls: list[tuple[Handle, BucketCall]] = []
        for bucket in self._buckets:
            bucket.begin()

    @property
    def _buckets(self) -> list[Bucket]:
        return [] if self._connection.transport is None else self._connection.buckets.all

    # -- gradients ----------------------------------------------------------------------------------------------------

    def take(self, spec: TensorSpec, t: Tensor | None, out: Tensor | None = None, *, add: Add | None = None) -> None:
        """Take a gradient, and the output for its sum: see `Bucket.take`. With clipping, `_add_clipped` adds it."""
        name, bucket, start = spec.name, self._connection.buckets.by_name[spec.name], time.perf_counter()
        with bucket.on_stream(t):
            if not self._clips:
                bucket.take(spec, t, add=add)
            self.pushed[name] = t
            if out is not None:
                bucket.outs[name] = out
        self._counters.accumulate += time.perf_counter() - start

    def take_rest(self) -> None:
        """Record that this rank has no gradient for tensors that were not pushed."""
        for name, spec in self._connection.specs.items():
            if name not in self.pushed:
                self.take(spec, None)

    def _add_clipped(self) -> None:
        """Clip and add all gradients of this step. After an interrupt, add the rest."""
        connection, s, start = self._connection, self._settings, time.perf_counter()
        by_name, squares = connection.buckets.by_name, 0.0
        for name, t in self.pushed.items():
            if t is not None and t.size:
                with by_name[name].on_stream(t):
                    squares += by_name[name].sum_of_squares(t)
        assert connection.transport is not None
        assert s.clip is not None
        P, norm, factor = connection.transport.size, math.sqrt(squares), 1.0
        max_norm = s.clip * (1 / math.sqrt(P) if s.options.op == "sum" else math.sqrt(P))
        if max_norm < norm < math.inf:
            factor = max_norm / norm
        for name, t in self.pushed.items():
            if name in by_name[name].missing:
                with by_name[name].on_stream(t):
                    by_name[name].take(connection.specs[name], t, scale=factor)
        self._counters.accumulate += time.perf_counter() - start

    # -- calls --------------------------------------------------------------------------------------------------------

    def start_ready(self) -> None:
        """Start the calls of complete buckets, in the order of the buckets."""
        connection, buckets = self._connection, self._buckets
        if self._clips and len(self.pushed) == len(connection.specs) and len(self._calls) < len(buckets):
            self._add_clipped()
        while len(self._calls) < len(buckets) and not buckets[len(self._calls)].missing:
            position = len(self._calls)
            text = f"{position} {self.number} {self.label}"
            label = zlib.crc32(text.encode(), connection.buckets.label) or 1
            call = BucketCall(connection, buckets[position], self.density, label, self._counters)
            self._calls.append((connection.queue.submit(call), call))

    def settle(self, accept: Accept | None = None) -> tuple[BaseException | None, Step]:
        """Wait for the step's calls, with ``accept`` as in `Reducer.wait`.

        Returns:
            The exception to raise or ``None``, and the outcome, which is valid if `unsummed` is empty.
        """
        ended = [(error_of(handle), call) for handle, call in self._calls]
        failed_first = sorted(ended, key=lambda item: item[1].succeeded)  # a call may succeed and raise, too
        error = next((error for error, _ in failed_first if error is not None), None)
        summed = {name for _, call in self._calls if call.succeeded for name in call.names}
        names = tuple(name for name, spec in self._connection.specs.items() if spec.size)
        self.unsummed = tuple(name for name in names if name not in summed)
        finite, skips = all(call.finite for _, call in self._calls), self._settings.skip_nonfinite
        usable = finite or not skips
        if self.unsummed and skips:  # no call has committed yet, so the whole step fails
            self.unsummed = names
        left = {name: part for _, call in self._calls for name, part in call.left.items()}
        if usable and skips and accept is not None and not self.unsummed:
            usable = accept(left, max((call.largest for _, call in self._calls), default=0.0))
        for _, call in self._calls:
            call.settle(usable=usable and not self.unsummed)
        for bucket in self._buckets:
            with bucket.on_stream(None):
                if not usable and not self.unsummed:
                    assert self._connection.transport is not None
                    bucket.drop_overflows(self._connection.transport.size)
                if not finite and not skips:
                    bucket.drop_nonfinite()
        without = frozenset(name for _, call in self._calls for name in call.without_gradient)
        step = Step(self.number, self.density, usable, left, without, nonfinite=not finite and not skips)
        return error, step

    def abandon(self) -> None:
        """End the step, and add the gradients of calls that were not made to the residuals."""
        self.take_rest()
        if self._clips:
            self._add_clipped()
        self.settle()
        for bucket in self._buckets[len(self._calls) :]:
            with bucket.backend.on_stream(bucket.last_gradient):
                bucket.add_deferred()


class BucketCall(SumCall):
    """The call that sums a bucket.

    A rank without a gradient for a tensor contributes zeros and marks its messages as incomplete. All ranks see the
    mark when the algorithm returns. They then exchange which gradients are absent, in one more round trip.

    Attributes:
        names: names of the bucket's tensors.
        largest: the largest magnitude of the result, if it was computed.
        finite: whether the result is finite, the same on all ranks. Not computed, and True, for dense sums without
            ``skip_nonfinite``.
        left: results of tensors without an output, by name.
        without_gradient: names for which no rank has a gradient.
    """

    def __init__(self, connection: Connection, bucket: Bucket, density: float, label: int, counters: Counters) -> None:
        assert connection.transport is not None
        plan, within = bucket.plan(connection.transport, connection.queue, density), None
        with bucket.on_stream(bucket.last_gradient):
            contribution = bucket.contribution(plan)
            if bucket.device is not CPU:
                within = plan.backend.side_stream()  # after all work that the call must wait for
        skip = connection.settings.skip_nonfinite
        super().__init__(plan, contribution, label, within=within, commits=not skip, submitted=True)
        self.finite, self.largest = True, 0.0
        self.left: dict[str, SparseVector] = {}
        self.without_gradient: frozenset[str] = frozenset()
        self._absent = frozenset(bucket.absent())
        self.names = [spec.name for spec in bucket.tensors]
        self._bucket, self._counters, self._skip = bucket, counters, skip
        self._write_seconds = 0.0
        self._result: SparseVector | None = None  # until the call is settled

    def run(self) -> SparseVector:
        counters, moved, size = self._counters, self.transport.counters, self.transport.size
        before = moved.bytes_sent, moved.bytes_received, moved.messages_sent
        start = time.perf_counter()
        result = super().run()
        counters.exchange += time.perf_counter() - start - self._write_seconds
        counters.write += self._write_seconds
        counters.bytes_sent += moved.bytes_sent - before[0]
        counters.bytes_received += moved.bytes_received - before[1]
        counters.messages_sent += moved.messages_sent - before[2]
        counters.bytes_dense += 2 * (size - 1) * self._bucket.nbytes // size
        counters.calls += 1
        counters.elements += self._bucket.size
        return result

    def _begin(self) -> None:
        self.plan.comm.begin(self._label, incomplete=bool(self._absent))

    def _exchange(self) -> SparseVector:
        result = super()._exchange()
        if self.plan.comm.incomplete:
            self.without_gradient = self._gather_absent()
        return result

    def _gather_absent(self) -> frozenset[str]:
        """Return the names for which no rank has a gradient. Collective."""
        bits = [name in self._absent for name in self.names]
        words = [sum(bit << i for i, bit in enumerate(bits[start : start + 64])) for start in range(0, len(bits), 64)]
        common = [-1] * len(words)
        for theirs in gather_words(self.plan.comm, words, _ABSENCE):
            common = [a & b for a, b in zip(common, theirs, strict=True)]
        return frozenset(name for i, name in enumerate(self.names) if common[i // 64] >> i % 64 & 1)

    def settle(self, *, usable: bool) -> None:
        """With ``skip_nonfinite``, update the residual. ``usable``: the result is applied, on all ranks."""
        result, bucket, start = self._result, self._bucket, time.perf_counter()
        if result is None:
            return
        with bucket.on_stream(bucket.last_gradient):
            self.contribution.backend = bucket.backend  # another call may use the queue's backend now
            with bucket.backend.side_stream():
                super().settle(usable=usable)
                if usable:
                    self._mask(result)
                self._result = None
        self._counters.exchange += time.perf_counter() - start

    def _finish(self, result: SparseVector) -> None:
        super()._finish(result)
        start, bucket, backend = time.perf_counter(), self._bucket, self.contribution.backend
        if self._skip or self.plan.algorithm is not ALGORITHMS["dense"]:
            values = result.dense if isinstance(result, DenseSum) else result.values
            self.largest = backend.largest(backend.as_tensor(values, values.shape))
            self.finite = math.isfinite(self.largest)
        if self._skip:
            self._result = result
        else:
            self._mask(result)
        taken = self.contribution.num_taken
        self._counters.selected += bucket.size if taken is None else taken
        self._counters.applied += result.size if isinstance(result, DenseSum) else result.nnz
        self.left = bucket.write(backend, result, self.without_gradient)
        self._write_seconds = time.perf_counter() - start

    def _mask(self, result: SparseVector) -> None:
        if self.plan.algorithm is not ALGORITHMS["dense"]:  # after a dense sum momentum continues
            self._bucket.mask_velocity(self.contribution, result)


def error_of(handle: Handle) -> BaseException | None:
    """Wait for a call, and return its error, or ``None``. An interrupt of the wait is raised."""
    try:
        handle.wait()
    except BaseException as error:
        if error is not handle.error:
            raise
        return error
    return None
