"""`Reducer`: sums the gradients of a model over all ranks, step by step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from sparsecomm import transport
from sparsecomm.calls.label import Label
from sparsecomm.calls.measurement import costs_for_steps, costs_matter
from sparsecomm.calls.queue import Task
from sparsecomm.checks import quote, to_float
from sparsecomm.errors import InvalidInputError, WeightMismatchError, did_you_mean, listed, log
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.reducer.bucket import GRADIENT, Addition, Bucket
from sparsecomm.reducer.connection import Buckets, Connection, Rebuilt
from sparsecomm.reducer.counters import Counters, peer_lines, plan_lines
from sparsecomm.reducer.options import DENSITY, ReducerOptions, ReducerSettings, Schedule, density_at
from sparsecomm.reducer.owned import Owner
from sparsecomm.reducer.state import REDUCER, buckets_of, fields_of, measured_costs
from sparsecomm.reducer.step import Accept, OpenStep, Step
from sparsecomm.signals import Opened, PollingLock, deferred
from sparsecomm.states.loading import Prepared, Undo, load
from sparsecomm.states.schema import Schema, State, StateDict
from sparsecomm.states.values import digest
from sparsecomm.states.weights import WeightComparison
from sparsecomm.tensors import interop
from sparsecomm.tensors.interop import NamedTensors, TensorSpec, specs_of
from sparsecomm.tensors.sparse import Array, SparseVector

_Task = TypeVar("_Task", bound=Task)
_KEEP = 1 << 21  # bytes of scratch memory that `Reducer.release_memory` keeps at least


@dataclass(frozen=True, kw_only=True)
class PreparedState(Prepared):
    """A state that was read, with the buckets that it needs."""

    buckets: Buckets


@deferred
class Reducer:
    """Sums the gradients of a model over all ranks, sparsely, in every step.

        reducer = sc.Reducer(gradients)                           # names and arrays, for shapes and dtypes
        for ...:
            for name, gradient in gradients.items():              # in any order, as they become ready
                reducer.push(name, gradient)
            reducer.wait()                                        # the sums have replaced the gradients

    The defaults of ``density``, ``algorithm`` and ``wire`` suit SGD (docs/guides/choosing.md). For a dense baseline,
    pass ``density=1.0``. Calls begin when their tensors are ready, in the same order on all ranks, and overlap with the
    program. A residual for each tensor, in float32 (float64 for float64), stores the gradient that was not sent.

    A tensor for which no rank has a gradient is left out of the step: its residual and velocity do not change. If only
    some ranks have a gradient, the other ranks contribute zeros and keep their residuals, and the call takes one more
    trip.

    All ranks must use the same tensors in the same order, the same settings and the same step; otherwise they raise
    `CollectiveMismatchError`. Several reducers may share a communicator if all ranks use them in the same order.

    Args:
        tensors: names and tensors, as a dictionary or as pairs: parameters or gradients. Only their shape, dtype and
            device are used.
        comm: as in `sparse_allreduce`.
        options: see `sparsecomm.reducer.options.ReducerSettings`.

    Attributes:
        buffers: returns buffers of the model by name, which the first step compares.
        counters: totals since the beginning.
        label: a `Label`: names and values that must be equal on all ranks when the next step begins, such as
            ``Label.of(("lr", 0.1))``. If they differ, the error of the step names the first one.
        weights_checked: the step in which `check_weights` compared weights last; ``None`` makes it compare them next.

    Raises:
        InvalidInputError: an argument is out of range.
    """

    @with_options(ReducerOptions, ReducerSettings)
    def __init__(
        self,
        tensors: NamedTensors,
        density: Schedule = DENSITY,
        *,
        comm: transport.Comm = None,
        skip_nonfinite: bool = False,
        **options: Unpack[ReducerOptions],
    ) -> None:
        check_options(Reducer, options)
        self._settings = ReducerSettings(density=density, skip_nonfinite=skip_nonfinite, **options)
        self._comm = comm
        self._owner: Owner | None = None  # see `own`
        self._lock = PollingLock()  # frameworks push from several threads
        self.counters = Counters()
        self._traffic: transport.TrafficCounters | None = None  # of the transport
        self._setup = 0, 0  # bytes of `_traffic` that `counters` include
        self._logged = Counters()  # at the last call of `on_step`
        self.weights_checked: int | None = None
        self.label = Label.of()
        self.buffers: Callable[[], Mapping[str, object]] = dict
        self.replace_tensors(tensors)

    def replace_tensors(self, tensors: NamedTensors, comm: transport.Comm = None) -> None:
        """Replace ``tensors``, and ``comm`` unless it is ``None``, before the first step."""
        specs = specs_of(tensors)
        for dtype in {spec.accumulator.name for spec in specs.values()}:
            self._settings.check(dtype, by_chunk=self._settings.chunk_length is not None)
        self._comm = self._comm if comm is None else comm
        self._specs, self._connection = specs, Connection(self._comm, specs, self._settings, self._owner)
        self._open = self._begin(0)

    def own(self, owner: Owner) -> None:
        """Let ``owner`` make an optimizer's step with sums, before the first step: see `sparsecomm.reducer.owned`.

        Needs ``skip_nonfinite``, the algorithm "auto" or "double", and gradients from `push_with`.
        """
        self._owner = owner
        self.replace_tensors(self._specs)

    def _begin(self, number: int, before: Step | None = None, unsummed_before: tuple[str, ...] = ()) -> OpenStep:
        return OpenStep(self._connection, self.counters, number, before, unsummed_before)

    # -- a step: preliminary calls, gradients, sums -------------------------------------------------------------------

    def check_weights(self, every: int | None, tensors: Callable[[], Mapping[str, object]]) -> None:
        """Compare weights as `sparsecomm.check_weights` does, if that is due before this step. Collective if due.

        It is due in the first step, in the first step after `load_state_dict` or `rebuild`, and in all steps whose
        number is a multiple of ``every``. With 0 only these first steps count; with ``None`` it is never due. In first
        steps, `wait` also compares gradients and `buffers`, and warns: see `FirstStep`.
        """
        with self._lock:
            first = self.weights_checked is None
            due = first or (every and self.step % every == 0 and self.weights_checked != self.step)
            if every is None or not due or self.pending or self._connect().size == 1:
                return
            try:
                self.preliminary_call("weights", lambda transport: WeightComparison(transport, tensors()))[0].check()
            except WeightMismatchError:
                self._open.preliminary.clear()  # so that the next call compares again
                raise
            if first:
                self._open.buffers = {n: digest([interop.content(b, n)[1]]) for n, b in self.buffers().items()}

    def preliminary_call(self, name: str, make: Callable[[transport.Transport], _Task]) -> tuple[_Task, SparseVector]:
        """Make the call that ``make`` returns, once before the first gradient of a step. Return it and its result.

        After an interrupt, call this again to wait for the same call. After an error, all preliminary calls of the step
        must be made again.
        """
        with self._lock:
            transport, preliminary = self._connect(), self._open.preliminary
            if name not in preliminary:
                new = make(transport)
                preliminary[name] = self._connection.queue.submit(new), new
            handle, task = preliminary[name]
            try:
                return cast(_Task, task), handle.wait()
            except BaseException:
                if handle.error is not None:
                    preliminary.clear()
                raise

    def forget_preliminary_calls(self) -> None:
        """Forget the preliminary calls, which have all succeeded. The first gradient does this, too."""
        with self._lock:
            if "weights" in self._open.preliminary:
                self._open.first_gradients = {} if self.weights_checked is None else None
                self.weights_checked = self.step
            self._open.preliminary.clear()

    def go_to(self, step: int) -> None:
        """Make a step of this number next, for a program that keeps the state elsewhere."""
        with self._lock:
            self._connect_between_steps("go_to")
            self._open = self._begin(step)

    def push(self, name: str, gradient: object, out: object = None) -> None:
        """Push a tensor's gradient of this step. Do not change it until `wait` returns.

        Args:
            name: the tensor's name.
            gradient: of the tensor's shape, as in `sparse_allreduce`. ``None``, or no push: this rank has no gradient.
            out: output for the sum; defaults to ``gradient``. It is not written if no rank has a gradient.

        Raises:
            InvalidInputError: an argument is not supported, or the gradient was pushed already. Nothing has changed.
        """
        with self._lock:
            spec = self._begin_push(name)
            t = None if gradient is None else spec.tensor(gradient, f"{self._prefix}{name}")
            into, title = out, f"out of {name}"
            if t is not None and (out is None or out is gradient):
                into, title = gradient, "gradient, which is also out,"
            if t is not None:
                into = interop.as_out(into, t, name=title)
            elif into is not None:
                into = spec.tensor(into, f"{self._prefix}{title}", writable=True)
            self._open.push(spec, t, into)
            self._open.start_ready()

    def push_with(self, name: str, x: object, how: Addition = GRADIENT) -> None:
        """Push a value that is computed from ``x`` when it is added to the residual.

        The sum is in `Step.sums_without_out`. Do not change ``x`` until `wait` returns, or the bucket's call has begun.
        """
        with self._lock:
            spec, bucket = self._begin_push(name), self._connection.buckets.by_name[name]
            t = None if x is None else spec.tensor(x, f"{self._prefix}{name}")
            if t is not None and how.minuend is not None and self._settings.clip is not None:
                with bucket.on_stream(t):
                    t, how = bucket.difference(spec, how.minuend, t), GRADIENT
            self._open.push(spec, t, how=how)
            self._open.start_ready()

    def pushed(self, name: str) -> bool:
        """Return whether a tensor was pushed in this step, for example before an exception of a signal handler."""
        with self._lock:
            return self._spec(name).name in self._open.pushed

    def start_ready(self) -> None:
        """Start the calls of complete buckets, which an interrupt of a push may have prevented. `wait` does so, too."""
        with self._lock:
            self._open.start_ready()

    def wait(self, accept: Accept | None = None) -> Step:
        """Wait for the sums of all tensors, and end the step. This rank has no gradient for tensors not pushed.

        Args:
            accept: with ``skip_nonfinite``, decides whether finite sums are usable, from `Step.sums_without_out` and
                the largest magnitude in all sums. It must return the same on all ranks, and may be called again.

        Raises:
            SparseCommError: a call failed, as in `sparse_allreduce`. Its gradients are in the residuals. Sums of other
                calls count, except with ``skip_nonfinite``: see `unsummed`. You may begin the next step.
        """
        with self._lock:
            self._prepare()
            start, step = time.perf_counter(), self._open
            step.push_rest()
            step.start_ready()
            error, outcome = step.settle(accept)
            next_step = self._begin(step.number + 1, None if step.unsummed else outcome, step.unsummed)
            self.counters.waited += time.perf_counter() - start
            self.counters.skipped += not outcome.usable
            self.counters.steps += 1
            self._open = next_step
            self.count_setup()
            if error is not None:
                raise error
            step.warn()
            if (on_step := self._settings.on_step) is not None:
                numbers = self.counters.since(self._logged)
                self._logged = replace(self.counters)
                with Opened():
                    on_step(outcome.number, numbers)
            return outcome

    def reduce(self, gradients: Mapping[str, object]) -> Step:
        """Push gradients by name, and wait: see `push` and `wait`."""
        if not isinstance(gradients, Mapping):
            raise InvalidInputError(f"gradients: got {type(gradients).__name__}; expected gradients by name")
        for name, gradient in gradients.items():
            self.push(name, gradient)
        return self.wait()

    def _begin_push(self, name: str) -> TensorSpec:
        spec = self._spec(name)
        self._prepare()
        if name in self._open.pushed:
            raise InvalidInputError(
                f"{self._prefix}{name!r} was pushed in step {self.step} already; call wait() after the last tensor of "
                "a step, and add up the parts of a gradient before you push it"
            )
        return spec

    def _prepare(self) -> None:
        if self._open.pushed:
            return
        with Opened():  # a schedule is the user's function; if it raises, nothing has changed
            density = self.density
        self._open.density, self._open.label = density, self.label
        transport, connection, settings = self._connect(), self._connection, self._settings
        buckets = connection.buckets.all
        if any(bucket.planned(connection.queue, density) is None for bucket in buckets) and any(
            costs_matter(transport, settings.for_sums(bucket.accumulator.name)) for bucket in buckets
        ):
            costs_for_steps(transport)  # the plans of the buckets need them
        self.forget_preliminary_calls()

    def _connect(self) -> transport.Transport:
        """Return the transport, after making the buckets if needed."""
        return self._connection.transport or self._connection.connect()

    def _connect_between_steps(self, method: str) -> transport.Transport:
        """Return the transport, after checking for ``method`` that no step has begun."""
        if self._open.pushed:
            raise InvalidInputError(
                f"{self._prefix}{method} in the middle of step {self.step}: gradients were pushed; call wait() first"
            )
        return self._connect()

    def _spec(self, name: str) -> TensorSpec:
        if not isinstance(name, str) or name not in self._specs:
            raise InvalidInputError(
                f"{self._prefix}{quote(name)} is not the name of one of this Reducer's {len(self._specs)} tensors, "
                f"{listed(self._specs)}{did_you_mean(name, self._specs)}"
            )
        return self._specs[name]

    @property
    def _prefix(self) -> str:
        return "" if self._connection.transport is None else f"rank {self._connection.transport.rank}: "

    # -- other ranks --------------------------------------------------------------------------------------------------

    def rebuild(self, comm: transport.Comm, *, joining: bool = False) -> Rebuilt:
        """Continue with the ranks of another communicator, for example from `shrink` or `grow`. Collective over them.

        This rank keeps its residuals, velocities, settings and counters. A step that has begun is abandoned: the
        gradients that were not summed go to the residuals. If this fails because another rank died, shrink and call it
        again.

        Args:
            comm: as in the constructor.
            joining: whether this rank is new. Its residuals are zeros, and it takes the step from the other ranks. At
                least one rank must not join. You must broadcast weights and the optimizer's state.

        Returns:
            The ranks that were lost or joined, which are also logged and counted.

        Raises:
            InvalidInputError: all ranks join, or ``comm`` is not supported.
            CollectiveMismatchError, TransportError: the ranks' reducers differ, or a rank did not answer, or died.
        """
        with self._lock:
            step, self.weights_checked = self._open, None
            if step.pushed:
                step.abandon()
                next_step = self._begin(step.number + 1, None, step.unsummed)
                self.counters.steps += 1
                self._open = next_step
            if joining:
                self._open = self._begin(0)
            rebuilt = self._connection.move(comm, self.step, joining=joining)
            self._open = self._begin(rebuilt.step, self.last, self.unsummed)
            self.counters.ranks_lost += len(rebuilt.ranks_lost)
            self.counters.elements_lost += rebuilt.elements_lost
        level = logging.WARNING if rebuilt.ranks_lost or rebuilt.steps_apart else logging.INFO
        log.log(level, "rank %s: %s", self._connect().rank, rebuilt)
        return rebuilt

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return this rank's state: NumPy arrays, numbers, lists and strings. Each rank saves its own.

        `reshard` makes states for another world size. The state contains the measured links, so "auto" makes the same
        choice after a resume; set ``state["costs"]`` to ``None`` to measure them again. This clears the caches of
        algorithms, so a resumed run computes the same; with "split", the next step takes up to two more trips.

        Raises:
            InvalidInputError: a step has begun.
        """
        with self._lock:
            return REDUCER.state(self._connect_between_steps("state_dict"), fields_of(self._connection, self.step))

    def load_state_dict(self, state: State) -> None:
        """Load a state that `state_dict` returned on this rank of the same world size, or that `reshard` made.

        Collective: all ranks load, or none. The states must be of one step.

        Raises:
            InvalidInputError: the state does not fit on some rank, or reading it raised an exception. Nothing has
                changed on any rank.
            CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as `sparse_allreduce`.
        """
        self.load_with(lambda undo: self.prepare_state(state))

    def load_with(self, prepare: Callable[[Undo], Prepared], keys: Iterable[str] = ()) -> None:
        """Load a state that extends a reducer's state: see `sparsecomm.states.loading.load`. Collective.

        ``prepare`` calls `prepare_state`, and adds ``keys`` to the comparison.
        """
        with self._lock:
            transport = self._connect_between_steps("load_state_dict")
            load(transport, f"load_state_dict() of Reducer {self._connection.number}", [*REDUCER.keys, *keys], prepare)

    def prepare_state(self, state: State, schema: Schema = REDUCER) -> PreparedState:
        """Convert and check a state for `load_with`, by `REDUCER` or an extension of it. Nothing changes yet."""
        with self._lock:
            fields = schema.read_own(state, self._connect_between_steps("load_state_dict"))
            buckets = buckets_of(fields, self._connection)
        costs = measured_costs(fields["costs"])

        def commit() -> None:
            self._connection.buckets = buckets
            if costs is not None:
                self._connection.queue.plans.use_costs(costs)
            self._open, self.weights_checked = self._begin(fields["step"]), None

        return PreparedState({key: fields[key] for key in REDUCER.keys}, commit, fields, buckets=buckets)

    def release_memory(self) -> None:
        """Give unused scratch memory back to the system, except for about half a byte per element."""
        keep = max(_KEEP, sum(spec.size for spec in self._specs.values()) // 2)
        self._connection.queue.backends.release(keep)
        self._connection.backends.release(keep)

    def residual(self, name: str) -> Array:
        """Return the residual of a tensor: a view of its shape, on its device. Its contents change with every step.

        With nodes, it is flat and has only this rank's part of the tensor: see docs/guides/nodes.md.
        """
        with self._lock:
            spec, bucket = self._spec(name), self.bucket(name)
            with bucket.on_stream(None):  # the caller uses the view on the current stream
                flat = bucket.residuals[name]
                return flat.reshape(spec.shape) if bucket.nodes is None else flat

    def drop(self, name: str, indices: Array) -> None:
        """Set the residual of a tensor to zero at some indices, on the current stream."""
        bucket = self.bucket(name)
        begin, end = bucket.part_in_slice(name)
        bucket.residuals[name][indices[(begin <= indices) & (indices < end)] - begin] = 0

    def scale(self, factor: float) -> None:
        """Multiply residuals and velocities by a factor, because the gradients of the next steps are scaled by it.

        Raises:
            InvalidInputError: a step has begun, or ``factor`` is not positive.
        """
        if not 0 < (times := to_float(factor)) < math.inf:
            raise InvalidInputError(f"factor={quote(factor)}: must be a positive number")
        with self._lock:
            self._connect_between_steps("scale")
            with self._connection.buckets.on_current_stream():
                for bucket in self._connection.buckets.all:
                    bucket.scale(times)

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Set residuals and velocities to zero, which drops gradients that were not applied yet.

        Call it on all ranks. With some algorithms ("double"), a rank's residuals also contain gradients of other ranks.

        Args:
            names: names of tensors; ``None``: all.

        Raises:
            InvalidInputError: a step has begun, or no tensor has this name. Nothing has changed.
        """
        with self._lock:
            selected = self._specs if names is None else [names] if isinstance(names, str) else names
            selected = [self._spec(name).name for name in selected]
            self._connect_between_steps("discard")
            with self._connection.buckets.on_current_stream():
                for name in selected:
                    self._connection.buckets.by_name[name].discard(name)

    def sums_of_squares(self, gradients: Mapping[str, object]) -> dict[str, float]:
        """Return the sums of the squares of this rank's gradients by name. The host waits once for each bucket."""
        with self._lock:
            self._connect()
            tensors = {n: self._spec(n).tensor(g, f"{self._prefix}{n}") for n, g in gradients.items()}
            sums: dict[str, float] = {}
            for bucket in self._connection.buckets.all:
                of_bucket = {spec.name: tensors[spec.name] for spec in bucket.tensors if spec.name in tensors}
                with bucket.on_stream(next(iter(of_bucket.values()), None)):
                    sums |= zip(of_bucket, bucket.sums_of_squares([*of_bucket.values()]), strict=True)
            return sums

    # -- reports ------------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """Return a table for this rank: means per step, algorithms and wire formats, and traffic per peer.

        "set-up" counts bytes that were sent to measure links and to agree with other ranks. They are not in the bytes
        per step. Over MPI, the rate of a peer is a lower bound: bytes sent, divided by the time spent waiting for it.
        """
        with self._lock:
            self.count_setup()
            return "\n".join([str(self.counters), *self.report_lines()])

    def report_lines(self, others: Sequence[Reducer] = ()) -> list[str]:
        """Return the lines of the report below the counters, for this reducer and others on the communicator."""
        with self._lock:
            connected = [r._connection for r in (self, *others) if r._connection.transport is not None]
            plans = [bucket.last_plan for connection in connected for bucket in connection.buckets.all]
            notes = {f"{'nodes':<20} {connection.nodes_note}" for connection in connected if connection.nodes_note}
            return sorted(notes) + plan_lines(plans) + peer_lines(self._connection.transport)

    def count_setup(self) -> None:
        """Count the bytes that the communicator has moved outside sums since the last call of this method."""
        if self._connection.transport is None:
            return
        traffic = self._connection.transport.counters
        sent, received = self._setup if self._traffic is traffic else (0, 0)
        self._traffic, self._setup = traffic, traffic.setup
        self.counters.setup_sent += self._setup[0] - sent
        self.counters.setup_received += self._setup[1] - received

    def __repr__(self) -> str:
        transport, elements = self._connection.transport, sum(spec.size for spec in self._specs.values())
        where = "not connected yet" if transport is None else f"rank {transport.rank} of {transport.size}"
        s = self._settings
        return (
            f"Reducer({len(self._specs)} tensors of {elements:,} elements, density={s.density!r}, "
            f"algorithm={s.algorithm!r}, op={s.op!r}, wire={s.wire!r}, scope={s.scope!r}; "
            f"step {self.step}, {where})"
        )

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self._open.number

    @property
    def last(self) -> Step | None:
        """The outcome of the previous step; ``None``: it failed, or there was none."""
        return self._open.before

    @property
    def unsummed(self) -> tuple[str, ...]:
        """Names of tensors that the previous step did not sum, because it failed or was abandoned."""
        return self._open.unsummed_before

    @property
    def density(self) -> float:
        """The density of the current step."""
        schedule = self._settings.density
        return density_at(schedule, self.step) if callable(schedule) else schedule

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._specs)

    @property
    def transport(self) -> transport.Transport:
        """The transport of the communicator."""
        return self._connect()

    def bucket(self, name: str) -> Bucket:
        """Return the bucket of a tensor."""
        self._connect()
        return self._connection.buckets.by_name[name]

    def exponents(self, name: str) -> Array:
        """Return the exponents of a tensor's units, as a flat view: see `own`."""
        return self.bucket(name).exponents_of[name]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order of calls."""
        self._connect()
        return self._connection.buckets.all

    @property
    def groups(self) -> list[list[str]]:
        """The names in each bucket, in the order of calls."""
        return [[spec.name for spec in bucket.tensors] for bucket in self.buckets]

    @property
    def pending(self) -> bool:
        """Whether gradients were pushed since the last `wait`."""
        return bool(self._open.pushed)
