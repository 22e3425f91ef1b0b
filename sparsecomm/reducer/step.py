"""A step of a reducer: gradients come in, calls begin as buckets are complete, sums come out."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import Handle
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.call import BucketCall
from sparsecomm.reducer.clipping import MedianNorm
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.group import Group
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.reducer.momentum import MEDIAN, MomentumCorrection
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.wire import MEAN_OF_CONTRIBUTORS

__all__ = ["OpenStep", "Step"]

_COUNTED = "counted"  # in what has been done to add a gradient: all


@dataclass(frozen=True)
class Step:
    """The outcome of a step.

    Attributes:
        number: of the step, from 0.
        density: the one that was asked for.
        usable: false if a gradient was not finite on some rank (with ``skip_nonfinite``): apply nothing.
        left: results of tensors that were not pushed here, for which there was no ``out``. Other ranks apply them.
    """

    number: int
    density: float
    usable: bool = True
    left: Mapping[str, SparseVector] = field(default_factory=dict)


class OpenStep:
    """A step that has not ended, and what became of the one before it: all that changes when a step ends.

    So one assignment ends a step and begins the next. After an interrupt every method may be called again, and goes on.

    Attributes:
        number: of the step.
        before: the outcome of the step before; ``None``: it failed, or there was none.
        unsummed_before: names of tensors of which the step before made no sum.
        density, label: of the step; set by `plan`.
        pushed: gradients by name; ``None`` where there is none.
        ready: names in the order in which their gradients came.
        unsummed: after `settle`: names of tensors of which the step made no sum.
    """

    density: float
    label: str

    def __init__(
        self,
        number: int,
        before: Step | None,
        unsummed_before: tuple[str, ...],
        group: Group,
        specs: Mapping[str, TensorSpec],
        options: Options,
        correction: MomentumCorrection,
        *,
        skip: bool,
        counters: Counters,
    ) -> None:
        """Begin a step.

        Args:
            number, before, unsummed_before: see above.
            group: who takes part.
            specs: of all tensors.
            options: of the calls.
            correction: of the gradients, before they accumulate.
            skip: as ``skip_nonfinite`` of `sparsecomm.Reducer`.
            counters: where time and traffic are added up.
        """
        self.number, self.before, self.unsummed_before = number, before, unsummed_before
        self._group, self._specs, self._options, self._correction = group, specs, options, correction
        self._skip, self._counters = skip, counters
        self.pushed: dict[str, Tensor | None] = {}
        self.ready: dict[str, None] = {}
        self.unsummed: tuple[str, ...] = ()
        self._progress: dict[str, list[object]] = {}  # what has been done to add a gradient, by name
        self._parts: dict[str, list[list[object]]] = {}  # the same of each part that `add_part` took
        self._calls: list[tuple[Handle, BucketCall]] = []
        self._clipped = False
        self._norm: MedianNorm | None = None  # of all ranks, if gradients are clipped to its median
        for bucket in group.buckets:
            bucket.begin()

    @property
    def begun(self) -> bool:
        """Whether anything has been pushed, or accumulated."""
        return bool(self.pushed) or any(bucket.started or bucket.nonfinite for bucket in self._group.buckets)

    @property
    def left(self) -> dict[str, SparseVector]:
        """Results of tensors that have no ``out``, by name, once the calls are done."""
        return {name: part for _, call in self._calls for name, part in call.left.items()}

    def parts(self, name: str) -> int:
        """Return how many parts of a tensor's gradient were taken; the last one, or the whole, counts as one."""
        return len(self._parts.get(name, ())) + (name in self.pushed)

    def plan(self, density: float, label: str) -> None:
        """Set the density, and what the ranks must have in common besides."""
        self.density, self.label = density, label

    def take(
        self, spec: TensorSpec, bucket: Bucket, t: Tensor | None, out: Tensor | None, interrupted: object = None
    ) -> None:
        """Count a gradient as pushed, whose sum goes to ``out``; go on where this was interrupted."""
        if out is not None:
            bucket.outs[spec.name] = out
        self.pushed[spec.name] = t
        if self._correction.clip is None:
            self.add(spec, bucket, t)
        elif len(self.pushed) == len(self._specs) and not self._clipped:
            self._add_clipped()
        self.start_ready()

    def add_part(
        self, spec: TensorSpec, bucket: Bucket, t: Tensor, done: list[object], interrupted: object = None
    ) -> None:
        """Add a part of a gradient that is not the last; ``done``: empty at first, for what was done of it."""
        parts = self._parts.setdefault(spec.name, [])
        if not any(part is done for part in parts):
            parts.append(done)
        self.add(spec, bucket, t, part=done)

    def add(
        self,
        spec: TensorSpec,
        bucket: Bucket,
        t: Tensor | None,
        *,
        scale: float = 1.0,
        part: list[object] | None = None,
        norm: MedianNorm | None = None,
    ) -> None:
        """Add a gradient to its bucket; with a ``norm`` the call does it.

        ``part``: it is a part that is not the last, of which so much was done.
        """
        last = part is None
        done = self._progress.setdefault(spec.name, []) if part is None else part
        if done[-1:] == [_COUNTED]:
            return
        start = time.perf_counter()
        with bucket.on_stream(t):
            if not spec.size:
                pass
            elif done:
                bucket.add(spec, t, scale, done)  # which was interrupted
            elif t is not None and self._skip and not bucket.backend.finite(t):
                bucket.nonfinite = True
            elif norm is not None:
                bucket.postpone(spec, t, norm)
            elif t is not None and last and scale == 1.0 and not self._skip and bucket.can_defer(spec):
                bucket.defer(spec, t)
            else:
                bucket.add(spec, t, scale, done)
        if t is not None:
            bucket.last = t
        if last:
            bucket.missing.discard(spec.name)
            if t is not None:
                self.ready[spec.name] = None
        done.append(_COUNTED)
        self._counters.accumulate += time.perf_counter() - start

    def add_rest(self, *, leaving: bool = False) -> None:
        """Add what has been pushed and not added yet, and zeros for what was not pushed.

        ``leaving``: other ranks may not do so.
        """
        for name, spec in self._specs.items():
            if name not in self.pushed:
                self.pushed[name] = None
            if self._correction.clip is None:
                self.add(spec, self._group.bucket(name), self.pushed[name])
        if self._correction.clip is not None and not self._clipped:
            self._add_clipped(leaving=leaving)

    def start_ready(self) -> None:
        """Start the calls of the buckets that are complete, in their order: none before those in front of it."""
        group, buckets = self._group, self._group.buckets
        if self._calls:
            group.queue.enqueue(self._calls[-1][0])  # unless an interrupt came before it was
        while len(self._calls) < len(buckets) and not buckets[len(self._calls)].missing:
            place, ranks = len(self._calls), group.connect()
            bucket = buckets[place]
            dense = bucket.dense or self.density == 1.0
            op = self._options.op
            by_contributors = op == MEAN_OF_CONTRIBUTORS and not dense  # else all ranks contribute
            summing = Options("dense") if dense else replace(self._options, op=op if by_contributors else "sum")
            k, chunks = bucket.selection(self.density)
            label = zlib.crc32(f"{place} {self.number} {self.label!r}".encode(), group.label) or 1
            call = BucketCall(
                bucket,
                ranks,
                group.queue.backends.of(bucket.device),
                k,
                summing,
                label,
                chunks=None if dense else chunks,
                mean=op != "sum" and not by_contributors,
                skip=self._skip,
                counters=self._counters,
            )
            handle = Handle(group.queue, call)
            self._calls.append((handle, call))
            group.queue.enqueue(handle)

    def settle(self) -> tuple[list[BaseException], list[BaseException], bool]:
        """Wait for the step's calls.

        Returns:
            The errors of those that failed, the interrupts of those that count all the same, and whether the step is
            usable.
        """
        buckets = self._group.buckets
        before = None if self._norm is None else _outcome(self._norm.handle)
        outcomes = [_outcome(handle) for handle, _ in self._calls]
        counting = [error is None or call.counts for error, (_, call) in zip(outcomes, self._calls, strict=True)]
        summed = {buckets[place] for place, counts in enumerate(counting) if counts}
        interrupts = [error for error, counts in zip(outcomes, counting, strict=True) if error is not None and counts]
        errors = [error for error in (before, *outcomes) if error is not None and error not in interrupts]
        self.unsummed = tuple(name for name in self._specs if buckets.of(name) not in summed)
        usable = all(call.finite for _, call in self._calls)
        for _, call in self._calls:  # if another one failed, the sum of this one counts by itself
            call.settle(usable=call.finite if errors else usable)
        return errors, interrupts, usable

    def abandon(self) -> None:
        """Leave the step as if its calls that were not made had failed."""
        self.add_rest(leaving=True)
        self.settle()
        for place in range(len(self._calls), len(self._group.buckets)):
            self._group.buckets[place].keep_gradients()

    def _add_clipped(self, *, leaving: bool = False) -> None:
        """Clip all gradients of this step, and add them; to the median of the norms the calls do, if all are made."""
        group, ranks = self._group, self._group.connect()
        factor = 1.0
        if self._correction.clip != MEDIAN:
            factor = self._correction.clip_factor(self._sum_of_squares(), ranks.size, self._options.op)
        elif ranks.size > 1 and not leaving:
            if self._norm is None:
                label = zlib.crc32(f"norms {self.number}".encode(), group.label) or 1
                self._norm = MedianNorm(ranks, group.queue, math.sqrt(self._sum_of_squares()), label)
            group.queue.enqueue(self._norm.handle)
        for name, t in self.pushed.items():
            self.add(self._specs[name], group.bucket(name), t, scale=factor, norm=self._norm)
        self._clipped = True

    def _sum_of_squares(self) -> float:
        """Return the sum of the squares of all gradients that were pushed."""
        squares = 0.0
        for name, t in self.pushed.items():
            if t is not None:
                bucket = self._group.bucket(name)
                with bucket.on_stream(t):
                    squares += bucket.sum_of_squares(t)
        return squares


def _outcome(handle: Handle) -> BaseException | None:
    """Wait for a call, and return its error if it failed. An interrupt of the wait is raised."""
    try:
        handle.wait()
    except BaseException as error:
        if error is not handle.error:
            raise
        return error
    return None
