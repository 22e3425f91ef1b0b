"""`LocalSteps`: each rank trains alone for a round, then the ranks average the changes of their parameters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import Enum, auto
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sparsecomm import transport
from sparsecomm.calls.label import Label
from sparsecomm.checks import quote
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, SparseCommError, log
from sparsecomm.local_steps.deadline import Deadline
from sparsecomm.local_steps.defaults import (
    DEFAULTS,
    LocalStepsOptions,
    LocalStepsSettings,
    split_options,
    with_defaults,
)
from sparsecomm.local_steps.exchange import FragmentExchange, GlobalParameters, Outcome, Rules
from sparsecomm.local_steps.outer import OuterOptimizer, broadcast_outer, load_outer
from sparsecomm.local_steps.schedule import Event, Pace, StepTimer, known_names, split_names
from sparsecomm.local_steps.state import LOCAL_STEPS, fit
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.connection import Members
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.options import ReducerSettings, Schedule, density_at
from sparsecomm.reducer.state import REDUCER
from sparsecomm.signals import deferred
from sparsecomm.states.loading import Prepared, Undo, load
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import NamedTensors

_NOT_COMPARED = "on_step", "bucket_bytes", "nodes"  # options of a `Reducer`, which compares the last two itself


class Phase(Enum):
    """What `LocalSteps` is doing."""

    RESTING = auto()  # the program does something else; its time is not measured, and the other ranks wait for it
    TRAINING = auto()  # the program takes a local step
    EXCHANGING = auto()  # a call runs, or was interrupted: `_due_events` holds its remaining work
    LEFT_OUT = auto()  # the deadline's thread has begun an exchange during the local step


@deferred
class LocalSteps:
    """Trains by local steps. Once per round, averages the ranks' changes of the parameters sparsely.

    Each rank trains its own local parameters with its own optimizer. A round has ``sync_every`` local steps. At its
    end, the ranks average their pseudo-gradients, global parameters - local parameters, with a `Reducer`. The outer
    optimizer updates the global parameters, which are the same on all ranks, and training continues from them.

        local = sc.LocalSteps(parameters, sync_every=30)             # names and arrays
        for ...:
            optimizer.step()                                         # writes the parameters in place
            local.step(parameters)                                   # usually only counts
        model = local.global_parameters()

    Residuals store the entries that are not sent, and replace outer momentum (SparseLoCo: Sarfi et al., 2025, Algorithm
    1). Fragment i of F is exchanged after local step (i + 1) * sync_every // F of each round. With a delay of d, its
    exchange begins d local steps earlier. docs/guides/local-steps.md describes ``by_speed`` and ``deadline``.

    **Frozen parameters.** A rank has no pseudo-gradient for a parameter that has not changed, bit for bit, since its
    last exchange. If no rank has trained a parameter, its exchange changes nothing, not even residuals.

    **Errors.** If an exchange fails, `step` or `finish` raises its error on all ranks when it would apply the exchange.
    The fragment's local parameters are then set to the global ones, and the pseudo-gradient stays in the residual. The
    local step is counted, so ranks that catch the error may continue, or `shrink` and `rebuild`. If some ranks had
    already received the result (docs/reference/errors.md), `rebuild` makes the global parameters equal.

    **Interrupts.** An exception of a signal handler, such as Ctrl-C, may interrupt a call. If `step` was interrupted
    before `round` or `local_step` advanced, the local step was not counted: call `step` again. Otherwise, call `finish`
    or take the next local step, which completes the interrupted call. An outer optimizer other than `NesterovSGD` may
    have made part of a step. Then the fragment's next exchange raises `WeightMismatchError` on all ranks, until
    `rebuild`.

    **NaN.** With ``skip_nonfinite``, all ranks skip an exchange, without an error, if a pseudo-gradient is not finite
    on some rank, or if the outer step would overflow (checked for `NesterovSGD` and ``outer=None``). Finite
    pseudo-gradients stay in the residuals; others, and entries that would overflow, are dropped. Local parameters that
    are not finite are set to the global ones. Reset the inner optimizer's state where it holds NaN.

    Args:
        parameters: a dictionary of tensors by name, or pairs: anything with ``__dlpack__`` that can be written in
            place, the same on all ranks. The first exchange compares them.
        density: share of the entries that each rank selects, or a function of the number of a fragment's exchange.
            At 1.0 means are dense and exact, whatever ``algorithm`` and ``wire`` are.
        fragments: the number of fragments of neighbouring tensors and about equal size; or a list of names for each.
        outer: the outer optimizer, such as `NesterovSGD`; ``None``: global = global - mean.
        comm: as in `sparse_allreduce`.
        options: those of `sparsecomm.local_steps.defaults.LocalStepsSettings` and of a `Reducer`, but with the defaults
            ``scope="chunk"``, ``op="mean_of_contributors"`` where the algorithm counts them, ``decay=0.8``, and
            ``wire="packed_int2"`` unless a parameter is float64. ``algorithm="auto"`` is "split:2" or "allgather",
            whichever reaches the same loss in less time.

    Attributes:
        left_out: the ranks that were late for the latest applied exchange; the same on all ranks.
        reducers: the reducer of each fragment.
        fragments: the names of each fragment's parameters.

    Raises:
        InvalidInputError: an argument is invalid, or the transport does not support a deadline.
    """

    @with_options(LocalStepsOptions, LocalStepsSettings, ReducerSettings, **DEFAULTS)
    def __init__(
        self,
        parameters: NamedTensors,
        density: Schedule = 64 / 4096,
        *,
        fragments: int | Sequence[Sequence[str]] = 1,
        outer: OuterOptimizer | None = None,
        comm: transport.Comm = None,
        **options: Unpack[LocalStepsOptions],
    ) -> None:
        check_options(LocalSteps, options)
        settings, reducer_options = split_options(options)
        self._globals = GlobalParameters(parameters)
        specs = self._globals.specs
        self.fragments = split_names({name: spec.size for name, spec in specs.items()}, fragments)
        self._schedule, self._outer = settings.schedule(len(self.fragments)), outer
        if outer is not None and not callable(getattr(outer, "step", None)):
            raise InvalidInputError(f"outer={quote(outer)}: expected an outer optimizer, such as NesterovSGD, or None")
        if isinstance(op := reducer_options.get("op"), str) and op == "sum":
            raise InvalidInputError('op=\'sum\': local steps need a mean; pass "mean" or "mean_of_contributors"')
        if self._schedule.deadline:  # a rank that is late would hold up its node
            if reducer_options.get("nodes", "auto") not in ("auto", False):
                raise InvalidInputError(
                    f"deadline={quote(settings.deadline)} does not work with nodes=; remove one of them"
                )
            reducer_options["nodes"] = False
        self._comm: transport.Comm = comm  # the first use replaces it by its transport
        if self._schedule.deadline and not (ranks := self._connect()).threaded:
            raise InvalidInputError(
                f"rank {ranks.rank}: deadline={quote(settings.deadline)}: {ranks.library} does not support calls from "
                "a thread. Use an MPI that provides MPI_THREAD_MULTIPLE, a process group of PyTorch, or deadline=None"
            )
        completed = with_defaults(specs.values(), self._schedule.sync_every, **reducer_options)
        shared: dict[str, Any] = {**completed, "skip_nonfinite": settings.skip_nonfinite}
        self.reducers = tuple(
            Reducer({name: specs[name] for name in names}, density, comm=comm, **shared) for names in self.fragments
        )
        self._rules = Rules(self._schedule, outer, settings.fragment_update_alpha, float(shared["decay"]))
        self._settings: dict[str, object] = {  # that `rebuild` compares between ranks; errors show the keys
            **asdict(self._schedule),
            "fragment_update_alpha": settings.fragment_update_alpha,
            "density": density_at(density, 0),
            "type of outer optimizer": type(outer).__name__,
            **{key: quote(value) for key, value in sorted(shared.items()) if key not in _NOT_COMPARED},
            **{name: f"{spec.accumulator.name} {spec.shape}" for name, spec in specs.items()},
            "division into fragments": self.fragments,
        }
        self._phase = Phase.RESTING
        # The number of the round, and in it this rank's local steps, and the steps of the schedule that have passed.
        self._position = 0, 0, 0
        self._paces = Pace(), Pace()  # of this round, and of the latest round that has one
        self._timer = StepTimer(self._comm.clock if isinstance(self._comm, transport.Transport) else time.monotonic)
        self._deadline = Deadline(self._schedule.deadline or 0.0)
        # Exchanges that are not applied yet, by fragment and round, in the order in which they began.
        self._exchanges: dict[tuple[int, int], FragmentExchange] = {}
        self._due_events: deque[Event] = deque()  # exchanges to begin or apply now, in this order
        self._replaced: list[str] = []  # names that `step` has not returned yet
        self._latest: FragmentExchange | None = None  # the latest applied exchange
        self.left_out: tuple[int, ...] = ()

    @property
    def local_step(self) -> int:
        """The number of local steps taken in this round."""
        return self._position[1]

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        return self._position[0]

    @property
    def steps(self) -> tuple[int, ...]:
        """The number of local steps of each rank in this round. The first use connects the ranks."""
        return self._pace(self.round).steps or (self._schedule.sync_every,) * self._connect().size

    def __repr__(self) -> str:
        sizes = [spec.size for spec in self._globals.specs.values()]
        outer = type(self._outer).__name__ if self._outer is not None else None
        return (
            f"LocalSteps({len(sizes)} tensors of {sum(sizes):,} elements, sync_every={self._schedule.sync_every}, "
            f"fragments={len(self.fragments)}, outer={outer}; round {self.round}, local step {self.local_step})"
        )

    # -- local steps --------------------------------------------------------------------------------------------------

    def step(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Count a local step; begin and apply the exchanges that are due after it.

        Args:
            parameters: the local parameters, with the names, shapes, types and devices passed to the constructor.

        Returns:
            The names of the parameters that were written; usually none.

        Raises:
            InvalidInputError: the parameters do not fit. The local step has not been counted.
            CollectiveMismatchError: the ranks are at different steps of the schedule, or have different settings.
            WeightMismatchError: the global parameters differ between ranks.
            SparseCommError: the exchange failed, as in `Reducer.wait`. See **Errors** above.
        """
        with self._deadline.lock:
            self._timer.stop()
            late = self._phase is Phase.LEFT_OUT
            self._globals.check(parameters, self._names(self._due_events))
            errors = self._perform(parameters)  # left by an interrupted call, or by the deadline's thread
            if not late:  # otherwise this local step falls in a part of the round that has ended
                position, due = self._next_position()
                self._globals.check(parameters, self._names(due))
                self._position, self._due_events, self._phase = position, deque(due), Phase.EXCHANGING
                errors += self._perform(parameters)
            replaced = self._end_call(errors)
            self._phase, self._timer.started = Phase.TRAINING, self._timer.clock()
            if self._deadline.factor:
                self._deadline.step_begun(self)
            return replaced

    def finish(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Wait for the exchanges in flight, and apply them now. The deadline is disabled until `step`.

        Returns, Raises: as `step`.
        """
        with self._deadline.lock:
            self._timer.started = None
            self._globals.check(parameters, self._names(self._exchanges))
            applications = [Event(*key, False) for key in self._exchanges]
            self._due_events.extend([event for event in applications if event not in self._due_events])
            if self._phase is not Phase.LEFT_OUT:
                self._phase = Phase.EXCHANGING
            errors = self._perform(parameters)
            if self._latest is not None:
                self._latest.end_comparison()
                self._latest = None
            return self._end_call(errors)

    def rest(self) -> None:
        """Disable the deadline, and do not measure this rank's time, until the next local step.

        With a deadline, call it before you do anything for which the other ranks should wait, such as an evaluation.
        """
        with self._deadline.lock:
            self._timer.started = None
            if self._phase is Phase.TRAINING:
                self._phase = Phase.RESTING

    def _next_position(self) -> tuple[tuple[int, int, int], list[Event]]:
        """Return the position after one more local step, and the events that are due there."""
        (round_no, local_step, passed), sync_every = self._position, self._schedule.sync_every
        now = max(passed, self._schedule.passed(local_step + 1, self._local_steps(round_no)))
        due = self._schedule.events(round_no * sync_every + passed, round_no * sync_every + now)
        return (round_no, local_step + 1, now) if now < sync_every else (round_no + 1, 0, 0), due

    def _perform(self, parameters: Mapping[str, object]) -> list[BaseException]:
        """Begin and apply the exchanges that are due. Return the errors of failed ones."""
        errors: list[BaseException] = []
        while self._due_events:
            event = self._due_events[0]
            exchange = self._exchanges.get(event[:2])
            if event.begins:
                exchange = exchange or self._new_exchange(event)
                exchange.push(parameters)
                self._deadline.exchange_begun(self._connect(), self._schedule.begun_at(*event[:2]))
            elif exchange is not None:
                for other in self._exchanges.values():
                    if other is exchange or (exchange.late and other.fragment == exchange.fragment):
                        other.wait()
                self._replaced += exchange.apply(parameters, self._connect().rank)
                if exchange.error is not None:
                    errors.append(exchange.error)
                    self._deadline.reset()
                self._update_pace(exchange)
                self.left_out, self._latest = exchange.left_out, exchange
                del self._exchanges[event[:2]]
            self._due_events.popleft()
        return errors

    def _end_call(self, errors: list[BaseException]) -> tuple[str, ...]:
        """End a call: return the names of replaced parameters, or raise the first error."""
        self._phase = Phase.RESTING
        if errors:
            raise errors[0]
        replaced, self._replaced = tuple(dict.fromkeys(self._replaced)), []
        return replaced

    def _new_exchange(self, event: Event, *, late: bool = False) -> FragmentExchange:
        """Begin an exchange, and return it before anything is pushed."""
        fragment, round_no, _ = event
        exchange = FragmentExchange(fragment, round_no, self.reducers[fragment], self._globals, self._rules, late)
        begun_in = (self._schedule.begun_at(fragment, round_no) - 1) // self._schedule.sync_every
        exchange.begin(self._connect(), self._pace(begun_in).steps, self._timer.nanoseconds())
        self._exchanges[fragment, round_no] = exchange
        return exchange

    # -- the pace of the ranks, and the deadline ----------------------------------------------------------------------

    def _pace(self, round_no: int) -> Pace:
        """Return the pace of a round: this round, the previous one, or the next one if its pace is known."""
        return self._paces[round_no >= self._paces[1].round]

    def _local_steps(self, round_no: int) -> int:
        """Return the number of this rank's local steps in a round."""
        steps = self._pace(round_no).steps
        return steps[self._connect().rank] if steps else self._schedule.sync_every

    def _passed(self) -> int:
        """Return the number of steps of the schedule that have passed, over all rounds."""
        return self._position[0] * self._schedule.sync_every + self._position[2]

    def _update_pace(self, exchange: FragmentExchange) -> None:
        """Compute the pace of the next round after the last exchange of this one, which gathers durations."""
        schedule, last, round_no = self._schedule, self._paces[1], exchange.round + 1
        follows = (schedule.by_speed or schedule.deadline) and exchange.fragment == schedule.fragments - 1
        if follows and round_no > last.round and exchange.outcome is not Outcome.FAILED and exchange.nanoseconds:
            seconds = [1e-9 * duration for duration in exchange.nanoseconds]
            self._paces = self._pace(exchange.round), schedule.pace_after(last, round_no, seconds, exchange.left_out)

    def expected_seconds(self, step: int) -> float | None:
        """Return the expected time from a step of the schedule to the next exchange; ``None``: no deadline now."""
        started, schedule = self._timer.started, self._schedule
        if started is None or self._timer.clock() - started > self._connect().timeout:
            return None
        for exchange in self._exchanges.values():
            exchange.wait()
            self._update_pace(exchange)
            if exchange.outcome is Outcome.FAILED:
                return None
        part = (schedule.next_beginning(self._passed()) - step) / schedule.sync_every
        return part * self._pace(self.round).seconds or None

    def leave_out(self) -> None:
        """Begin the next exchange without the program, and advance this rank to it."""
        schedule, passed = self._schedule, self._passed()
        step = schedule.next_beginning(passed)
        due = schedule.events(passed, step)
        round_no, passed = divmod(step, schedule.sync_every)
        local_step = passed * self._local_steps(round_no) // schedule.sync_every
        if round_no == self.round:
            local_step = max(local_step, self.local_step)
        self._position, self._phase = (round_no, local_step, passed), Phase.LEFT_OUT
        self._due_events.extend(event for event in due if not event.begins)
        for event in due:
            if event.begins:
                exchange = self._new_exchange(event, late=True)
                exchange.push_residuals()
                self._deadline.exchange_begun(self._connect(), schedule.begun_at(*event[:2]))
                text = (
                    "rank %s is late for the exchange of fragment %s in round %s, %.3g s after its last local step; it "
                    "contributes only from its residual"
                )
                seconds = self._timer.clock() - (self._timer.started or 0.0)
                log.warning(text, self._connect().rank, event.fragment, event.round, seconds)

    # -- reports ------------------------------------------------------------------------------------------------------

    def global_parameters(self) -> dict[str, Array]:
        """Return the global parameters: the model to evaluate and to save.

        They are views with the parameters' shapes, in float32 (float64 for float64), which change with every exchange.
        """
        return self._globals.shaped()

    def report(self) -> str:
        """Return a small table of this rank, like `Reducer.report`, per round and for all fragments together."""
        total = Counters()
        for reducer in self.reducers:
            reducer.count_setup()
            total = total.added_to(reducer.counters)
        first, *others = self.reducers
        return "\n".join([total.table("round"), *first.report_lines(others)])

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Drop pseudo-gradients that have not been sent, of these parameters or of all. Call it on all ranks.

        Raises:
            InvalidInputError: a name is unknown, an exchange is in flight, or a step was interrupted.
        """
        with self._deadline.lock:
            wanted = known_names(names, self._globals.specs)
            self._check_idle("discard", exchanges_ended=True)
            for fragment, reducer in zip(self.fragments, self.reducers, strict=True):
                reducer.discard(set(fragment).intersection(wanted))
            self._globals.unsent.difference_update(wanted)

    # -- states and other ranks ---------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return this rank's state: NumPy arrays, numbers, lists and strings. Also in the middle of a round.

        It contains the global parameters, residuals, the outer optimizer's state, and the results of exchanges in
        flight, for which it waits. Save local parameters and the inner optimizer's state yourself, on each rank.

        Raises:
            InvalidInputError: `step` was interrupted, or this rank was left out of an exchange since its last local
                step. Call `finish` first.
        """
        with self._deadline.lock:
            ranks, (round_no, local_step, passed) = self._check_idle("state_dict"), self._position
            exchanges = self._exchanges.values()
            for exchange in exchanges:
                exchange.wait()
            fields = {
                "sync_every": self._schedule.sync_every,
                "fragment_sync_delay": self._schedule.delay,
                "round": round_no,
                "steps": list(self._pace(round_no).steps),
                "round_seconds": self._pace(round_no).seconds,
                "local_step": local_step,
                "passed": passed,
                "step_seconds": self._timer.estimate,
                "fragments": [list(names) for names in self.fragments],
                "global_parameters": self._globals.to_host(),
                "outer": None if self._outer is None else self._outer.state_dict(),
                "reducers": [reducer.state_dict() for reducer in self.reducers],
                "exchanges": [exchange.state() for exchange in exchanges],
                "late": [[exchange.fragment, exchange.round] for exchange in exchanges if exchange.late],
                "unsent": sorted(self._globals.unsent),
                "mixed": dict(self._globals.mixed),
            }
            return LOCAL_STEPS.state(ranks, fields)

    def load_state_dict(self, state: State) -> None:
        """Load what `state_dict` returned on this rank, or `reshard` made, and continue bit for bit. Collective.

        All ranks load, or none. Load the local parameters and the inner optimizer's state, too. It raises what
        `Reducer.load_state_dict` raises.
        """
        self.load_with(lambda undo: self.prepare_state(state, undo))

    def load_with(self, prepare: Callable[[Undo], Prepared]) -> None:
        """Load the state that ``prepare`` passes to `prepare_state`. Collective."""
        of_reducers = [f"reducers[{i}].{key}" for i in range(len(self.reducers)) for key in REDUCER.keys]
        keys = ["local_step", *LOCAL_STEPS.keys, *of_reducers]
        with self._deadline.lock:
            load(self._connect(), "load_state_dict() of LocalSteps", keys, prepare)

    def prepare_state(self, state: State, undo: Undo) -> Prepared:
        """Convert and check a state for `load_with`. Only the outer optimizer changes; ``undo`` can restore it."""
        ranks, shared, outer = self._check_idle("load_state_dict", exchanges_ended=True), self._globals, self._outer
        fields = LOCAL_STEPS.read_own(state, ranks)
        fields = fit(fields, shared.specs, self.fragments, self._schedule, outer is not None)
        states = zip(self.reducers, fields["reducers"], strict=True)
        reducer_states = [reducer.prepare_state(reducer_state) for reducer, reducer_state in states]
        exchanges = {}
        for saved in fields["exchanges"]:
            fragment, round_no = key = saved["fragment"], saved["round"]
            late = [fragment, round_no] in fields["late"]
            exchanges[key] = FragmentExchange(*key, self.reducers[fragment], shared, self._rules, late)
            exchanges[key].load(saved)
        parameters = shared.from_host(fields["global_parameters"])
        fields["outer"] = None if outer is None else load_outer(outer, fields["outer"], shared.specs, undo)
        common = {key: fields[key] for key in LOCAL_STEPS.keys}
        common["local_step"] = 0 if fields["steps"] else fields["local_step"]  # by speed, it differs between ranks
        for i, prepared in enumerate(reducer_states):
            common |= {f"reducers[{i}].{key}": value for key, value in prepared.common.items()}

        def commit() -> None:
            for prepared in reducer_states:
                prepared.commit()
            shared.set(parameters)
            self._position = fields["round"], fields["local_step"], fields["passed"]
            self._paces = (Pace(fields["round"], fields["steps"], fields["round_seconds"]),) * 2
            self._timer = StepTimer(self._timer.clock, fields["step_seconds"])
            self._exchanges = exchanges
            shared.compared.update(range(len(self.fragments)))
            shared.mixed, shared.unsent = dict(fields["mixed"]), set(fields["unsent"])
            self._deadline.reset()

        return Prepared(common, commit)

    def rebuild(self, comm: transport.Comm, parameters: Mapping[str, object], *, joining: bool = False) -> Rebuilt:
        """Continue with the ranks of another communicator, such as `shrink` or `grow` returned. Collective over them.

        It ends exchanges in flight: complete ones are applied, and pseudo-gradients of failed ones stay in the
        residuals. Then all ranks get the global parameters and the outer optimizer's state of the lowest rank that is
        not new, and the most advanced position in the schedule. If it fails because another rank died, call `shrink`
        and then `rebuild` again.

        Args:
            comm: as in the constructor.
            parameters: the local parameters. If this rank is new, they are set to the global ones.
            joining: whether this rank is new. At least one rank must not be new.

        Returns:
            As `Reducer.rebuild`. ``step`` is the round, and ``steps_apart`` counts steps of the schedule,
            ``sync_every`` per round.

        Raises:
            InvalidInputError: all ranks join, or the outer optimizer's state cannot be sent or loaded. All ranks raise.
            CollectiveMismatchError: a rank has another model, other settings or another version of the library.
            TransportError: a rank did not answer, or died.
        """
        with self._deadline.lock:
            self._timer.started = None
            self._globals.check(parameters, self._globals.specs)
            with suppress(SparseCommError):  # the pseudo-gradients of failed exchanges are in the residuals
                self.finish(parameters)
            self._exchanges, self._due_events, self._phase = {}, deque(), Phase.RESTING
            self._deadline.reset()
            ranks, shared, sync_every = transport.transport_of(comm), self._globals, self._schedule.sync_every
            nanoseconds = 0 if joining else self._timer.nanoseconds()
            members = self._compared_members(ranks, joining, nanoseconds)
            broadcast_outer(ranks, members.lead, self._outer, shared.specs)
            for reducer in self.reducers:
                reducer.rebuild(comm, joining=joining)
            shared.broadcast(ranks, members.lead)
            if joining:
                for name in shared.specs:
                    with shared.on_stream(name, parameters[name], writable=True) as local:
                        shared.mix_into(parameters, name, local, 0.0)
            self._comm, self._timer.clock, self.left_out = ranks, ranks.clock, ()
            round_no, passed = divmod(max(member.step for member in members.stay), sync_every)
            seconds = [1e-9 * member.words[-1] for member in members.all]
            self._paces = (self._schedule.pace_after(Pace(round_no), round_no, seconds),) * 2
            self._position = round_no, passed * self._local_steps(round_no) // sync_every, passed
            shared.compared.update(range(len(self.fragments)))
            elements = sum(spec.size for spec in shared.specs.values())
            return members.rebuilt(elements, steps_of_unit=sync_every, unit="round")

    def _compared_members(self, ranks: transport.Transport, joining: bool, nanoseconds: int) -> Members:
        """Gather the `Members` of ``ranks``, with ``nanoseconds`` of each; raise if settings differ. Collective."""
        try:
            library = version("sparsecomm")
        except PackageNotFoundError:  # a checkout that was not installed
            library = "0"
        what = ("call", "rebuild() of LocalSteps"), ("version of sparsecomm", library)
        try:
            label = Label.of(*what, *self._settings.items())
            return Members(ranks, self._comm, joining, self._passed(), [nanoseconds], label)
        except CollectiveMismatchError as error:
            raise CollectiveMismatchError(
                f"{error}. Create LocalSteps with the same model, settings and version of sparsecomm on all ranks "
                f"(rank {ranks.rank} has {library}), and call rebuild again"
            ) from error

    def _names(self, keys: Iterable[tuple[int, ...]]) -> list[str]:
        """Return the names of the parameters in the fragments of these events, or keys of exchanges."""
        return [name for fragment, *_ in keys for name in self.fragments[fragment]]

    def _connect(self) -> transport.Transport:
        if not isinstance(self._comm, transport.Transport):
            self._comm = transport.transport_of(self._comm)
        return self._comm

    def _check_idle(self, doing: str, *, exchanges_ended: bool = False) -> transport.Transport:
        """Check that no call was interrupted, this rank is not late, and, if asked, no exchange is in flight. Rest."""
        ranks = self._connect()
        self.rest()
        if self._phase is Phase.LEFT_OUT:
            raise InvalidInputError(
                f"rank {ranks.rank}: {doing} by a rank that was left out of an exchange since its last local step; "
                "call step or finish first, and call rest before you do anything else that takes long"
            )
        if self._phase is Phase.EXCHANGING:
            raise InvalidInputError(f"rank {ranks.rank}: {doing} after an interrupted step; call finish first")
        pending = any(exchange.outcome is Outcome.PENDING for exchange in self._exchanges.values())
        if exchanges_ended and pending:
            raise InvalidInputError(f"rank {ranks.rank}: {doing} with an exchange in flight; call finish first")
        return ranks
