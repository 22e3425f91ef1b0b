"""A step of a reducer: gradients come in, calls begin as buckets are complete, sums come out."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.calls.call import SumCall
from sparsecomm.calls.queue import Handle, Task
from sparsecomm.primitives.gather import gather_words
from sparsecomm.reducer.bucket import Add, Bucket, TensorSpec
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.group import Group
from sparsecomm.tensors.interop import CPU, Tensor
from sparsecomm.tensors.sparse import DenseSum, SparseVector

__all__ = ["Accept", "OpenStep", "Step", "error_of"]

# Whether a step counts, by its sums by name and the largest magnitude in them.
Accept: TypeAlias = Callable[[Mapping[str, SparseVector], float], bool]

_ABSENCE = 1 << 19  # the round in which ranks tell each other what they lack: algorithms have used none so high


@dataclass(frozen=True)
class Step:
    """The outcome of a step.

    Attributes:
        number: of the step, from 0.
        density: the one that was asked for.
        usable: false if a gradient was not finite on some rank (with ``skip_nonfinite``), or the step would make a sum,
            a parameter or the optimizer's state infinite: apply nothing.
        left: results of tensors for which this rank had no gradient and gave no ``out``, and another rank had one: the
            other ranks apply them.
        without_gradient: names of tensors for which no rank had a gradient, the same on all ranks. Nothing of them was
            exchanged: leave their parameters, and the optimizer's state, as they are.
        nonfinite: a sum of few entries has a NaN or an infinity (without ``skip_nonfinite``), the same on all ranks.
            NaN and infinities that were left in residuals and velocities are zeros now: they do not come back.
    """

    number: int
    density: float
    usable: bool = True
    left: Mapping[str, SparseVector] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()
    nonfinite: bool = False


class OpenStep:
    """A step that has not ended, and what became of the one before it: all that changes when a step ends.

    So one assignment ends a step and begins the next. Where an exception has interrupted a method, call it again.

    Attributes:
        number: of the step.
        before: the outcome of the step before; ``None``: it failed, or there was none.
        unsummed_before: names of tensors of which the step before made no sum.
        density, label: of the step, and what the ranks must have in common besides: set before anything is pushed.
        pushed: gradients by name; ``None`` where there is none.
        parts: by name, how many parts of a gradient have come that were not the last.
        ready: names in the order in which their gradients came.
        unsummed: after `settle`: names of tensors of which the step made no sum.
    """

    density: float
    label: str

    def __init__(
        self, group: Group, counters: Counters, number: int, before: Step | None, unsummed_before: tuple[str, ...]
    ) -> None:
        """Begin a step of a group; ``counters``: where time and traffic are added up."""
        self.number, self.before, self.unsummed_before = number, before, unsummed_before
        self._group, self._settings, self._counters = group, group.settings, counters
        self._clips = group.settings.correction.clip is not None
        self.pushed: dict[str, Tensor | None] = {}
        self.parts: dict[str, int] = {}
        self.ready: list[str] = []
        self.unsummed: tuple[str, ...] = ()
        self._calls: list[tuple[Handle, _BucketCall]] = []
        self._opening: dict[str, tuple[Handle, Task]] = {}
        if group.transport is not None:
            for bucket in group.now.buckets:
                bucket.begin()

    @property
    def begun(self) -> bool:
        """Whether anything has been pushed, or accumulated."""
        return bool(self.pushed or self.parts)

    # -- before the first gradient ------------------------------------------------------------------------------------

    def opening_call(self, name: str, make: Callable[[], Task]) -> tuple[Task, SparseVector]:
        """Make a call once: see `Reducer.opening_call`."""
        made = self._opening.get(name)
        if made is None:
            task = make()
            made = self._opening[name] = self._group.queue.submit(task), task
        handle, task = made
        try:
            return task, handle.wait()
        except BaseException:
            if handle.error is not None:
                self._opening.clear()
            raise

    def end_opening(self) -> None:
        """Forget the opening calls."""
        self._opening.clear()

    # -- gradients in -------------------------------------------------------------------------------------------------

    def take(
        self,
        spec: TensorSpec,
        t: Tensor | None,
        out: Tensor | None = None,
        *,
        add: Add | None = None,
        last: bool = True,
    ) -> None:
        """Take a gradient, whose sum goes to ``out``, or a part of it.

        With clipping it is added when the norm of all is known. With ``add``, without clipping and momentum, that adds
        what it makes of ``t``.
        """
        name, bucket, start = spec.name, self._group.now.by_name[spec.name], time.perf_counter()
        with bucket.on_stream(t):
            if not self._clips:
                bucket.take(spec, t, add=add, last=last)
            if last:
                self.pushed[name] = t
                if out is not None:
                    bucket.outs[name] = out
                if t is not None:
                    self.ready.append(name)
            else:
                self.parts[name] = self.parts.get(name, 0) + 1
        self._counters.accumulate += time.perf_counter() - start

    def take_rest(self) -> None:
        """Note that this rank has no gradient for what was not pushed."""
        for name, spec in self._group.specs.items():
            if name not in self.pushed:
                self.take(spec, None)

    def _add_clipped(self) -> None:
        """Clip all gradients of this step, and add those that have not been added."""
        group, s, start = self._group, self._settings, time.perf_counter()
        squares = 0.0
        for name, t in self.pushed.items():
            if t is not None and t.size:
                bucket = group.now.by_name[name]
                with bucket.on_stream(t):
                    squares += bucket.sum_of_squares(t)
        assert group.transport is not None
        factor = s.correction.clip_factor(squares, group.transport.size, s.options.op)
        for name, t in self.pushed.items():
            bucket = group.now.by_name[name]
            if name in bucket.missing:
                with bucket.on_stream(t):
                    bucket.take(group.specs[name], t, scale=factor)
        self._counters.accumulate += time.perf_counter() - start

    # -- calls --------------------------------------------------------------------------------------------------------

    def start_ready(self) -> None:
        """Start the calls of the buckets that are complete, in their order: none before those in front of it.

        An interrupt may come before a call, for plans are made in bytecode. Then this is to be called again.
        """
        group, buckets = self._group, self._group.now.buckets
        if self._clips and len(self.pushed) == len(self._group.specs) and len(self._calls) < len(buckets):
            self._add_clipped()
        while len(self._calls) < len(buckets) and not buckets[len(self._calls)].missing:
            place = len(self._calls)
            text = f"{place} {self.number} {self.label}"
            label = zlib.crc32(text.encode(), group.now.label) or 1
            call = _BucketCall(group, buckets[place], self.density, label, self._counters)
            self._calls.append((group.queue.submit(call), call))

    def settle(self, accept: Accept | None = None) -> tuple[BaseException | None, Step]:
        """Wait for the step's calls. An interrupt of the wait is raised: call it again.

        Args:
            accept: as of `Reducer.wait`.

        Returns:
            What to raise, if anything, and the outcome, which counts if nothing is `unsummed`.
        """
        outcomes = [(error_of(handle), call) for handle, call in self._calls]
        errors = sorted((error for error in outcomes if error[0] is not None), key=lambda error: error[1].succeeded)
        summed = {name for _, call in self._calls if call.succeeded for name in call.names}
        self.unsummed = tuple(name for name, spec in self._group.specs.items() if spec.size and name not in summed)
        finite, skips = all(call.finite for _, call in self._calls), self._settings.skip_nonfinite
        usable = finite or not skips
        if self.unsummed and skips:  # no call has changed a residual yet, so none counts
            self.unsummed = tuple(name for name, spec in self._group.specs.items() if spec.size)
        left = {name: part for _, call in self._calls for name, part in call.left.items()}
        if usable and skips and accept is not None and not self.unsummed:
            usable = accept(left, max((call.largest for _, call in self._calls), default=0.0))
        for _, call in self._calls:
            call.settle(usable=usable and not self.unsummed)
        if not usable and not self.unsummed:
            assert self._group.transport is not None
            for bucket in self._group.now.buckets:
                with bucket.on_stream(None):
                    bucket.drop_overflows(self._group.transport.size)
        if not finite and not skips:
            for bucket in self._group.now.buckets:
                with bucket.on_stream(None):
                    bucket.drop_nonfinite()
        without = frozenset(name for _, call in self._calls for name in call.without_gradient)
        step = Step(self.number, self.density, usable, left, without, nonfinite=not finite and not skips)
        return errors[0][0] if errors else None, step

    def abandon(self) -> None:
        """Leave the step as if its calls that were not made had failed."""
        self.take_rest()
        if self._clips:
            self._add_clipped()
        self.settle()
        for bucket in self._group.now.buckets[len(self._calls) :]:
            bucket.keep_gradients()


class _BucketCall(SumCall):
    """The sum of a bucket over all ranks, as the call queue makes it.

    Attributes:
        names: of the bucket's tensors.
        largest: the largest magnitude of the result, where it is looked at.
        finite: whether the result is finite; the same on all ranks, since the result is. Of a whole sum that is not
            looked at unless such steps are skipped, since nothing of it stays in the residual. If they are skipped, the
            call leaves the gradient as it is, for `settle`.
        left: results of tensors that have no ``out``, by name.
        without_gradient: names for which no rank has a gradient.

    A rank that has no gradient for a tensor contributes zeros to it, and marks its messages as incomplete. Then all
    ranks know, when the algorithm has returned, that one of them lacks something, and tell each other what: one trip
    more.
    """

    def __init__(self, group: Group, bucket: Bucket, density: float, label: int, counters: Counters) -> None:
        """Prepare the call of a bucket whose gradients of this step are complete; the rest is as in `OpenStep`."""
        assert group.transport is not None
        plan, within = bucket.plan(group.transport, group.queue, density), None
        with bucket.on_stream(bucket.last):
            contribution = bucket.contribution(plan)
            if bucket.device is not CPU:
                within = plan.backend.side_stream()  # after all work that the call must wait for
        skip = group.settings.skip_nonfinite
        super().__init__(plan, contribution, label, within=within, deferred=skip, keeps=True)
        self.finite, self.largest = True, 0.0
        self.left: dict[str, SparseVector] = {}
        self.without_gradient: frozenset[str] = frozenset()
        self._absent = frozenset(bucket.absent())
        self.names = [spec.name for spec in bucket.tensors]
        self._bucket, self._counters, self._skip = bucket, counters, skip
        self._writing = 0.0
        self._result: SparseVector | None = None  # until the call is settled

    def run(self) -> SparseVector:
        counters, moved, size = self._counters, self.transport.counters, self.transport.size
        before = moved.bytes_sent, moved.bytes_received, moved.messages_sent
        start = time.perf_counter()
        result = super().run()
        counters.exchange += time.perf_counter() - start - self._writing
        counters.write += self._writing
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
            self.without_gradient = self._absent_everywhere()
        return result

    def _absent_everywhere(self) -> frozenset[str]:
        """Return the names for which no rank has a gradient. All ranks call it."""
        bits = [name in self._absent for name in self.names]
        words = [
            sum(bit << place for place, bit in enumerate(bits[begin : begin + 64])) for begin in range(0, len(bits), 64)
        ]
        common = [-1] * len(words)
        for theirs in gather_words(self.plan.comm, words, _ABSENCE):
            common = [a & b for a, b in zip(common, theirs, strict=True)]
        return frozenset(name for i, name in enumerate(self.names) if common[i // 64] >> i % 64 & 1)

    def settle(self, *, usable: bool) -> None:
        """End a call that leaves its gradient for this, and went well; otherwise there is nothing to do.

        The program calls it when it has waited for the call.

        Args:
            usable: the result is applied, on all ranks.
        """
        result, bucket, start = self._result, self._bucket, time.perf_counter()
        if result is None:
            return
        with bucket.on_stream(bucket.last):
            self.contribution.backend = bucket.backend  # the queue may make other calls by now
            with bucket.backend.side_stream():
                super().settle(usable=usable)
                if usable:
                    self._mask(result)
                self._result = None
        self._counters.exchange += time.perf_counter() - start

    def _finish(self, result: SparseVector) -> None:  # a bound method as ``write`` would be a reference to itself
        super()._finish(result)
        self._write_sums(result)

    def _write_sums(self, result: SparseVector) -> None:
        """Write the result to where the tensors' sums go."""
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
        self._writing = time.perf_counter() - start

    def _mask(self, result: SparseVector) -> None:
        if self.plan.algorithm is not ALGORITHMS["dense"]:  # of which nothing waits, and momentum goes on
            self._bucket.mask_velocity(self.contribution, result)


def error_of(handle: Handle) -> BaseException | None:
    """Wait for a call, and return its error if it failed. An interrupt of the wait is raised."""
    try:
        handle.wait()
    except BaseException as error:
        if error is not handle.error:
            raise
        return error
    return None
