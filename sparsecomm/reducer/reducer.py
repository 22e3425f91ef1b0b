"""The reducer, which a training loop calls."""

from __future__ import annotations

import difflib
import math
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from sparsecomm import transport
from sparsecomm.backends import Backends
from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.collective import WordsBroadcast
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import CallQueue, Handle, queue_of
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError
from sparsecomm.interrupts import persevere
from sparsecomm.reducer import state as states
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.buckets import Buckets
from sparsecomm.reducer.call import BucketCall
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.layout import NamedTensors, TensorSpec, check_layout, specs_of
from sparsecomm.reducer.momentum import MomentumCorrection
from sparsecomm.reducer.options import OnStep
from sparsecomm.reducer.rebuild import Member, Rebuilt, agree, position
from sparsecomm.reducer.schedule import Schedule, density_at
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.tuning import choice, profile

__all__ = ["Rebuilt", "Reducer", "Step"]

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


class Reducer:
    """Sums the gradients of a model over all ranks, sparsely, from step to step.

    In each step push every tensor's gradient, in any order, then wait: the sums stand where the gradients stood.
    Calls begin as soon as their tensors are there, in an order that is the same on all ranks, and go on beside the
    program (see `isparse_allreduce`).

        reducer = sc.Reducer(gradients, 0.001, momentum=0.9)      # names and arrays, for shapes and types
        for ...:
            for name, gradient in gradients.items():              # as they become ready
                reducer.push(name, gradient)
            reducer.wait()
            ...                                                   # apply the gradients

    What is not sent is kept: a residual for every name, in float32 (float64 for float64), so that summed over the
    ranks nothing is lost. A tensor that was not pushed counts as a gradient of zeros, and its residual takes part.

    Only ranks whose reducers have the same tensors in the same order, with the same settings, in the same step can
    talk to each other; others get `CollectiveMismatchError`. Several reducers may share a communicator, if all ranks
    use them in the same order.

    Args:
        tensors: names and tensors, or pairs of them: parameters or gradients. Only their shape, type and device are
            used. A shape of no elements is allowed.
        density: of what each rank selects: a float in (0, 1], or a function of the step's number, such as `Warmup`.
            1.0 is a dense sum.
        comm, algorithm, wire, complete: as in `sparse_allreduce`.
        op: "mean" or "sum".
        scope: of what a selection is made. "tensor": of each tensor, as in Deep Gradient Compression (Lin et al.,
            2018): each layer gets its share, and each costs a call. "model": of all, as in gTop-k (Shi et al., 2019)
            and MLR-Top-k: what is largest anywhere, in one call, which begins when the last gradient is there.
            "bucket": of buckets of neighbours, in between: calls are large and overlap with the backward pass.
        bucket_bytes: a bucket is full with so many; ``None``: so many that an element costs at most a quarter more
            than in a very large one, by the costs that ``sparsecomm tune`` measured. After the first step buckets are
            filled anew, in the order in which gradients became ready on rank 0.
        reorder: whether buckets are; otherwise in the reverse order of ``tensors``, always.
        dense_below: tensors of fewer elements are summed whole, all in one call at the end.
        momentum, nesterov, masking: momentum correction (Lin et al., Section 3.1): velocity accumulates, not the
            gradient; then the optimizer must have no momentum. ``masking``: a rank forgets the velocity of what it
            selects, and of what the result holds, unless gradients are summed whole.
        clip: norm to which a step's gradient is clipped before it accumulates (Section 3.2), as it would be with dense
            sums; each rank clips its own to its part, which is 1 / sqrt(P) of the whole. Calls then begin when the
            last gradient is there.
        decay: what is left of a residual from one step to the next: residual = decay * residual + gradient
            (SparseLoCo: Sarfi et al., 2025, Algorithm 1). Below 1 old entries are forgotten on purpose.
        skip_nonfinite: for loss scaling. Infinity or NaN on one rank makes the step unusable on all: at least one
            result is then not finite on every rank, so that all scalers see it; finite gradients wait in residuals,
            the others are dropped. Costs two more reads of the gradients.
        on_step: called by `wait` with the step's number and a dictionary of names and numbers, for loggers.

    Attributes:
        step: the number of the step that begins, or has begun.
        counters: what was done since the beginning.
        unsummed: names of tensors of which the last step made no sum, because it failed, or was left.
        label: a text that the ranks must have in common besides, of the steps that begin from now on.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        density: Schedule = 0.001,
        *,
        comm: transport.Comm = None,
        algorithm: str = "auto",
        op: str = "mean",
        wire: str = "auto",
        complete: bool = False,
        scope: str = "bucket",
        bucket_bytes: int | None = None,
        reorder: bool = True,
        dense_below: int = 1024,
        momentum: float = 0.0,
        nesterov: bool = False,
        masking: bool = True,
        clip: float | None = None,
        decay: float = 1.0,
        skip_nonfinite: bool = False,
        on_step: OnStep | None = None,
    ) -> None:
        self._specs = specs_of(tensors)
        self._density = density
        self._options = Options(algorithm, op, wire, bool(complete))
        for accumulator in {spec.accumulator.name for spec in self._specs.values()}:
            self._options.check(accumulator)
        check_layout(scope, dense_below)
        if bucket_bytes is not None and (not isinstance(bucket_bytes, int) or bucket_bytes < 1):
            raise InvalidInputError(f"bucket_bytes={bucket_bytes!r}: expected a number of bytes, or None")
        self._correction = MomentumCorrection(momentum, nesterov, masking, clip, decay)
        if decay < 1 and algorithm == "dense":
            raise InvalidInputError(f"decay={decay!r} with algorithm='dense', which leaves no residual; leave one out")
        self._density_now = density_at(density, 0)
        self._scope, self._bucket_bytes = scope, bucket_bytes
        self._skip, self._on_step = bool(skip_nonfinite), on_step
        self._comm = comm
        self._reorder = reorder and scope == "bucket"
        self._order: list[str] | None = None  # in which the first step's gradients became ready on rank 0
        self._lock = threading.RLock()  # frameworks push from threads of their own
        self._counted = Counters()  # at the end of the last step
        self._ranks: transport.Transport | None = None
        self._was: tuple[int, int] | None = None  # rank and size before a `rebuild` that has not ended
        self._queue: CallQueue
        self._backends = Backends()  # for all but calls; used under the lock
        self._buckets = Buckets(self._specs, scope, dense_below, self._correction, self._backends)
        self.counters = Counters()
        self.unsummed: tuple[str, ...] = ()
        self.label = ""
        self.step = 0
        self._begin()

    # -- a step -------------------------------------------------------------------------------------------------------

    def push(self, name: str, gradient: object, out: object = None) -> None:
        """Hand over a tensor's gradient of this step. It must not change until `wait` returns.

        Args:
            name: one of ``tensors``.
            gradient: of the tensor's shape, as `sparse_allreduce` takes it; ``None`` where this rank has none: zeros.
            out: where the sum goes; ``None``: into ``gradient``.

        Raises:
            InvalidInputError: it cannot be used, or was pushed in this step already. Nothing has changed.
        """
        with self._lock:
            spec = self._spec(name)
            self._plan()
            if name in self._pushed:
                raise InvalidInputError(
                    f"{self._who()}{name!r} was pushed in step {self.step} already; call wait() after the last tensor "
                    "of a step, or accumulate() for all but the last part of a gradient"
                )
            bucket = self._bucket(name)
            t = None if gradient is None else self._checked(gradient, spec)
            target = gradient if out is None else out
            if target is not None:
                bucket.outs[name] = self._out(target, t, spec)
            persevere(partial(self._take, spec, bucket, t))

    def _take(self, spec: TensorSpec, bucket: Bucket, t: interop.Tensor | None, interrupted: object = None) -> None:
        """Count a gradient as pushed; go on where this was interrupted."""
        self._pushed[spec.name] = t
        if self._correction.clip is None:
            self._add(spec, bucket, t)
        elif len(self._pushed) == len(self._specs):
            self._add_clipped()
        self._start_ready()

    def accumulate(self, name: str, gradient: object) -> None:
        """Add a part of a tensor's gradient of this step; push its last part. It may be changed afterwards.

        Raises:
            InvalidInputError: it cannot be used, or was pushed already; or gradients are clipped, for which the whole
                must be known: add the parts up yourself.
        """
        with self._lock:
            spec = self._spec(name)
            if self._correction.clip is not None:
                raise InvalidInputError("accumulate with clip: a part has no norm; add the parts up, and push the sum")
            if name in self._pushed:
                raise InvalidInputError(f"{self._who()}{name!r} was pushed in step {self.step} already")
            self._add(spec, self._bucket(name), self._checked(gradient, spec), last=False)

    def wait(self) -> Step:
        """Wait until the sums of all tensors are there, and end the step. What was not pushed counts as zeros.

        Raises:
            SparseCommError: a call failed, as `sparse_allreduce` raises it. Its gradients are in the residuals; sums
                of other calls have been written. The next step may be begun.
        """
        with self._lock:
            self._plan()
            self._connect()
            start = time.perf_counter()
            self._add_rest()
            self._start_ready()
            errors, usable = self._settle()
            self.counters.waited += time.perf_counter() - start
            left = {name: part for _, call in self._calls for name, part in call.left.items()}
            done, became_ready = Step(self.step, self._density_now, usable, left), list(self._ready)
            self.counters.skipped += not usable
            self._end()
            if errors:
                raise errors[0]
            if self._reorder and self._order is None:
                self._agree(became_ready)
            if self._on_step is not None:
                self._on_step(done.number, self.counters.since(self._counted))
                self._counted = self.counters.copy()
            return done

    def reduce(self, gradients: Mapping[str, object]) -> Step:
        """Push all these gradients, and wait: see `push` and `wait`, also for errors."""
        for name, gradient in gradients.items():
            self.push(name, gradient)
        return self.wait()

    # -- other ranks --------------------------------------------------------------------------------------------------

    def rebuild(self, comm: transport.Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with the ranks of another communicator, such as `shrink` or `grow` returned. Collective over them.

        This rank keeps its residuals and velocities, order, settings and counters. A step that has begun is left: what
        its calls have not summed yet goes to the residuals. All ranks then have the same next step, and the same
        buckets. Means are of the new number of ranks. If it fails, because one more rank died, shrink, and call it
        again.

        Args:
            comm: as of the constructor.
            joining: this rank is new: its residuals are zeros, and it takes the rest from the others. One rank at
                least must not be. Weights and the optimizer's state are yours to broadcast.

        Returns:
            Who was lost and who joined, and what is gone with the lost. It is logged, too, and counted.

        Raises:
            InvalidInputError: all ranks join, or ``comm`` cannot be used.
            CollectiveMismatchError, TransportError: the ranks' reducers differ, or a rank did not answer, or died.
        """
        with self._lock:
            self._abandon()
            if joining:
                self.step = 0
            if self._ranks is None:
                self._was = position(self._comm)
            elif self._was is None:
                self._was = self._ranks.rank, self._ranks.size
            self._comm = comm
            known = self._ranks is not None
            ranks = self._attach()
            if not known:
                self._rebuild(keep=False)
            numbers = {name: number for number, name in enumerate(self._specs)}
            order = () if joining or self._order is None else tuple(numbers[name] for name in self._order)
            rank, size = (-1, 0) if joining else self._was
            assert self._bucket_bytes is not None
            mine = Member(joining, self.step, rank, size, self._bucket_bytes, order)
            tensors = [(spec.name, spec.shape, spec.accumulator.name) for spec in self._specs.values()]
            elements = sum(spec.size for spec in self._specs.values())
            label = zlib.crc32(repr((self._number, tensors)).encode()) or 1
            found, rebuilt = agree(ranks, self._queue, mine, len(tensors), elements, label)
            names = list(self._specs)
            self._was = None
            self.step, self._bucket_bytes = found.step, found.bucket_bytes
            self._order = [names[number] for number in found.order] or None
            self._rebuild(keep=not joining)
            self.counters.ranks_lost += len(rebuilt.ranks_lost)
            self.counters.elements_lost += rebuilt.elements_lost
            return rebuilt

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> states.StateDict:
        """Return what this rank needs to go on as if it had not stopped: NumPy arrays, numbers, lists and texts.

        Every rank has its own. It records the number of ranks; `reshard` makes states for another one.

        Raises:
            InvalidInputError: in the middle of a step.
        """
        with self._lock:
            ranks = self._idle("state_dict")
            residuals, velocities = self._buckets.state()
            return {
                "format": states.FORMAT,
                "world_size": ranks.size,
                "rank": ranks.rank,
                "step": self.step,
                "order": self._order,
                "bucket_bytes": self._bucket_bytes,
                "residuals": residuals,
                "velocities": velocities,
            }

    def load_state_dict(self, state: states.State) -> None:
        """Go on from a state that `state_dict` returned on this rank of as many ranks, or that `reshard` made.

        Collective: all ranks load, or none. The states are of one step.

        Raises:
            InvalidInputError: it does not fit, or another rank's does not; the message says what differs. Nothing has
                changed on any rank.
            CollectiveMismatchError: another rank does not load, but goes on.
            TimeoutError, RankFailedError, TransportError: as `sparse_allreduce`.
        """
        with self._lock:
            ranks = self._idle("load_state_dict")
            refused = None
            try:
                self.check_state(state)
            except InvalidInputError as error:
                refused = error
            step = 0 if refused else int(state["step"])
            gather = WordsGather(ranks, [refused is None, step], zlib.crc32(f"state {self._number}".encode()) or 1)
            try:
                self._queue.call(gather)
            except CollectiveMismatchError as error:
                raise CollectiveMismatchError(f"load_state_dict: a rank does not load a state. {error}") from error
            if refused:
                raise refused
            states.check_agreement(ranks.rank, gather.words[::2], gather.words[1::2])
            order = None if state["order"] is None else list(state["order"])
            self.step = step
            self._order, self._bucket_bytes = order, state["bucket_bytes"]
            self._rebuild(keep=False)
            self._buckets.restore(state["residuals"], state["velocities"])

    def check_state(self, state: states.State) -> None:
        """Check that `load_state_dict` would take a state on this rank. Nothing is sent, and nothing changes.

        Raises:
            InvalidInputError: it would not.
        """
        with self._lock:
            ranks = self._connect()
            states.check(state, self._specs, ranks.rank, ranks.size, bool(self._correction.momentum))

    def residual(self, name: str) -> Array:
        """Return the residual of a tensor: a view of its shape, on its device, which changes with every step.

        Raises:
            InvalidInputError: there is no such tensor.
        """
        with self._lock:
            spec, bucket = self._spec(name), self._bucket(name)
            with bucket.on_stream(None):  # on which the view will be used
                part = bucket.state()[0][name] if spec.size else bucket.backend.zeros(0, spec.accumulator.accumulator)
            return part.reshape(spec.shape)

    def scale(self, factor: float) -> None:
        """Multiply residuals and velocities by a factor: gradients of the next steps are scaled by so much more.

        Raises:
            InvalidInputError: in the middle of a step, or ``factor`` is not above 0.
        """
        if not (isinstance(factor, (int, float)) and 0 < factor < math.inf):
            raise InvalidInputError(f"factor={factor!r}: expected a number above 0")
        with self._lock:
            self._idle("scale")
            for bucket in self._buckets:
                with bucket.on_stream(None):
                    bucket.scale(factor)

    def clear(self) -> None:
        """Set residuals and velocities to zero.

        Raises:
            InvalidInputError: in the middle of a step.
        """
        with self._lock:
            self._idle("clear")
            self._rebuild(keep=False)

    def report(self) -> str:
        """Return a small table of what has been done so far, per step."""
        return str(self.counters)

    @property
    def density(self) -> float:
        """The density of the step that begins, or has begun."""
        return density_at(self._density, self.step)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._specs)

    @property
    def groups(self) -> list[list[str]]:
        """The names in each bucket, in the order of calls."""
        self._connect()
        return [[spec.name for spec in bucket.tensors] for bucket in self._buckets]

    @property
    def pending(self) -> bool:
        """Whether a step has begun that `wait` has not ended."""
        return bool(self._pushed)

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._pushed: dict[str, interop.Tensor | None] = {}
        self._ready: dict[str, None] = {}  # names in the order in which their gradients came
        self._progress: dict[str, list[object]] = {}  # what has been done to add a gradient, by name
        self._calls: list[tuple[Handle, BucketCall]] = []
        self._clipped = False
        for bucket in self._buckets:
            bucket.begin()

    def _add_rest(self) -> None:
        """Add what has been pushed and not added yet, and zeros for what was not pushed."""
        for name, spec in self._specs.items():
            if name not in self._pushed:
                self._pushed[name] = None
            if self._correction.clip is None:
                self._add(spec, self._bucket(name), self._pushed[name])
        if self._correction.clip is not None and not self._clipped:
            self._add_clipped()

    def _settle(self) -> tuple[list[BaseException], bool]:
        """Wait for the step's calls; return the errors of those that failed, and whether the step is usable."""
        outcomes = [_outcome(handle) for handle, _ in self._calls]
        errors = [error for error in outcomes if error is not None]
        summed = {self._buckets[number] for number, error in enumerate(outcomes) if error is None}
        self.unsummed = tuple(name for name in self._specs if self._buckets.of(name) not in summed)
        usable = all(call.finite for _, call in self._calls)
        for _, call in self._calls:  # if another one failed, the sum of this one counts by itself
            call.settle(usable=call.finite if errors else usable)
        return errors, usable

    def _end(self) -> None:
        self.step += 1
        self.counters.steps += 1
        self._begin()

    def _abandon(self) -> None:
        """Leave the step, if one has begun, as if its calls that were not made had failed."""
        if not self._begun():
            return
        self._add_rest()
        self._settle()
        for number in range(len(self._calls), len(self._buckets)):
            self._buckets[number].keep_gradients()
        self._end()

    def _begun(self) -> bool:
        return bool(self._pushed) or any(bucket.started or bucket.nonfinite for bucket in self._buckets)

    def _plan(self) -> None:
        """Ask for the density of a step before it begins: if the schedule fails, nothing has changed."""
        if not self._pushed:
            self._density_now = self.density

    def _add(
        self, spec: TensorSpec, bucket: Bucket, t: interop.Tensor | None, *, scale: float = 1.0, last: bool = True
    ) -> None:
        """Add a gradient, or a part of it that is not the ``last``, to its bucket."""
        done = self._progress.setdefault(spec.name, []) if last else []
        if done[-1:] == [_COUNTED]:
            return
        start = time.perf_counter()
        with bucket.on_stream(t):
            if done:
                bucket.add(spec, t, scale, done)  # which was interrupted
            elif t is not None and self._skip and spec.size and not bucket.backend.finite(t):
                bucket.nonfinite = True
            elif t is not None and last and scale == 1.0 and not self._skip and bucket.can_defer(spec):
                bucket.defer(spec, t)
            elif spec.size:
                bucket.add(spec, t, scale, done)
        if t is not None:
            bucket.last = t
        if last:
            bucket.missing.discard(spec.name)
            if t is not None:
                self._ready[spec.name] = None
        done.append(_COUNTED)
        self.counters.accumulate += time.perf_counter() - start

    def _add_clipped(self) -> None:
        """Clip all gradients of this step, and add them."""
        self._clipped = True
        squares = 0.0
        for name, t in self._pushed.items():
            if t is not None:
                bucket = self._bucket(name)
                with bucket.on_stream(t):
                    squares += bucket.sum_of_squares(t)
        ranks = self._connect()
        factor = self._correction.clip_factor(squares, ranks.size, self._options.op) if math.isfinite(squares) else 1.0
        for name, t in self._pushed.items():
            self._add(self._specs[name], self._bucket(name), t, scale=factor)

    def _start_ready(self) -> None:
        """Start the calls of the buckets that are complete, in their order: none before those in front of it."""
        if self._calls:
            self._queue.enqueue(self._calls[-1][0])  # unless an interrupt came before it was
        while len(self._calls) < len(self._buckets) and not self._buckets[len(self._calls)].missing:
            number, ranks = len(self._calls), self._connect()
            bucket, density = self._buckets[number], self._density_now
            dense = bucket.dense or density == 1.0
            options = Options("dense", "sum") if dense else replace(self._options, op="sum")
            k = min(bucket.size, max(1, round(density * bucket.size)))
            label = zlib.crc32(f"{number} {self.step} {self.label}".encode(), self._label) or 1
            call = BucketCall(
                bucket,
                ranks,
                self._queue.backends.of(bucket.device),
                k,
                options,
                label,
                mean=self._options.op == "mean",
                skip=self._skip,
                counters=self.counters,
            )
            handle = Handle(self._queue, call)
            self._calls.append((handle, call))
            self._queue.enqueue(handle)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _who(self) -> str:
        return "" if self._ranks is None else f"rank {self._ranks.rank}: "

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            near = difflib.get_close_matches(str(name), self._specs, 1)
            raise InvalidInputError(
                f"{self._who()}{name!r} is no name of this Reducer's {len(self._specs)} tensors"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        return self._specs[name]

    def _checked(self, gradient: object, spec: TensorSpec) -> interop.Tensor:
        t = interop.tensor(gradient, spec.name)
        if not spec.fits(t):
            raise InvalidInputError(
                f"{self._who()}{spec.name}: got shape {t.shape}, {t.dtype} on {t.device}; expected shape {spec.shape} "
                f"with sums in {spec.accumulator} on {spec.device}, as when the Reducer was made; make a new one if "
                "the model has changed"
            )
        return t

    def _out(self, out: object, t: interop.Tensor | None, spec: TensorSpec) -> interop.Tensor:
        if t is not None:
            return interop.as_out(
                out, t, name="gradient, which is also out," if out is t.owner else f"out of {spec.name}"
            )
        o = interop.tensor(out, f"out of {spec.name}", writable=True)
        if not spec.fits(o):
            raise InvalidInputError(
                f"{self._who()}out of {spec.name}: got shape {o.shape}, {o.dtype} on {o.device}; expected shape "
                f"{spec.shape} with sums in {spec.accumulator} on {spec.device}"
            )
        return o

    def _idle(self, doing: str) -> transport.Transport:
        if self._begun():
            raise InvalidInputError(
                f"{self._who()}{doing} in the middle of step {self.step}: gradients were pushed, and wait() was not "
                "called; call it first"
            )
        return self._connect()

    # -- the ranks ----------------------------------------------------------------------------------------------------

    def _connect(self) -> transport.Transport:
        if self._ranks is None:
            self._attach()
            self._rebuild(keep=False)
            assert self._ranks is not None
        return self._ranks

    def _attach(self) -> transport.Transport:
        """Make calls on the transport of the communicator from now on."""
        ranks = transport.of(self._comm)
        self._queue = queue_of(ranks)
        self._number, self._queue.users = self._queue.users, self._queue.users + 1
        if self._bucket_bytes is None:
            costs = profile.used(ranks.library, ranks.size, ranks.num_nodes).costs
            usual = getattr(self._density, "density", 0.001 if callable(self._density) else self._density)
            self._bucket_bytes = choice.bucket_bytes(ranks.size, ranks.num_nodes, usual, costs)
        self._ranks = ranks
        return ranks

    def _bucket(self, name: str) -> Bucket:
        self._connect()
        return self._buckets.of(name)

    def _rebuild(self, *, keep: bool) -> None:
        """Distribute the tensors over buckets, in the order that is known; ``keep`` residuals and velocities."""
        assert self._bucket_bytes is not None
        self._buckets.rebuild(self._order, self._bucket_bytes, keep=keep)
        reordering = self._reorder and self._order is None  # a call more after the next step
        settings = (
            self._number,
            self._options.op,
            self._skip,
            self._scope,
            self._correction,
            self._reorder,
            reordering,
            self._buckets.describe(),
        )
        self._label = zlib.crc32(repr(settings).encode())

    def _agree(self, became_ready: list[str]) -> None:
        """Fill buckets in the order in which rank 0's gradients became ready; what had none comes last."""
        ranks = self._connect()
        names = list(self._specs)
        order = became_ready + [name for name in reversed(names) if name not in set(became_ready)]
        numbers = {name: number for number, name in enumerate(names)}
        words = WordsBroadcast(ranks, [numbers[name] for name in order], zlib.crc32(b"order", self._label) or 1)
        self._queue.submit(words).wait()
        self._order = [names[number] for number in words.words]
        self._rebuild(keep=True)


def _outcome(handle: Handle) -> BaseException | None:
    """Wait for a call, and return its error if it failed. An interrupt of the wait is raised."""
    try:
        handle.wait()
    except BaseException as error:
        if error is not handle.error:
            raise
        return error
    return None
