"""Local steps, which a training loop calls after each step of its own optimizer."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from sparsecomm import config, transport
from sparsecomm.backends import default_float_mode
from sparsecomm.checks import quote, to_bool, to_float, with_options
from sparsecomm.errors import InvalidInputError, SparseCommError
from sparsecomm.local_steps.deadline import Watch
from sparsecomm.local_steps.defaults import DEFAULTS, with_defaults
from sparsecomm.local_steps.exchange import End, FragmentExchange, awaited
from sparsecomm.local_steps.fragments import SyncSchedule, split_names
from sparsecomm.local_steps.global_parameters import GlobalParameters
from sparsecomm.local_steps.members import compared_members, settings_words
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer, SharedState, load_outer
from sparsecomm.local_steps.pace import Pace, Pacing, StepTimer
from sparsecomm.local_steps.state import LOCAL_STEPS, fit
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.bucket import Streams
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.layout import NamedTensors
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.reducer.schedule import Schedule, density_at
from sparsecomm.reducer.state import REDUCER
from sparsecomm.states.loading import Prepared, Undo, load
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.sparse import SparseVector

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LocalSteps"]

_log = logging.getLogger("sparsecomm")
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0  # seconds from one look to the next, whether others wait for a rank that is late


class LocalSteps:
    """Trains by local steps, and sums sparsely what they did, once in a round (DiLoCo, SparseLoCo).

    Each rank trains its own parameters, the local ones, with an optimizer of its own. Once in a round of ``sync_every``
    steps it subtracts them from the global parameters, which are the same on all ranks. That difference is the
    pseudo-gradient. The ranks average it, by a `Reducer`; the outer optimizer changes the global parameters by the
    mean; and training goes on from them.

        local = sc.LocalSteps(parameters, sync_every=30)             # names and arrays
        for ...:
            optimizer.step()                                         # writes the parameters in place
            local.step(parameters)                                   # most often only counts
        model = local.global_parameters()

    What is not sent waits in residuals, and takes the place of the outer momentum (SparseLoCo: Sarfi et al., 2025,
    Algorithm 1). By default a rank selects 64 entries of each chunk of 4,096, in 2 bits each beside their index. The
    sums, all of them or the largest, twice as many as a rank selects, are divided by the number of ranks that sent
    something there.
    Residuals decay by 0.8 in a round, where SparseLoCo has 0.95: docs/reports/local-steps.md says why, and what else to
    choose.

    **Parameters that are not trained.** A rank has no pseudo-gradient for a parameter whose values still equal, bit for
    bit, those that the last exchange left. The parameter then counts as zeros on this rank, and this rank's residual of
    it stays as it is. If no rank has trained a parameter, its exchange changes nothing: neither the parameter, nor
    residuals, nor the outer optimizer's state. So a layer that you freeze stands still after the exchange that brings
    its last training. The comparison reads a parameter only up to its first change, so it costs nothing that matters.

    **Schedule.** A round is ``sync_every`` local steps. Fragment i of F is synchronised after local step
    (i + 1) * sync_every // F of each round, each fragment once, in the same order on all ranks. With a delay of d its
    exchange begins d local steps before (in the first round, after the first step at the earliest), goes on beside the
    local steps, and is applied at the same step as without.

    **Ranks that are not equally fast.** With ``by_speed`` each rank takes as many local steps as fit into a round: P
    times ``sync_every`` in all, divided so that all are done as early as possible. With ``round_seconds`` as many as
    fit into so many seconds. Each rank measures its steps, from the end of `step` to its next call, and tells the
    others in the exchanges. The numbers of the next round follow from that; in the first round all take
    ``sync_every``. They stay while others would make a round hardly shorter. The schedule and delays are then in parts
    of a round: a rank that takes n local steps counts sync_every / n of the above for each. The mean is not weighted:
    who takes more steps moves further. Train until `round` says that it is enough, not for a number of steps.

    **Deadline.** With ``deadline`` a rank is left out of an exchange if it does not come within so many times the time
    that the local steps since the last exchange are expected to take, while another rank waits for it. A thread takes
    part in its place and contributes nothing; `left_out` and a warning say so. What the rank has trained is not lost:
    when it comes, its parameters change as the global ones did, and what it has trained is in the next exchange that
    it comes to. If it is late again, what it had trained by then is in that one. Then it goes on from the place of the
    others: `round` may rise by several. So do what all ranks must do together, such as saving states, right after
    `step`, where `left_out` is empty. A rank that does not come for ``SPARSECOMM_TIMEOUT`` seconds, or whose process
    is stopped or dead, is waited for, until the others raise `TimeoutError`.

    **Errors.** `step` and `finish` raise the error of an exchange where it would be applied. It then counts for nobody:
    the outer optimizer makes no step, the fragment's local parameters are set to the global ones, and the
    pseudo-gradient is in the residuals, which the next exchange sends. The local step has been counted. So ranks that
    catch the error go on alike, with the next local step, or after `shrink` and `rebuild`. If the error came when some
    ranks had the result already (see docs/footguns.md), their global parameters differ: `rebuild` makes them equal.

    **Interrupts.** After an exception of a signal handler, such as Ctrl-C, call `finish` or go on with the next local
    step: what was interrupted goes on where it stopped. `round` and `local_step` say whether the step has been
    counted; if not, call `step` again. An outer optimizer other than `NesterovSGD` may have made a step in part. The
    fragment's next exchange then raises `WeightMismatchError` on all ranks, until `rebuild` has made them equal.

    **NaN.** With ``skip_nonfinite`` the same holds, without an error, if a pseudo-gradient was not finite on any rank,
    or the outer step would make a parameter or a velocity infinite. The latter is not checked for an outer optimizer
    other than `NesterovSGD`. Finite ones wait in the residuals, others are dropped, and so are entries that would
    overflow. Parameters of other fragments that are not finite are set to
    the global ones, too. Reset the inner optimizer's state where it holds NaN.

    **Checkpoints.** `state_dict` holds the global parameters, the residuals, the outer optimizer's state, and what an
    exchange under way has brought. The local parameters, which differ between ranks, and the inner optimizer's state
    are yours to save, on each rank.

    Args:
        parameters: names and tensors, or pairs of them: anything with ``__dlpack__`` that can be written in place. They
            are copied: the global parameters begin with them, and must be the same on all ranks, which compare
            checksums of them in the first exchange.
        density: share of the entries that each rank selects; or a function of a fragment's exchange, counted from 0: as
            in `Reducer`. At 1.0 the mean is dense and exact, whatever ``algorithm`` and ``wire`` are: a dense baseline.
        sync_every: local steps of a round; with ``by_speed`` of a rank on average, and of each in the first round.
        by_speed: whether faster ranks take more local steps in a round than slower ones, see above.
        round_seconds: how long a round is to take, without its exchanges; the ranks then take local steps by speed.
            ``None``: as long as ``sync_every`` local steps of a rank on average.
        deadline: who comes to an exchange later than after so many times the expected time is left out, see above;
            above 1. The constructor is then collective. ``None``: everybody is waited for.
        fragments: how many parts of neighbouring tensors, of about equal size, are synchronised in turn; or their
            names, part by part.
        fragment_sync_delay: local steps between the beginning of an exchange and its application, of a rank that takes
            ``sync_every`` in a round.
        fragment_update_alpha: how much of the local parameters is kept where an exchange is applied: local = alpha *
            local + (1 - alpha) * global. With a delay, 0 forgets the local steps since the exchange began: they are
            in no sum and in no residual.
        outer: the outer optimizer, such as `NesterovSGD`; ``None``: global = global - mean.
        comm: as in `sparse_allreduce`.
        skip_nonfinite: as in `Reducer`, see above.
        options: of the `Reducer`, with other defaults: ``scope="chunk"``, ``op="mean_of_contributors"``
            where the algorithm counts them, ``decay=0.8``, and ``wire="packed_int2"`` if no parameter is float64.
            ``algorithm="auto"`` takes "split:2" or "allgather", whichever comes to the same loss in less time.
            ``bucket_bytes`` is so large that one call sends all tensors of a fragment, but for small ones.

    Attributes:
        local_step: how many local steps of this round have been taken.
        round: its number, from 0.
        steps: how many local steps each rank takes in this round.
        left_out: ranks that had not come in time to the exchange that was applied last; the same on all ranks.
        reducers: one for each fragment.
        fragments: the names of each.

    Raises:
        InvalidInputError: an argument cannot be used, or a deadline with this transport.
    """

    @with_options(ReducerOptions, Reducer.__init__, **DEFAULTS)
    def __init__(
        self,
        parameters: NamedTensors,
        density: Schedule = 64 / 4096,
        *,
        sync_every: int = 30,
        by_speed: bool = False,
        round_seconds: float | None = None,
        deadline: float | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        outer: OuterOptimizer | None = None,
        comm: transport.Comm = None,
        skip_nonfinite: bool = True,
        **options: Unpack[ReducerOptions],
    ) -> None:
        pairs = interop.named(parameters, "parameters")
        self._globals = GlobalParameters(pairs, writable=self._in_place)
        specs = self._globals.specs
        self.fragments = split_names({name: spec.size for name, spec in specs.items()}, fragments)
        self._schedule = SyncSchedule(sync_every, len(self.fragments), fragment_sync_delay)
        self._pacing = Pacing.of(self._schedule, by_speed, round_seconds, deadline)
        alpha = to_float(fragment_update_alpha)
        if not 0 <= alpha <= 1:
            raise InvalidInputError(
                f"fragment_update_alpha={quote(fragment_update_alpha)}: expected a number from 0 to 1"
            )
        if outer is not None and not callable(getattr(outer, "step", None)):
            raise InvalidInputError(
                f"outer={quote(outer)}: expected an outer optimizer, such as NesterovSGD(), or None"
            )
        if isinstance(op := options.get("op"), str) and op == "sum":
            raise InvalidInputError("op='sum': expected a mean, which is as long as what one rank moves")
        self._alpha, self._outer = alpha, outer
        self._comm: transport.Comm = comm  # the transport, when it was needed
        if self._pacing.deadline and not (ranks := self._connect()).threaded:
            raise InvalidInputError(
                f"rank {ranks.rank}: deadline={quote(deadline)}: no thread may make calls over {ranks.library}, so "
                "nobody could take part for a rank that is late. Expected MPI_THREAD_MULTIPLE, which MPI must provide "
                "and mpi4py asks for, or a process group of PyTorch; or deadline=None"
            )
        options = with_defaults(specs.values(), self._schedule.sync_every, **options)
        tensors = dict(pairs)
        self.reducers = tuple(
            Reducer(
                {name: tensors[name] for name in names}, density, comm=comm, skip_nonfinite=skip_nonfinite, **options
            )
            for names in self.fragments
        )
        told = {key: value for key, value in options.items() if key not in ("on_step", "bucket_bytes")}
        self._settings = settings_words(
            [(name, spec.shape, spec.accumulator.name) for name, spec in specs.items()],
            self.fragments,
            self._schedule.sync_every,
            self._pacing.by_speed,
            self._pacing.round_seconds,
            self._pacing.deadline,
            self._schedule.delay,
            alpha,
            density_at(density, 0),
            type(outer).__name__,
            (to_bool("skip_nonfinite", skip_nonfinite), sorted((key, quote(value)) for key, value in told.items())),
        )
        # The round, the local steps that this rank has taken in it, and the steps of the schedule that have passed.
        self._place = 0, 0, 0
        self._paces = Pace(), Pace()  # of this round, and the last one that is known
        self._timer = StepTimer(self._comm.clock if isinstance(self._comm, transport.Transport) else time.monotonic)
        # Under way, or not applied yet, by fragment and round, in the order in which they began.
        self._exchanges: dict[tuple[int, int], FragmentExchange] = {}
        # What is to be begun, or otherwise applied, in this order: fragment, round, whether it begins. Empty between
        # steps, unless one was interrupted, or this rank is late.
        self._due: deque[tuple[int, int, bool]] = deque()
        # Fragments of which ranks have compared the global parameters, and no interrupt may have divided a step of the
        # outer optimizer since.
        self._compared: set[int] = set()
        self._latest: FragmentExchange | None = None  # that was applied
        # With an alpha: by name, a checksum of a local parameter as an exchange has left it.
        self._mixed: dict[str, int] = {}
        self._replaced: list[str] = []  # names of parameters that were replaced, until `step` returns them
        self.left_out: tuple[int, ...] = ()
        # Where there is a deadline. Methods that the program calls and `keep_up` hold the lock.
        self._lock = threading.RLock()
        self._watch: Watch | None = None
        self._idles = True  # the thread, until it is woken
        self._begun: tuple[End, int] | None = None  # of the last exchange, and after which step it began
        self._late = False  # exchanges have begun since the program was here last
        self._behind: dict[str, Array] = {}  # by name: what this rank had trained when it was late, and has not sent

    _in_place = True  # `_write` writes local parameters where they are: `sparsecomm.jax.LocalSteps` makes new ones

    @property
    def local_step(self) -> int:
        """How many local steps of this round have been taken."""
        return self._place[1]

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        return self._place[0]

    @property
    def steps(self) -> tuple[int, ...]:
        """How many local steps each rank takes in this round, by rank. The first use connects the ranks."""
        return self._pace(self.round).steps or (self._schedule.sync_every,) * self._connect().size

    def __repr__(self) -> str:
        sizes = [spec.size for spec in self._globals.specs.values()]
        schedule, outer = self._schedule, type(self._outer).__name__ if self._outer is not None else None
        return (
            f"LocalSteps({len(sizes)} tensors of {sum(sizes):,} elements, sync_every={schedule.sync_every}, "
            f"fragments={len(self.fragments)}, outer={outer}; round {self.round}, local step {self.local_step})"
        )

    # -- local steps --------------------------------------------------------------------------------------------------

    def step(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Count a local step; begin and apply the exchanges that are due after it.

        Args:
            parameters: the local ones, after the local step: the names, shapes, types and devices of the constructor's.

        Returns:
            The names of the parameters that were replaced, in place. Most often none.

        Raises:
            InvalidInputError: parameters are others. Nothing has changed.
            CollectiveMismatchError: ranks have taken unequally many local steps, or their settings differ.
            WeightMismatchError: in the first exchange: the global parameters differ.
            SparseCommError: the exchange failed, as in `Reducer.wait`. See above for what then holds.
        """
        with self._lock:
            self._timer.enter()
            errors: list[BaseException] = []
            if self._due:  # since an interrupt, or since this rank was late
                self._globals.check(parameters, self._names(self._due))
                errors = self._perform(parameters)
            if self._late:  # the local step belongs to the part of the round that has ended
                self._globals.check(parameters)
                self._leave_behind(parameters)
                self._late = False
            else:
                place, due = self._after_local_step()
                self._globals.check(parameters, self._names(due))
                self._place, self._due = place, due
                errors += self._perform(parameters)
            return self._ended(errors, goes_on=True)

    def finish(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Wait for the exchanges that are under way, and apply them now. Begin none. Nobody is left out after that.

        Returns, Raises: as `step`.
        """
        with self._lock:
            self._timer.rest()
            self._globals.check(parameters, self._names(self._exchanges))
            applies = [(*key, False) for key in self._exchanges]
            self._due = deque([*self._due, *(each for each in applies if each not in self._due)])
            errors = self._perform(parameters)
            self._late = False
            if self._latest is not None:
                self._latest.end_comparison()
                self._latest = None
            return self._ended(errors)

    def rest(self) -> None:
        """Let this rank be waited for, and its time not be measured, until the next local step.

        With a deadline, call it before the program does other things for which the others are to wait.
        """
        with self._lock:
            self._timer.rest()

    def global_parameters(self) -> dict[str, Array]:
        """Return the global parameters: views of their shapes, in float32 (float64 for float64), on their devices.

        They change with every exchange, and are the model to evaluate and to save.
        """
        return self._globals.shaped()

    def report(self) -> str:
        """Return a small table, of this rank: as `Reducer.report`, per round, of all fragments together."""
        total = Counters()
        for reducer in self.reducers:
            reducer.count_setup()
            total = total.added_to(reducer.counters)
        first, *others = self.reducers
        return "\n".join([total.table("round"), *first.report_lines(others)])

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return what this rank needs to go on as if it had not stopped: NumPy arrays, numbers, lists and texts.

        Also in the middle of a round. An exchange under way is waited for, and what it brought is in the state, to be
        applied where it is due; an error of it is raised there.

        Raises:
            InvalidInputError: an exception of a signal handler has interrupted `step`, or this rank was left out of an
                exchange since its last local step: call `finish` first.
        """
        with self._lock:
            ranks = self._idle("state_dict")
            for exchange in self._exchanges.values():
                self._wait(exchange)
            under_way = self._exchanges.values()
            round_no, local_step, passed = self._place
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
                "exchanges": [
                    {
                        "fragment": exchange.fragment,
                        "round": exchange.round,
                        "nanoseconds": list(exchange.nanoseconds),
                        "means": self._globals.to_host(self._means(exchange)) if exchange.usable else None,
                        "without_gradient": sorted(exchange.without_gradient),
                    }
                    for exchange in under_way
                ],
                "late": [
                    {
                        "fragment": exchange.fragment,
                        "round": exchange.round,
                        "sent": self._globals.to_host(exchange.sent),
                    }
                    for exchange in under_way
                    if exchange.late
                ],
                "mixed": dict(self._mixed),
            }
            return LOCAL_STEPS.state(ranks, fields)

    def load_state_dict(self, state: State) -> None:
        """Go on from a state that `state_dict` returned on this rank of as many ranks, bit for bit; or `reshard`.

        Collective: all ranks load, or none. Load the local parameters and the inner optimizer's state, too. The outer
        optimizer loads its state before the ranks compare what they have; if one refuses, it is given its own again.

        Raises:
            InvalidInputError: it does not fit, or another rank's does not; the message names the rank, the key, what
                was found and what was expected. Nothing has changed on any rank.
            CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as `Reducer.load_state_dict`.
        """
        self.load_with(lambda undo: self.prepare_state(state, undo))

    def load_with(self, prepare: Callable[[Undo], Prepared]) -> None:
        """Load a state with what an integration makes of it: on all ranks, or on none. Collective.

        Args:
            prepare: as `sparsecomm.states.loading.load` takes it; it calls `prepare_state`.
        """
        inner = [f"reducers[{i}].{key}" for i in range(len(self.reducers)) for key in REDUCER.keys]
        with self._lock:
            load(self._connect(), "LocalSteps", ["local_step", *LOCAL_STEPS.keys, *inner], prepare)

    def prepare_state(self, state: State, undo: Undo) -> Prepared:
        """Convert and check a state, for `load_with`. Nothing is sent.

        Args:
            undo: to which is appended what gives the outer optimizer back its state; nothing else has changed.

        Raises:
            InvalidInputError: `load_state_dict` would not take it.
        """
        ranks = self._idle("load_state_dict", ended=True)
        shared, outer = self._globals, self._outer
        settings = self.fragments, self._schedule, self._pacing.by_speed, outer is not None
        found = fit(LOCAL_STEPS.read_own(state, ranks), shared.specs, *settings)
        inner = [reducer.prepare_state(each) for reducer, each in zip(self.reducers, found["reducers"], strict=True)]
        exchanges = [
            (i, round_no, means and shared.from_host(means), nanoseconds, sent and shared.from_host(sent), without)
            for i, round_no, means, nanoseconds, sent, without in found["under_way"]
        ]
        parameters = shared.from_host(found["global_parameters"])
        found["outer"] = None if outer is None else load_outer(outer, found["outer"], shared.specs, undo)
        common = {key: found[key] for key in LOCAL_STEPS.keys}
        common["local_step"] = 0 if found["steps"] else found["local_step"]  # by speed, ranks differ in it
        for i, each in enumerate(inner):
            common |= {f"reducers[{i}].{key}": value for key, value in each.common.items()}

        def commit() -> None:
            for each in inner:
                each.commit()
            shared.set(parameters)
            self._place = found["round"], found["local_step"], found["passed"]
            self._paces = (Pace(found["round"], found["steps"], found["round_seconds"]),) * 2
            self._timer = StepTimer(self._timer.clock, found["step_seconds"])
            self._compared.update(range(len(self.fragments)))
            self._exchanges = {made[:2]: FragmentExchange(*made) for made in exchanges}
            self._begun, self._behind, self._mixed = None, {}, dict(found["mixed"])

        return Prepared(common, commit)

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Set residuals to zero: parts of pseudo-gradients that have not been sent are dropped. Call it on all ranks.

        The parameters and the outer optimizer's state stay as they are.

        Args:
            names: names of the parameters; ``None``: all of them.

        Raises:
            InvalidInputError: there is no parameter of such a name, an exchange is under way, or `step` was
                interrupted. Nothing has changed.
        """
        with self._lock:
            wanted = self._globals.known(names)
            self._idle("discard", ended=True)
            for fragment, reducer in zip(self.fragments, self.reducers, strict=True):
                reducer.discard([name for name in fragment if name in wanted])

    # -- other ranks --------------------------------------------------------------------------------------------------

    def rebuild(self, comm: transport.Comm, parameters: Mapping[str, object], *, joining: bool = False) -> Rebuilt:
        """Go on with the ranks of another communicator, such as `shrink` or `grow` returned. Collective over them.

        Exchanges under way are ended: those that have come are applied, those that failed are in the residuals. Then
        all ranks get the global parameters and the outer optimizer's state of the lowest rank that is not new, and the
        place in the round of the one that has come furthest. Survivors keep their residuals, and their local
        parameters, with what they did in this round. If it fails, because one more rank died, shrink, and call it
        again.

        Args:
            comm: as of the constructor.
            parameters: the local ones. Those of a new rank are set to the global ones.
            joining: this rank is new. One rank at least must not be.

        Returns:
            Who was lost and who joined, and what is gone with the lost: see `Reducer.rebuild`. ``step`` is the round,
            and ``steps_apart`` is in local steps of a rank that takes ``sync_every`` in a round.

        Raises:
            InvalidInputError: all ranks join, ``comm`` or ``parameters`` cannot be used; or the outer optimizer's state
                is not made of arrays and plain values, or a rank cannot load it. All ranks raise it, before they have
                changed anything.
            CollectiveMismatchError: a rank has another model, other settings or another version of the library; the
                message says which, and in what it differs.
            TransportError: a rank did not answer, or died.
        """
        with self._lock:
            self._timer.rest()
            self._globals.check(parameters, self._globals.specs)
            with suppress(SparseCommError):
                LocalSteps.finish(self, parameters)  # that of JAX takes a tree
            self._exchanges, self._due, self._begun, self._behind = {}, deque(), None, {}
            ranks, specs, sync_every = transport.transport_of(comm), self._globals.specs, self._schedule.sync_every
            outer = SharedState(self._outer, specs)
            nanoseconds = 0 if joining else self._timer.nanoseconds()
            words = [*self._settings, nanoseconds, outer.nbytes]
            place = self._place[0] * sync_every + self._place[2]
            members = compared_members(ranks, self._comm, joining, place, words)
            root = members.lead
            outer.broadcast(ranks, root, members.all[root].words[-1])
            for reducer in self.reducers:
                reducer.rebuild(comm, joining=joining)
            self._globals.broadcast(ranks, root)
            if joining:
                for name in specs:
                    with self._globals.on_stream(name, parameters[name], writable=self._in_place) as local:
                        self._write(name, local, self._globals[name])
            self._comm, self._timer.clock, self.left_out = ranks, ranks.clock, ()
            round_no, passed = divmod(max(member.step for member in members.stay), sync_every)
            pace = self._pacing.after(Pace(round_no), round_no, [1e-9 * member.words[-2] for member in members.all])
            self._paces = pace, pace
            self._place = round_no, passed * self._local_steps(round_no) // sync_every, passed
            self._compared.update(range(len(self.fragments)))
            elements = sum(spec.size for spec in specs.values())
            return members.rebuilt(elements, steps_of_unit=sync_every, unit="round")

    # -- the schedule ------------------------------------------------------------------------------------------------

    def _pace(self, round_no: int) -> Pace:
        """Return the pace of this round, of the one before, or of the next one if it is known."""
        return self._paces[round_no >= self._paces[1].round]

    def _local_steps(self, round_no: int) -> int:
        """Return how many local steps this rank takes in a round."""
        steps = self._pace(round_no).steps
        return steps[self._connect().rank] if steps else self._schedule.sync_every

    def _after_local_step(self) -> tuple[tuple[int, int, int], deque[tuple[int, int, bool]]]:
        """Return the place after one more local step, and what is due there."""
        (round_no, local_step, passed), sync_every = self._place, self._schedule.sync_every
        local_step += 1
        now = max(passed, self._schedule.passed(local_step, self._local_steps(round_no)))
        due = self._events(round_no * sync_every + passed, round_no * sync_every + now)
        return (round_no, local_step, now) if now < sync_every else (round_no + 1, 0, 0), due

    def _events(self, first: int, last: int) -> deque[tuple[int, int, bool]]:
        """Return what is due after one step of the schedule, up to another one."""
        schedule, due = self._schedule, deque[tuple[int, int, bool]]()
        for step in range(first + 1, last + 1):
            due += [(fragment, round_no, True) for fragment, round_no in schedule.begins(step)]
            due += [(fragment, (step - 1) // schedule.sync_every, False) for fragment in schedule.applies(step)]
        return due

    def _follow_speeds(self, exchange: FragmentExchange) -> None:
        """Take the pace of the next round from what the ranks have said in the last exchange of this one."""
        pacing, last, round_no = self._pacing, self._paces[1], exchange.round + 1
        if not (pacing.by_speed or pacing.deadline) or exchange.fragment < len(self.fragments) - 1:
            return
        if round_no > last.round and exchange.error is None and exchange.nanoseconds:
            seconds = [1e-9 * each for each in exchange.nanoseconds]
            self._paces = self._pace(exchange.round), pacing.after(last, round_no, seconds, exchange.left_out)

    # -- late ranks --------------------------------------------------------------------------------------------------

    def keep_up(self) -> float | None:
        """Take part in the next exchange if its deadline is over, and the program has not come to it.

        A thread calls this.

        Returns:
            In how many seconds to call it again; ``None``: when it is woken.
        """
        try:
            with self._lock:
                ranks, self._idles = self._connect(), True
                remaining = self._remaining()
                self._idles = remaining is None
            if remaining is not None and remaining <= 0:
                waits = awaited(ranks)  # this waits for the calls in the queue, and the program's steps do not
                with self._lock:
                    remaining = self._remaining()
                    if remaining is not None and remaining <= 0 and waits:
                        self._leave_out()
                        remaining = None
                    elif remaining is not None and remaining <= 0:
                        remaining = min(_MAX_PAUSE, _MIN_PAUSE - remaining / 10)
                    self._idles = remaining is None
            return remaining
        except Exception as error:
            with self._lock:
                self._idles = True
                self._timer.rest()
                _log.warning("rank %s: no deadline holds until the next local step: %s", self._connect().rank, error)
            return None

    def _remaining(self) -> float | None:
        """Return in how many seconds the deadline of the next exchange is over; ``None``: it has none yet."""
        left, now = self._timer.left, self._timer.clock()
        if left is None or self._begun is None or now - left > config.timeout():
            return None
        (end, step), schedule = self._begun, self._schedule
        if end.seconds is None:
            return None
        for exchange in self._exchanges.values():
            self._wait(exchange)
            self._follow_speeds(exchange)
            if exchange.error is not None:
                return None
        part = (schedule.next_beginning(self._passed()) - step) / schedule.sync_every
        seconds = self._pace(self.round).seconds
        return end.seconds + self._pacing.deadline * part * seconds - now if seconds else None

    def _leave_out(self) -> None:
        """Begin the next exchange without the program, and move on to its place in the schedule."""
        schedule, passed, transport = self._schedule, self._passed(), self._connect()
        step = schedule.next_beginning(passed)
        due = self._events(passed, step)
        round_no, passed = divmod(step, schedule.sync_every)
        local_step = passed * self._local_steps(round_no) // schedule.sync_every
        if round_no == self.round:
            local_step = max(local_step, self.local_step)
        self._place, self._late = (round_no, local_step, passed), True
        for fragment, round_of, begins in due:
            if not begins:
                self._due.append((fragment, round_of, False))
                continue
            names = self.fragments[fragment]
            sent = {name: self._behind.pop(name) for name in names if name in self._behind}
            exchange = self._made(fragment, round_of, sent)
            with Streams(self._globals.on_stream_of(name) for name in names):
                for name in names:
                    if name in sent:
                        exchange.means[name] = sent[name].copy()
                    exchange.push(name, self._globals.specs[name].shape)
            exchange.compare()
            self._note(exchange)
            _log.warning(
                "rank %s has not come to the exchange of fragment %s in round %s in time, %.3g s after its last local "
                "step: %s",
                transport.rank,
                fragment,
                round_of,
                self._timer.clock() - (self._timer.left or 0.0),
                "what it had trained by then is in it"
                if sent
                else "it is left out, and what it has trained will be in the next one to which it comes",
            )

    def _leave_behind(self, parameters: Mapping[str, object]) -> None:
        """Keep what this rank has trained, for the next exchanges if it is late again."""
        under_way = self._exchanges.values()
        for fragment, names in enumerate(self.fragments):
            mine = [exchange for exchange in under_way if exchange.fragment == fragment]
            if all(exchange.late for exchange in mine):
                for name in names:
                    with self._globals.on_stream(name, self._local(name, parameters)) as local:
                        sent = [exchange.sent[name] for exchange in mine if name in exchange.sent]
                        self._behind.pop(name, None)
                        if sent or self._trained(name, local):
                            kept = self._globals.difference(name, local)
                            for each in sent:
                                kept -= each
                            if kept.any():
                                self._behind[name] = kept

    def _passed(self) -> int:
        """Return how many steps of the schedule have passed, over all rounds."""
        return self._place[0] * self._schedule.sync_every + self._place[2]

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def _perform(self, parameters: Mapping[str, object]) -> list[BaseException]:
        """Begin and apply what is due. Return the errors of exchanges."""
        errors: list[BaseException] = []
        while self._due:
            fragment, round_no, begins = self._due[0]
            if begins:
                self._begin(fragment, round_no, parameters)
            elif (exchange := self._exchanges.get((fragment, round_no))) is not None:
                names = self._apply(exchange, parameters)
                self._replaced += names
                if exchange.error is not None:
                    errors.append(exchange.error)
                    self._begun = None
                self._follow_speeds(exchange)
                self.left_out = exchange.left_out
                self._latest = exchange
                del self._exchanges[fragment, round_no]
            self._due.popleft()
        return errors

    def _ended(self, errors: list[BaseException], *, goes_on: bool = False) -> tuple[str, ...]:
        """Return the names of parameters that were replaced, or raise. ``goes_on``: the program trains now."""
        if errors:
            raise errors[0]
        if goes_on:
            self._timer.leave()
            if self._pacing.deadline:
                if self._watch is None:
                    self._watch = Watch(self)
                if self._idles:
                    self._watch.wake()
        replaced = tuple(dict.fromkeys(self._replaced))
        self._replaced = []
        return replaced

    def _begin(self, fragment: int, round_no: int, parameters: Mapping[str, object]) -> None:
        """Begin an exchange, and push the pseudo-gradients of its fragment that have not been pushed."""
        names, shared = self.fragments[fragment], self._globals
        exchange = self._exchanges.get((fragment, round_no))
        if exchange is None:
            exchange = self._made(fragment, round_no)
        for name in filter(exchange.lacks, names):
            local = self._local(name, parameters)
            with shared.on_stream(name, local) as tensor:
                exchange.push_difference(name, shared[name], local if self._trained(name, tensor) else None)
        exchange.compare()
        self._forget_behind(names)
        self._note(exchange)

    def _trained(self, name: str, local: interop.Tensor) -> bool:
        """Return whether this rank has changed a parameter since the last exchange; on the stream where it is ready.

        A parameter without elements counts as trained, so that ranks need not tell each other that it was not.
        """
        if not local.size:
            return True
        if self._globals.equals(name, local):
            return False
        left = self._mixed.get(name)
        return left is None or left != self._globals.checksum_of(local)

    def _made(self, fragment: int, round_no: int, sent: Mapping[str, Array] | None = None) -> FragmentExchange:
        """Return an exchange that has begun, of which nothing has been pushed; ``sent``: as there."""
        names, schedule, by_speed = self.fragments[fragment], self._schedule, self._pacing.by_speed
        checksum = 0 if fragment in self._compared else self._globals.checksum(names)
        division = schedule.steps_between(fragment, round_no)
        if by_speed:
            begun_in = (schedule.begun_at(fragment, round_no) - 1) // schedule.sync_every
            division = zlib.crc32(repr((self._pacing, schedule, self._pace(begun_in).steps)).encode())
        exchange = FragmentExchange.begun(
            fragment,
            round_no,
            self._connect(),
            self.reducers[fragment],
            division,
            checksum,
            self._timer.nanoseconds(),
            by_speed=by_speed,
            tells_first=bool(by_speed or self._pacing.deadline),
            sent=sent,
        )
        self._exchanges[fragment, round_no] = exchange
        self._compared.add(fragment)
        return exchange

    def _note(self, exchange: FragmentExchange) -> None:
        """Count the next deadline from the end of an exchange, of which all has been pushed."""
        if self._pacing.deadline and self._watch is not None:
            end = exchange.end(self._timer.clock, self._watch.wake)
            self._begun = end, self._schedule.begun_at(exchange.fragment, exchange.round)

    def _wait(self, exchange: FragmentExchange) -> None:
        """Wait until the calls of an exchange have ended, which counts if the outer step leaves all finite."""
        outer = self._outer
        plain = outer if isinstance(outer, NesterovSGD) and type(outer) is NesterovSGD else None
        if exchange.ended or (outer is not None and plain is None):  # of other optimizers it is not known before
            exchange.wait()
            return

        def accept(sums: Mapping[str, SparseVector], largest: float) -> bool:
            found = {}
            for name in self._globals.on_streams(self.fragments[exchange.fragment]):
                mean = exchange.means.get(name, sums.get(name))
                if mean is not None and len(indices := self._globals.overflows(name, mean, largest, plain)):
                    found[name] = indices
            exchange.overflows = found
            return not found

        exchange.wait(accept)

    def _means(self, exchange: FragmentExchange) -> dict[str, Array]:
        """Return the means as flat arrays."""
        names = [name for name in self.fragments[exchange.fragment] if name not in exchange.without_gradient]
        return {name: self._mean(exchange, name) for name in self._globals.on_streams(names)}

    def _mean(self, exchange: FragmentExchange, name: str) -> Array:
        """Return a mean as a flat array, on the stream of the global parameter."""
        mean = exchange.means.get(name)
        return self._globals.dense(name, exchange.sums.get(name)) if mean is None else mean

    def _forget_behind(self, names: Iterable[str]) -> None:
        for name in names:
            self._behind.pop(name, None)

    @default_float_mode
    def _apply(self, exchange: FragmentExchange, parameters: Mapping[str, object]) -> list[str]:
        """Wait for an exchange and apply it. Return the names of parameters that were replaced."""
        self._wait(exchange)
        names, shared = list(self.fragments[exchange.fragment]), self._globals
        keeps = exchange.late and (exchange.usable or not exchange.sent)  # what this rank has trained is not in it
        if not keeps:
            self._forget_behind(names)
        if exchange.usable:
            names = [name for name in names if name not in exchange.without_gradient]
            self._step_outer(exchange, [name for name in names if name not in exchange.applied], parameters)
        else:
            names = [] if keeps else names
        if not exchange.usable and exchange.error is None:
            exchange.drop_overflows()
            _log.warning(
                "rank %s: round %s, fragment %s was not applied, since a pseudo-gradient was not finite on some rank, "
                "or parameters would not be",
                self._connect().rank,
                exchange.round,
                exchange.fragment,
            )
            names += [name for name in shared.specs if name not in names and not self._finite(name, parameters)]
        alpha = self._alpha if exchange.usable else 0.0
        for name in names:
            if name not in exchange.written:
                self._mixed.pop(name, None)
                with shared.on_stream(name, self._local(name, parameters), writable=self._in_place) as local:
                    if keeps and exchange.usable:
                        if name not in exchange.moved:
                            sent = exchange.sent.get(name)
                            exchange.moved[name] = shared.shifted(name, local, exchange.before[name], sent)
                        self._write(name, local, exchange.moved[name])
                    elif alpha and self._in_place:
                        shared.mix_into(name, local, alpha)
                    else:
                        self._write(name, local, shared.mixed(name, local, alpha))
                    exchange.written.add(name)
                if alpha and not keeps:  # an interrupt before this has the parameter count as trained
                    with shared.on_stream(name, self._local(name, parameters)) as local:
                        self._mixed[name] = shared.checksum_of(local)
        return names

    def _step_outer(self, exchange: FragmentExchange, names: list[str], parameters: Mapping[str, object]) -> None:
        """Change global parameters by the means of an exchange, and note which."""
        outer, shared = self._outer, self._globals
        together = getattr(outer, "step_together", None)
        try:
            with Streams(shared.on_stream(name, parameters[name]) for name in names):
                for name in names if exchange.late else ():
                    if name not in exchange.before:
                        exchange.before[name] = shared[name].copy()
                if together is not None and names:
                    together({name: (shared[name], self._mean(exchange, name)) for name in names})
                    exchange.applied.update(names)
                    return
                for name in names:
                    if outer is not None:
                        outer.step(name, shared[name], self._mean(exchange, name))
                    elif (mean := exchange.means.get(name, exchange.sums.get(name))) is not None:
                        shared.subtract(name, mean)
                    exchange.applied.add(name)
        except BaseException:
            if outer is not None and type(outer) is not NesterovSGD:  # which makes its whole step, or none
                self._compared.discard(exchange.fragment)
            raise

    def _local(self, name: str, parameters: Mapping[str, object]) -> object:
        """Return the local parameter as it is now."""
        return parameters[name]

    def _write(self, name: str, local: interop.Tensor, values: Array) -> None:
        """Set a local parameter to these values, rounded to its type; on the stream where it is ready."""
        self._globals.write(local, values)

    def _finite(self, name: str, parameters: Mapping[str, object]) -> bool:
        with self._globals.on_stream(name, self._local(name, parameters)) as local:
            return self._globals.finite(local)

    def _names(self, events: Iterable[tuple[int, ...]]) -> list[str]:
        """Return the names of fragments, which are the first items of these."""
        return [name for fragment, *_ in events for name in self.fragments[fragment]]

    def _connect(self) -> transport.Transport:
        self._comm = ranks = transport.transport_of(self._comm)  # that of a transport is itself
        return ranks

    def _idle(self, doing: str, *, ended: bool = False) -> transport.Transport:
        """Return the transport, if no step was interrupted; ``ended``: nor is any exchange under way.

        Raises:
            InvalidInputError: one is.
        """
        transport = self._connect()
        self._timer.rest()
        if self._late:
            raise InvalidInputError(
                f"rank {transport.rank}: {doing} by a rank that was left out of an exchange since its last local step; "
                "call step or finish first, with the local parameters; save states right after a step, and call rest "
                "before what takes long"
            )
        if self._due:
            raise InvalidInputError(
                f"rank {transport.rank}: {doing} after an interrupted step; call finish first, "
                "with the local parameters"
            )
        if ended and not all(exchange.ended for exchange in self._exchanges.values()):
            raise InvalidInputError(f"rank {transport.rank}: {doing} with an exchange under way; call finish first")
        return transport
