"""The reducer, which a training loop calls."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from sparsecomm import transport
from sparsecomm.algorithms import Algorithm, AlgorithmName
from sparsecomm.backends import Backend
from sparsecomm.calls.arguments import chunk_of
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import Task
from sparsecomm.checks import quote, to_bool, to_float, to_int
from sparsecomm.errors import InvalidInputError, WeightMismatchError, did_you_mean, listed
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.group import Group
from sparsecomm.reducer.layout import NamedTensors, check_layout, specs_of
from sparsecomm.reducer.momentum import Clip, MomentumCorrection
from sparsecomm.reducer.options import DENSITY, FILLED, OnStep, Scope, Settings
from sparsecomm.reducer.rebuild import Rebuilt
from sparsecomm.reducer.report import choice_lines, peer_lines
from sparsecomm.reducer.schedule import Schedule, density_at, with_dense_steps
from sparsecomm.reducer.state import REDUCER, costs_dict, fit, measured_costs
from sparsecomm.reducer.step import Accept, OpenStep, Step, error_of
from sparsecomm.states.loading import Prepared, Undo, load
from sparsecomm.states.schema import Schema, State, StateDict
from sparsecomm.states.weights import WeightComparison, compare_weights
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.wire import Op, WireName

__all__ = ["Reducer"]

_log = logging.getLogger("sparsecomm")


class Reducer:
    """Sums the gradients of a model over all ranks, sparsely, from step to step.

    In each step push every tensor's gradient, in any order, then wait: the sums stand where the gradients stood.
    Calls begin as soon as their tensors are there, in an order that is the same on all ranks, and go on beside the
    program (see `isparse_allreduce`).

        reducer = sc.Reducer(gradients)                           # names and arrays, for shapes and types
        for ...:
            for name, gradient in gradients.items():              # as they become ready
                reducer.push(name, gradient)
            reducer.wait()
            ...                                                   # apply the gradients

    The defaults of ``density``, ``algorithm`` and ``wire`` are the recommended setting for SGD, and train as well as
    dense gradients in our reports (docs/choosing.md). For a dense baseline, pass ``density=1.0``.

    What is not sent is kept: a residual for every name, in float32 (float64 for float64), so that summed over the
    ranks nothing is lost.

    A tensor for which no rank has a gradient in a step does not take part in it: its residual and velocity stay as they
    are, and its name is in `Step.without_gradient`. If only some ranks have one, it counts as zeros on the others, and
    what waits in their residuals stays there: a rank contributes to a tensor only in steps in which it has a gradient
    for it. Nothing more is sent for this, except in a step in which some rank lacks a gradient: each call in which it
    does takes one trip more.

    Only ranks whose reducers have the same tensors in the same order, with the same settings, in the same step can
    talk to each other; others get `CollectiveMismatchError`. Several reducers may share a communicator, if all ranks
    use them in the same order.

    Args:
        tensors: names and tensors, or pairs of them: parameters or gradients. Only their shape, type and device are
            used. A shape of no elements is allowed.
        density: share of the entries that each rank selects: a float in (0, 1], or a function from the step's number
            to it, such as `Warmup`. At 1.0 gradients are summed whole, with exact values, whatever ``algorithm`` and
            ``wire`` are, and residuals are flushed. An int is refused: it could be taken for a number of entries, as
            ``k`` is one.
        dense_steps: number of steps at the beginning at density 1.0. A schedule counts its steps from there.
        comm: as in `sparse_allreduce`.
        algorithm: as in `sparse_allreduce`, but "auto" is "double", which trains best at equal bytes. Where that is
            not supported (``op="mean_of_contributors"``, ``scope="chunk"``), "auto" is "fastest".
        wire: as in `sparse_allreduce`, but "auto" with "auto" as algorithm is "packed_int2", values of 2 bits, or
            exact values for float64 sums and where "auto" is "fastest".
        op: "mean", "sum" or "mean_of_contributors", as in `sparse_allreduce`. What is summed whole is divided by the
            number of ranks.
        scope: of what a selection is made. "tensor": of each tensor, as in Deep Gradient Compression (Lin et al.,
            2018): each layer gets its share, and each costs a call. "model": of all, as in gTop-k (Shi et al., 2019)
            and MLR-Top-k: what is largest anywhere, in one call, which begins when the last gradient is there.
            "bucket": of buckets of neighbours, in between: calls are large and overlap with the backward pass.
            "chunk": of every ``chunk`` elements of each tensor, as in SparseLoCo (Sarfi et al., 2025); calls are of
            buckets as for "bucket". The cheapest selection, and the shortest indices; each part of a tensor gets its
            share. Global top-k algorithms keep the largest sums of a bucket.
        chunk: elements of a chunk, for ``scope="chunk"``; the last of a tensor may be shorter. Of each, ``density *
            chunk`` entries are selected, at least one.
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
            the others are dropped. The same holds if a residual or a sum of finite gradients overflows; entries of
            residuals that are so large that they could overflow again are dropped. Costs two more reads of the
            gradients.
        on_step: called by `wait` with the step's number and a dictionary of names and numbers, for loggers.

    Attributes:
        counters: what was done since the beginning.
        label: a text that the ranks must have in common besides, of the steps that begin from now on.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        density: Schedule = DENSITY,
        *,
        comm: transport.Comm = None,
        algorithm: AlgorithmName | Algorithm = "auto",
        op: Op = "mean",
        wire: WireName = "auto",
        dense_steps: int = 0,
        scope: Scope = "bucket",
        chunk: int = 4096,
        bucket_bytes: int | None = None,
        reorder: bool = True,
        dense_below: int = 1024,
        momentum: float = 0.0,
        nesterov: bool = False,
        masking: bool = True,
        clip: Clip = None,
        decay: float = 1.0,
        skip_nonfinite: bool = False,
        on_step: OnStep | None = None,
    ) -> None:
        self._specs = specs = specs_of(tensors)
        options = Options.of(algorithm, op, wire)
        dense_below, reorder = check_layout(scope, dense_below), to_bool("reorder", reorder)
        for accumulator in {spec.accumulator.name for spec in specs.values()}:
            options.check(accumulator, by_chunk=scope == "chunk")
        chunk = chunk_of(chunk)
        max_bytes = to_int(bucket_bytes, 1)
        if max_bytes is None and bucket_bytes is not None:
            raise InvalidInputError(f"bucket_bytes={quote(bucket_bytes)}: expected a number of bytes, or None")
        if on_step is not None and not callable(on_step):
            raise InvalidInputError(
                f"on_step={quote(on_step)}: expected a function of a number and a dictionary, or None"
            )
        correction = MomentumCorrection(momentum, nesterov, masking, clip, decay)
        if correction.decay < 1 and options.algorithm == "dense":
            raise InvalidInputError(
                f"decay={quote(decay)} with algorithm='dense', which leaves no residual; leave one out"
            )
        density = with_dense_steps(density, dense_steps)
        first = density_at(density, 0)
        self._settings = Settings(
            density if callable(density) else first,
            options,
            correction,
            scope,
            chunk if scope == "chunk" else None,
            dense_below,
            max_bytes,
            reorder and scope in FILLED,
            to_bool("skip_nonfinite", skip_nonfinite),
        )
        self._on_step = on_step
        self._lock = threading.RLock()  # frameworks push from threads of their own
        self._group = Group(comm, specs, self._settings)
        self.counters = Counters()
        self._traffic: transport.TrafficCounters | None = None  # of which `_setup` bytes are in `counters`
        self._setup = 0, 0
        self._logged = Counters()  # at the end of the step that `on_step` was told last
        self.label = ""
        self._open = self._begin(0)

    # -- a step -------------------------------------------------------------------------------------------------------

    def push(self, name: str, gradient: object, out: object = None) -> None:
        """Hand over a tensor's gradient of this step. It must not change until `wait` returns.

        Args:
            name: one of ``tensors``.
            gradient: of the tensor's shape, as `sparse_allreduce` takes it; ``None``: this rank has none. So it is with
                tensors that are not pushed at all.
            out: where the sum goes; ``None``: into ``gradient``. If no rank has a gradient, it is not written.

        Raises:
            InvalidInputError: it cannot be used, or was pushed in this step already. Nothing has changed.
        """
        with self._lock:
            spec = self._begin_push(name)
            t = None if gradient is None else spec.tensor(gradient, f"{self._who()}{name}")
            into, called = out, f"out of {name}"
            if t is not None and (out is None or out is gradient):
                into, called = gradient, "gradient, which is also out,"
            if t is not None:
                into = interop.as_out(into, t, name=called)
            elif into is not None:
                into = spec.tensor(into, f"{self._who()}{called}", writable=True)
            self._open.take(spec, t, into)
            self._open.start_ready()

    def push_difference(self, name: str, minuend: Array, subtrahend: object | None) -> None:
        """Push minuend - subtrahend, which is added to the residual at once: both may be changed afterwards.

        The sum is in `Step.left`. For `sparsecomm.LocalSteps`: it spares memory, and a look at it, for the difference.

        Args:
            name: one of ``tensors``.
            minuend: a flat array in the accumulator's type, on the tensor's device.
            subtrahend: of the tensor's shape; ``None``: this rank has no gradient.

        Raises:
            InvalidInputError: as `push`.
        """
        with self._lock:
            spec, group, correction = self._begin_push(name), self._group, self._settings.correction
            t, add = None if subtrahend is None else spec.tensor(subtrahend, f"{self._who()}{name}"), None
            if t is None:
                pass
            elif correction.clip is None and not correction.momentum:
                taken = t

                def add(backend: Backend, residual: interop.Tensor, decay: float, if_finite: bool) -> bool:
                    return backend.add_difference(minuend, taken, residual, decay, if_finite)

            else:
                bucket = group.now.by_name[name]
                with bucket.on_stream(t):
                    t = bucket.backend.as_tensor(minuend - bucket.backend.accumulate(t, None), spec.shape)
            self._open.take(spec, t, add=add)
            self._open.start_ready()

    def push_quotient(self, name: str, gradient: object, squares: Array, eps: float, scale: float = 1.0) -> None:
        """Push scale * gradient / (sqrt(squares) + eps), which is added to the residual at once: see `push_difference`.

        For optimizers that divide each gradient by the root of its second moment: what is selected is then what
        matters to them. Not with momentum, clipping or a decay.

        Args:
            name: one of ``tensors``.
            gradient: of the tensor's shape; ``None``: this rank has none.
            squares: a flat array in the accumulator's type, on the tensor's device.
            eps, scale: numbers.

        Raises:
            InvalidInputError: as `push`; or there is momentum, clipping or a decay.
        """
        with self._lock:
            spec, correction = self._begin_push(name), self._settings.correction
            if correction.momentum or correction.clip is not None or correction.decay < 1:
                raise InvalidInputError("push_quotient with momentum, clip or decay: leave these out")
            t = None if gradient is None else spec.tensor(gradient, f"{self._who()}{name}")

            def add(backend: Backend, residual: interop.Tensor, decay: float, if_finite: bool) -> bool:
                assert t is not None
                return backend.add_quotient(t, squares, eps, scale, residual, if_finite)

            self._open.take(spec, t, add=add)
            self._open.start_ready()

    def connect(self) -> None:
        """Lay out buckets with the other ranks, as the first `push` does. Collective, the first time."""
        with self._lock:
            self._connect()

    def opening_call(self, name: str, make: Callable[[transport.Transport], Task]) -> tuple[Any, SparseVector]:
        """Make a call that precedes the first gradient of a step. Collective.

        After an interrupt call this again. Where a thread makes calls, the interrupt has ended only the wait, and this
        waits for the same call. If an opening call fails, the opening begins again with its first call. So ranks of
        which one has failed later than another make the same calls.

        Args:
            name: of the call.
            make: returns the call; it is not called if the call has been made since the last `end_opening`.

        Returns:
            The call, and its result.

        Raises:
            SparseCommError: the call failed.
        """
        with self._lock:
            ranks = self._connect()
            return self._open.opening_call(name, lambda: make(ranks))

    def end_opening(self) -> None:
        """Forget the opening calls: they went well, and the next ones are new."""
        with self._lock:
            self._open.end_opening()

    def check_weights(self, tensors: Mapping[str, object]) -> None:
        """Do as `sparsecomm.check_weights`, by an opening call. If weights differ, the next one compares them again."""
        with self._lock:
            if self._connect().size > 1:
                try:
                    compare_weights(
                        tensors, lambda make: cast("WeightComparison", self.opening_call("weights", make)[0])
                    )
                except WeightMismatchError:
                    self._open.end_opening()
                    raise

    def sum_of_squares(self, name: str, gradient: object) -> float:
        """Return the sum of the squares of the elements of a gradient of this tensor. Nothing is sent.

        Raises:
            InvalidInputError: as `push`.
        """
        with self._lock:
            spec = self._spec(name)
            self._connect()
            t, bucket = spec.tensor(gradient, f"{self._who()}{name}"), self._group.now.by_name[name]
            with bucket.on_stream(t):
                return bucket.sum_of_squares(t)

    def start_ready(self) -> None:
        """Start the calls of all that has been pushed, which an interrupt of `push_difference` may have left.

        `wait` does so, too. For `sparsecomm.LocalSteps`, which has other calls to make before it waits.
        """
        with self._lock:
            self._open.start_ready()

    def accumulate(self, name: str, gradient: object) -> None:
        """Add a part of a tensor's gradient of this step; push its last part. It may be changed afterwards.

        Raises:
            InvalidInputError: it cannot be used, or was pushed already; or gradients are clipped, for which the whole
                must be known: add the parts up yourself.
        """
        with self._lock:
            spec = self._spec(name)
            if self._settings.correction.clip is not None:
                raise InvalidInputError("accumulate with clip: a part has no norm; add the parts up, and push the sum")
            if name in self._open.pushed:
                raise InvalidInputError(f"{self._who()}{name!r} was pushed in step {self.step} already")
            self._prepare()
            self._open.take(spec, spec.tensor(gradient, f"{self._who()}{name}"), last=False)

    def parts(self, name: str) -> int:
        """Return how many parts of a tensor's gradient this step has taken; the last one, or the whole, counts as one.

        An exception of a signal handler in `push` or `accumulate` may come before they take the gradient, or
        afterwards: this tells.

        Raises:
            InvalidInputError: there is no such tensor.
        """
        with self._lock:
            now, name = self._open, self._spec(name).name
            return now.parts.get(name, 0) + (name in now.pushed)

    def wait(self, accept: Accept | None = None) -> Step:
        """Wait until the sums of all tensors are there, and end the step.

        This rank has no gradient for tensors that were not pushed.

        Args:
            accept: for optimizers, with ``skip_nonfinite``: a function of the sums that would be `Step.left`, and of
                the largest magnitude in all sums. It is called if all sums are finite. If it returns False, the step is
                not usable, and all gradients wait in the residuals. It must return the same on all ranks, and may be
                called again.

        Raises:
            SparseCommError: a call failed, as `sparse_allreduce` raises it. Its gradients are in the residuals; sums
                of other calls have been written, and count, unless ``skip_nonfinite`` has the whole step count or not:
                see `unsummed`. The next step may be begun.
        """
        with self._lock:
            self._prepare()
            group, start, now = self._group, time.perf_counter(), self._open
            now.take_rest()
            now.start_ready()
            error, done = now.settle(accept)
            after = self._begin(now.number + 1, None if now.unsummed else done, now.unsummed)
            asks = self._settings.reorder and group.now.order is None and not now.unsummed
            ordering = group.order_call(now.ready) if asks else None
            self.counters.waited += time.perf_counter() - start
            self.counters.skipped += not done.usable
            self.counters.steps += 1
            self._open = after
            if ordering is not None:
                group.ordering = ordering
                group.queue.enqueue(ordering[0])
                error = error or self._finish_ordering()
            self.count_setup()
            if error is not None:
                raise error
            if self._on_step is not None:
                numbers = self.counters.since(self._logged)
                self._logged = self.counters.copy()
                self._on_step(done.number, numbers)
            return done

    def reduce(self, gradients: Mapping[str, object]) -> Step:
        """Push all these gradients, and wait: see `push` and `wait`, also for errors."""
        if not isinstance(gradients, Mapping):
            raise InvalidInputError(f"gradients: got {type(gradients).__name__}; expected gradients by name")
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
            now = self._open
            if now.begun:
                now.abandon()
                after = self._begin(now.number + 1, None, now.unsummed)
                self.counters.steps += 1
                self._open = after
            if joining:
                self._open = self._begin(0)
            rebuilt = self._group.move(comm, self.step, joining=joining)
            self._open = self._begin(rebuilt.step, self.last, self.unsummed)
            self.counters.ranks_lost += len(rebuilt.ranks_lost)
            self.counters.elements_lost += rebuilt.elements_lost
        level = logging.WARNING if rebuilt.ranks_lost or rebuilt.steps_apart else logging.INFO
        _log.log(level, "rank %s: %s", self._connect().rank, rebuilt)
        return rebuilt

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return what this rank needs to go on as if it had not stopped: NumPy arrays, numbers, lists and texts.

        Every rank has its own. It records the number of ranks; `reshard` makes states for another one. What "split"
        keeps from step to step is forgotten here, on all ranks that save: the next step then rounds as that of a run
        which resumes, and takes two trips more. Links that were measured are in the state, so that "auto" chooses
        alike then; without ``state["costs"]`` they are measured again.

        Raises:
            InvalidInputError: in the middle of a step.
        """
        with self._lock:
            transport = self._idle("state_dict")
            now = self._group.now
            residuals, velocities = now.to_host()
            now.forget_calls()
            return REDUCER.state(
                transport,
                {
                    "residuals": residuals,
                    "velocities": velocities,
                    "step": self.step,
                    "order": now.order,
                    "bucket_bytes": now.bucket_bytes,
                    "costs": costs_dict(self._group.queue.measured),
                },
            )

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that `state_dict` returned on this rank of the same world size, or that `reshard` made.

        Collective: all ranks load, or none. The states must be of one step. Any exception while a state is read, on any
        rank, counts as a state that does not fit; an interrupt (Ctrl-C) is raised as it is.

        Raises:
            InvalidInputError: the state does not fit on some rank. The message names the rank, the key, the value and
                the expected value. Nothing has changed on any rank.
            CollectiveMismatchError: another rank makes another call.
            TimeoutError, RankFailedError, TransportError: as `sparse_allreduce`.
        """
        self.load_with(lambda undo: self.prepare_state(state))

    def load_with(self, prepare: Callable[[Undo], Prepared], keys: Iterable[str] = ()) -> None:
        """Load a state that extends a reducer's, on all ranks or on none. Collective.

        Args:
            prepare: see `sparsecomm.states.loading.load`; it calls `prepare_state`.
            keys: of what it compares besides.
        """
        with self._lock:
            load(self._idle("load_state_dict"), f"Reducer {self._group.number}", [*REDUCER.keys, *keys], prepare)

    def prepare_state(self, state: State, schema: Schema = REDUCER) -> Prepared:
        """Convert and check a state, for `load_with`. Nothing is sent, and nothing changes.

        Args:
            state: see `load_state_dict`.
            schema: of the state: `REDUCER`, or an extension of it.

        Raises:
            InvalidInputError: the state does not fit.
        """
        with self._lock:
            read = schema.read_own(state, self._idle("load_state_dict"))
            found = fit(read, self._specs, bool(self._settings.correction.momentum))
            made = self._group.arranged(found["order"], found["bucket_bytes"])
            made.fill(found["residuals"], found["velocities"])

        costs = None if found["costs"] is None else measured_costs(found["costs"])

        def commit() -> None:
            self._group.now = made
            if costs is not None:
                self._group.queue.use_measured(costs)
            self._open = self._begin(found["step"])

        return Prepared({key: found[key] for key in REDUCER.keys}, commit, found)

    def residual(self, name: str) -> Array:
        """Return the residual of a tensor: a view of its shape, on its device, which changes with every step.

        Raises:
            InvalidInputError: there is no such tensor.
        """
        with self._lock:
            spec = self._spec(name)
            self._connect()
            bucket = self._group.now.by_name[name]
            with bucket.on_stream(None):  # on which the view will be used
                return bucket.residuals[name].reshape(spec.shape)

    def scale(self, factor: float) -> None:
        """Multiply residuals and velocities by a factor: gradients of the next steps are scaled by so much more.

        Raises:
            InvalidInputError: in the middle of a step, or ``factor`` is not above 0.
        """
        if not 0 < (times := to_float(factor)) < math.inf:
            raise InvalidInputError(f"factor={quote(factor)}: expected a number above 0")
        with self._lock:
            self._idle("scale")
            now = self._group.now
            with now.on_current_stream():
                for bucket in now.buckets:
                    bucket.scale(times)

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Set residuals and velocities to zero: gradients that were not applied yet are dropped.

        Call it on all ranks: each has a residual of its own, and with some algorithms ("double") a rank also keeps sums
        of what other ranks have sent.

        Args:
            names: of the tensors; ``None``: all of them.

        Raises:
            InvalidInputError: in the middle of a step, or there is no tensor of such a name. Nothing has changed.
        """
        with self._lock:
            given = self._specs if names is None else [names] if isinstance(names, str) else names
            wanted = [self._spec(name).name for name in given]
            self._idle("discard")
            now = self._group.now
            with now.on_current_stream():
                for name in wanted:
                    now.by_name[name].discard(name)

    def report(self) -> str:
        """Return a small table, of this rank.

        - What this rank did per step on average, and what dense sums would have sent.
        - "set-up": the bytes that it sent in all to measure links and to agree with other ranks. They are not in
          the bytes per step.
        - Which algorithm and wire format its calls take, and by which costs; these are of the beginning.
        - With each peer, the bytes and the rate that was reached, where the transport knows them: of all calls on the
          communicator so far, set-up included. Over MPI the rate is bytes sent, for the seconds in which messages to or
          from the peer were waited for: it is at least that.
        """
        with self._lock:
            self.count_setup()
            return "\n".join([str(self.counters), *self.report_lines()])

    def count_setup(self) -> None:
        """Add what has been sent and received on the communicator outside of sums since the last time."""
        if self._group.transport is None:
            return
        traffic = self._group.transport.counters
        sent, received = self._setup if self._traffic is traffic else (0, 0)
        self._traffic, self._setup = traffic, traffic.setup
        self.counters.setup_sent += self._setup[0] - sent
        self.counters.setup_received += self._setup[1] - received

    def report_lines(self, others: Sequence[Reducer] = ()) -> list[str]:
        """Return the lines of the report below the counters, of this reducer and of others on the communicator."""
        with self._lock:
            groups = [reducer._group for reducer in (self, *others)]
            buckets = [bucket for group in groups if group.transport is not None for bucket in group.now.buckets]
            return choice_lines(buckets) + ([] if self._group.transport is None else peer_lines(self._group.transport))

    def __repr__(self) -> str:
        transport, elements = self._group.transport, sum(spec.size for spec in self._specs.values())
        where = "not connected yet" if transport is None else f"rank {transport.rank} of {transport.size}"
        s = self._settings
        o = s.options
        return (
            f"Reducer({len(self._specs)} tensors of {elements:,} elements, density={s.density!r}, "
            f"algorithm={o.algorithm!r}, op={o.op!r}, wire={o.wire!r}, scope={s.scope!r}; "
            f"step {self.step}, {where})"
        )

    @property
    def step(self) -> int:
        """The number of the step that begins, or has begun."""
        return self._open.number

    @property
    def last(self) -> Step | None:
        """The outcome of the step that ended last; ``None``: it failed, or there was none."""
        return self._open.before

    @property
    def unsummed(self) -> tuple[str, ...]:
        """Names of tensors of which the last step made no sum, because it failed, or was left."""
        return self._open.unsummed_before

    @property
    def density(self) -> float:
        """The density of the step that begins, or has begun."""
        schedule = self._settings.density
        return density_at(schedule, self.step) if callable(schedule) else schedule

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._specs)

    @property
    def groups(self) -> list[list[str]]:
        """The names in each bucket, in the order of calls."""
        self._connect()
        return [[spec.name for spec in bucket.tensors] for bucket in self._group.now.buckets]

    @property
    def pending(self) -> bool:
        """Whether a step has begun that `wait` has not ended."""
        return bool(self._open.pushed)

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _begin(self, number: int, before: Step | None = None, unsummed_before: tuple[str, ...] = ()) -> OpenStep:
        """Return a new step: what became of the one before is part of it."""
        return OpenStep(self._group, self.counters, number, before, unsummed_before)

    def _prepare(self) -> None:
        """Have the density of the step, for if the schedule fails, nothing has changed; the ranks, with buckets; and
        the costs by which the algorithm is chosen, which may take a call.
        """
        begins = not self._open.pushed
        if begins:
            self._open.density, self._open.label = self.density, self.label
        self._connect()
        if begins:
            self._group.have_costs(self._open.density)

    def _connect(self) -> transport.Transport:
        """Return the transport, from the first call on with buckets, and when no order is waited for."""
        if self._group.ordering is not None:
            error = self._finish_ordering()
            if error is not None and not isinstance(error, Exception):
                raise error
        return self._group.transport or self._group.connect()

    def _finish_ordering(self) -> BaseException | None:
        """Wait for the order, and fill buckets in it. An interrupt of the wait is raised.

        Returns:
            The error of the call, if it failed: the order is found after the next step then.
        """
        assert self._group.ordering is not None
        handle, told = self._group.ordering
        error = error_of(handle)
        self._group.reorder(told.words if error is None else None)
        return error

    # -- checks -------------------------------------------------------------------------------------------------------

    def _who(self) -> str:
        return "" if self._group.transport is None else f"rank {self._group.transport.rank}: "

    def _begin_push(self, name: str) -> TensorSpec:
        """Check that a tensor may be pushed now."""
        spec = self._spec(name)
        self._prepare()
        if name in self._open.pushed:
            raise InvalidInputError(
                f"{self._who()}{name!r} was pushed in step {self.step} already; call wait() after the last tensor "
                "of a step, or accumulate() for all but the last part of a gradient"
            )
        return spec

    def _spec(self, name: str) -> TensorSpec:
        if not isinstance(name, str) or name not in self._specs:
            raise InvalidInputError(
                f"{self._who()}{quote(name)} is no name of this Reducer's {len(self._specs)} tensors, "
                f"{listed(self._specs)}{did_you_mean(name, self._specs)}"
            )
        return self._specs[name]

    def _idle(self, doing: str) -> transport.Transport:
        if self._open.begun:
            raise InvalidInputError(
                f"{self._who()}{doing} in the middle of step {self.step}: gradients were pushed, and wait() was not "
                "called; call it first"
            )
        return self._connect()
