"""`OpenStep`: one step of a reducer. `Step`: its outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from sparsecomm.calls.label import Label
from sparsecomm.calls.queue import Handle, Task
from sparsecomm.errors import listed
from sparsecomm.reducer.bucket import GRADIENT, Addition, Bucket
from sparsecomm.reducer.bucket_call import BucketCall
from sparsecomm.reducer.connection import Connection
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.owned import OwnedCall
from sparsecomm.states.values import digest
from sparsecomm.states.weights import FirstStep
from sparsecomm.tensors.interop import Tensor, TensorSpec
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

# Returns whether a step is usable, given `Step.sums_without_out` and the largest magnitude in all sums.
Accept: TypeAlias = Callable[[Mapping[str, SparseVector], float], bool]


@dataclass(frozen=True)
class Step:
    """The outcome of a step.

    Attributes:
        number, density: the number of the step, from 0, and its density.
        usable: if False, apply nothing: a gradient was not finite on some rank (with ``skip_nonfinite``), or the step
            would make a sum, a parameter or the optimizer's state infinite.
        sums_without_out: sums that had no ``out``, by name. This rank had no gradient for these tensors, but another
            rank had one. If another rank's ``out`` has 16-bit elements, the sum is rounded to its dtype, so that
            ``to_dense()`` returns the numbers of that ``out``.
        without_gradient: names of tensors for which no rank had a gradient, the same on all ranks. Do not change
            their parameters or the optimizer's state.
        nonfinite: whether a sparse sum contains NaN or infinity (without ``skip_nonfinite``), the same on all ranks.
            Such entries of residuals and velocities were set to zero.
        cause: why the step is ``nonfinite`` or not ``usable``. The rank whose gradient is not finite names the tensor.
    """

    number: int
    density: float
    usable: bool = True
    sums_without_out: Mapping[str, SparseVector] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()
    nonfinite: bool = False
    cause: str = ""


def cause_of(rank: int, name: str | None) -> str:
    """Return `Step.cause` if ``name`` is the first tensor whose gradient is not finite on this rank, or ``None``."""
    where = "a gradient of another rank" if name is None else f"the gradient of {name} on this rank"
    return f"rank {rank}: {where} is not finite{', or a sum overflows' if name is None else ''}"


class OpenStep:
    """A step that has not ended, and the outcome of the previous step.

    A reducer begins the next step with a new object. All methods may be called again after an interrupt.
    """

    density: float  # set before the first push
    label: Label  # `Reducer.label`, set before the first push

    def __init__(
        self, connection: Connection, counters: Counters, number: int, before: Step | None, unsummed: tuple[str, ...]
    ) -> None:
        """Begin a step, whose first push must follow `Connection.connect`. It adds its time to ``counters``."""
        self.number = number
        self.before = before  # the outcome of the previous step; None if it failed or there was none
        self.unsummed_before = unsummed  # names of tensors that the previous step did not sum
        self._connection, self._counters = connection, counters
        self._specs, self._settings = connection.specs, connection.settings
        self._clips = self._settings.clip is not None
        self.pushed: dict[str, Tensor | None] = {}  # gradients by name; None for an absent gradient
        self.unsummed: tuple[str, ...] = ()  # after `settle`, names of tensors that this step did not sum
        self.preliminary: dict[str, tuple[Handle, Task]] = {}  # see `Reducer.preliminary_call`
        self.first_gradients: dict[str, int] | None = None  # checksums of gradients by name, in a first step
        self.buffers: dict[str, int] = {}  # checksums of the model's buffers by name, in a first step: see `FirstStep`
        self._first_step: tuple[Handle, FirstStep] | None = None
        self._calls: list[tuple[Handle, BucketCall]] = []
        for bucket in self._buckets:
            bucket.begin()

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return () if self._connection.transport is None else self._connection.buckets.all

    @property
    def _transport(self) -> Transport:
        assert self._connection.transport is not None
        return self._connection.transport

    # -- gradients ----------------------------------------------------------------------------------------------------

    def push(self, spec: TensorSpec, t: Tensor | None, out: Tensor | None = None, *, how: Addition = GRADIENT) -> None:
        """Accept a gradient, and the output for its sum: see `Bucket.push`. With clipping, `_add_clipped` adds it."""
        name, bucket, start = spec.name, self._connection.buckets.by_name[spec.name], time.perf_counter()
        if self.first_gradients is not None and t is not None:
            with bucket.on_stream(t):
                if 0 < bucket.backend.largest(t) < math.inf:
                    self.first_gradients[name] = digest([bucket.backend.memory_of(t)])
        if not self._clips:
            bucket.push(spec, t, how)
        elif t is not None:
            bucket.join(t)
        self.pushed[name] = t
        if out is not None:
            bucket.outs[name] = out
        self._counters.accumulate += time.perf_counter() - start

    def push_rest(self) -> None:
        """Record that this rank has no gradient for tensors that were not pushed."""
        for name, spec in self._specs.items():
            if name not in self.pushed:
                self.push(spec, None)

    def _add_clipped(self) -> None:
        """Clip and add all gradients of this step. After an interrupt, add the rest."""
        s, by_name, squares, start = self._settings, self._connection.buckets.by_name, 0.0, time.perf_counter()
        for bucket in self._buckets:
            gradients = [t for spec in bucket.tensors if (t := self.pushed.get(spec.name)) is not None]
            if gradients:
                with bucket.on_stream(bucket.last_gradient):
                    squares += sum(bucket.sums_of_squares(gradients))
        assert s.clip is not None
        P, norm, factor = self._transport.size, math.sqrt(squares), 1.0
        max_norm = s.clip * (1 / math.sqrt(P) if s.op == "sum" else math.sqrt(P))
        if max_norm < norm < math.inf:
            factor = max_norm / norm
        for name, t in self.pushed.items():
            if name in by_name[name].missing:
                by_name[name].push(self._specs[name], t, Addition(factor))
        self._counters.accumulate += time.perf_counter() - start

    # -- calls --------------------------------------------------------------------------------------------------------

    def start_ready(self) -> None:
        """Start the calls of complete buckets, in the order of the buckets."""
        buckets, queue, common = self._buckets, self._connection.queue, self._connection.buckets.label
        if self._clips and len(self.pushed) == len(self._specs) and len(self._calls) < len(buckets):
            self._add_clipped()
        while len(self._calls) < len(buckets) and not buckets[len(self._calls)].missing:
            position = len(self._calls)
            bucket = buckets[position]
            pairs = partial(_contents, position, bucket.tensors, self.number, self.label, common)
            label = Label((position, self.number, self.label.checksum, common.checksum), pairs)
            arguments = bucket, self._transport, queue, self.density, label, self._counters
            owner = self._connection.owner
            call = BucketCall(*arguments) if owner is None else OwnedCall(owner, *arguments)
            self._calls.append((queue.submit(call), call))
        if self.first_gradients is not None and self._first_step is None and len(self._calls) == len(buckets):
            comparison = FirstStep(self._transport, self.first_gradients, self.buffers)
            self._first_step = queue.submit(comparison), comparison

    def warn(self) -> None:
        """Warn of gradients and buffers, if this was a first step: see `FirstStep`."""
        if self._first_step is not None and error_of(self._first_step[0]) is None:
            self._first_step[1].warn()

    def settle(self, accept: Accept | None = None) -> tuple[BaseException | None, Step]:
        """Wait for the step's calls, with ``accept`` as in `Reducer.wait`.

        Return the exception to raise or ``None``, and the outcome, which is valid if `unsummed` is empty.
        """
        ended = [(error_of(handle), call) for handle, call in self._calls]
        failed_first = sorted(ended, key=lambda item: item[1].succeeded)  # a call may succeed and raise, too
        error = next((error for error, _ in failed_first if error is not None), None)
        summed = {name for _, call in self._calls if call.succeeded for name in call.names}
        names = tuple(name for name, spec in self._specs.items() if spec.size)
        self.unsummed = tuple(name for name in names if name not in summed)
        finite, skips = all(call.finite for _, call in self._calls), self._settings.skip_nonfinite
        usable = finite or not skips
        if self.unsummed and skips:  # no call has committed yet, so the whole step fails
            self.unsummed = names
        sums_without_out = {name: part for _, call in self._calls for name, part in call.sums_without_out.items()}
        if usable and skips and accept is not None and not self.unsummed:
            usable = accept(sums_without_out, max((call.largest for _, call in self._calls), default=0.0))
        usable = usable and all(call.usable for _, call in self._calls)
        for _, call in self._calls:
            call.settle(usable=usable and not self.unsummed)
        nonfinite = not finite and not skips
        for bucket in self._buckets:
            with bucket.on_stream(None):
                if not usable and not self.unsummed:
                    bucket.drop_large(4 * self._transport.size)  # the next sum may overflow: rounding doubles values
                if nonfinite:
                    bucket.drop_large(1)
        without = frozenset(name for _, call in self._calls for name in call.without_gradient)
        cause = ""
        if not finite:
            nonfinite_names = {name for _, call in self._calls for name in call.nonfinite_here}
            cause = cause_of(self._transport.rank, next((n for n in self._specs if n in nonfinite_names), None))
        elif not usable:
            cause = f"rank {self._transport.rank}: it would make a parameter or the optimizer's state infinite"
        return error, Step(self.number, self.density, usable, sums_without_out, without, nonfinite, cause)

    def abandon(self) -> None:
        """End the step. Gradients of calls that were not made are in the residuals."""
        self.push_rest()
        if self._clips:
            self._add_clipped()
        for bucket in self._buckets[len(self._calls) :]:
            with bucket.on_stream(bucket.last_gradient):
                bucket.add_pushed()
        self.settle()


def _contents(
    position: int, tensors: Sequence[TensorSpec], number: int, label: Label, common: Label
) -> list[tuple[str, object]]:
    """Return what the ranks must share in the call of a bucket."""
    call, *settings = common.pairs()
    names = listed([spec.name for spec in tensors])
    return [call, ("step", number), *label.pairs(), *settings, ("bucket", f"{position} ({names})")]


def error_of(handle: Handle) -> BaseException | None:
    """Wait for a call, and return its error, or ``None``. An interrupt of the wait is raised."""
    try:
        handle.wait()
    except BaseException as error:
        if error is not handle.error:
            raise
        return error
    return None
