"""`FragmentExchange`: begin the exchange of a fragment, push pseudo-gradients, and apply their means."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.backends.base import on_streams
from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import CollectiveMismatchError, SparseCommError, WeightMismatchError
from sparsecomm.local_steps.global_parameters import GlobalParameters
from sparsecomm.local_steps.outer import NesterovSGD, OuterOptimizer
from sparsecomm.local_steps.schedule import SyncSchedule
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.step import error_of
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["FragmentExchange", "Outcome", "Rules", "gather_of"]

_log = logging.getLogger("sparsecomm")
_LABEL = zlib.crc32(b"local steps") or 1
_WORDS = 6  # round, fragment, division into local steps, checksum of globals, nanoseconds of a local step, late
_COMPARED = 4  # the first words, which must be equal on all ranks


class Outcome(Enum):
    """How an exchange has ended."""

    PENDING = auto()  # not yet
    USABLE = auto()  # its sums can be applied
    NOT_FINITE = auto()  # a pseudo-gradient, or the outer step, is not finite on some rank
    FAILED = auto()  # a call raised an error


class Rules(NamedTuple):
    """The settings of `LocalSteps` that exchanges use."""

    schedule: SyncSchedule
    outer: OuterOptimizer | None
    alpha: float  # ``fragment_update_alpha``
    decay: float  # of the residuals


def gather_of(transport: Transport, words: Sequence[int] = (0,) * _WORDS) -> WordsGather:
    """Return the call that gathers the words of all ranks."""
    return WordsGather(transport, list(words), _LABEL)


class FragmentExchange:
    """An exchange that has begun and is not applied yet.

    The reducer's calls sum the pseudo-gradients. One more call gathers six words of each rank. The first four words are
    also in the label of the reducer's calls. If they differ, these calls fail on all ranks, the pseudo-gradients stay
    in the residuals, and the gathered words say what differs. So usually the words are gathered last, and are only
    waited for if the sums have failed. After an interrupt, each method may be called again.
    """

    def __init__(
        self, fragment: int, round_no: int, reducer: Reducer, shared: GlobalParameters, rules: Rules, late: bool
    ) -> None:
        self.fragment, self.round = fragment, round_no  # the round in which it is applied
        self.late = late  # whether the deadline's thread has begun it, without the program's parameters
        self.names = reducer.names
        self.outcome = Outcome.PENDING
        self.error: BaseException | None = None
        self.without_gradient: frozenset[str] = frozenset()  # parameters that no rank has trained; they do not change
        self.nanoseconds: tuple[int, ...] = ()  # the duration of a local step, by rank; empty: unknown
        self.left_out: tuple[int, ...] = ()  # the ranks that were late
        self._reducer, self._shared, self._rules = reducer, shared, rules
        self._comparison: Handle | None = None
        self._reducer_error: BaseException | None = None
        self._sums: Mapping[str, SparseVector] = {}  # without sums that are zero
        self._means: dict[str, Array] = {}  # used instead of sums if the exchange was loaded from a state
        self._overflows: dict[str, Array] = {}  # the indices at which the outer step would overflow
        self._stepped: set[str] = set()  # names whose global parameter has been updated
        self._was_trained: dict[str, bool] = {}  # if late: whether this rank's training was moved to the residual
        self._written: set[str] = set()  # names whose local parameter has been written

    def state(self) -> StateDict:
        """Return the results of an exchange that has ended. "means" is ``None`` unless it is usable."""
        shared, means = self._shared, None
        if self.outcome is Outcome.USABLE:
            names = shared.on_streams([name for name in self.names if name not in self.without_gradient])
            means = shared.to_host({name: self._mean(name) for name in names})
        return {
            "fragment": self.fragment,
            "round": self.round,
            "nanoseconds": list(self.nanoseconds),
            "means": means,
            "without_gradient": sorted(self.without_gradient),
        }

    def load(self, state: State) -> None:
        """Load the results that `state` returned."""
        if (means := state["means"]) is not None:
            self._means = self._shared.from_host(means)
        self.outcome = Outcome.NOT_FINITE if means is None else Outcome.USABLE
        self.nanoseconds, self.without_gradient = tuple(state["nanoseconds"]), frozenset(state["without_gradient"])

    # -- pseudo-gradients go in ---------------------------------------------------------------------------------------

    def begin(self, transport: Transport, steps: Sequence[int], nanoseconds: int) -> None:
        """Prepare the words, before a push. ``nanoseconds`` is the duration of this rank's local step; 0: unknown."""
        self._step, self._transport, schedule = self._reducer.step, transport, self._rules.schedule
        division = schedule.steps_between(self.fragment, self.round)
        if schedule.by_speed:
            division = zlib.crc32(repr((schedule, steps)).encode())
        compared = self._shared.compared  # the same on all ranks, or the exchange fails
        checksum = 0 if self.fragment in compared else self._shared.checksum(self.names)
        words = [self.round, self.fragment, division, checksum, nanoseconds, self.late]
        self._gather = gather_of(transport, words)
        self._reducer.label = " ".join(map(str, words[:_COMPARED]))
        self._words_first = bool(schedule.by_speed or schedule.deadline)  # all ranks need them
        if self._words_first:
            self._comparison = queue_of(transport).submit(self._gather)
        compared.add(self.fragment)

    def push(self, parameters: Mapping[str, object]) -> None:
        """Push the pseudo-gradients, and begin the calls."""
        shared = self._shared
        for name in self.names:
            if self._reducer.step == self._step and not self._reducer.pushed(name):
                with shared.on_stream(name, parameters[name]) as local:
                    self._push(name, parameters[name] if shared.trained(name, local) else self._unchanged(name))
        self._end_pushes()

    def push_residuals(self) -> None:
        """Push, for a late rank, only training of earlier rounds that residuals hold, and begin the calls."""
        with on_streams(self._shared.on_stream_of(name) for name in self.names):
            for name in self.names:
                self._push(name, self._unchanged(name))
        self._end_pushes()

    def _push(self, name: str, after: object | None) -> None:
        """Push the global parameter minus the local one, ``after``; ``None``: there is no pseudo-gradient."""
        before = self._shared[name]
        self._reducer.push_with(name, after, lambda backend, x, *rest: backend.add_difference(before, x, *rest))

    def _unchanged(self, name: str) -> Array | None:
        """Return the global parameter, as if unchanged by training, if the residual holds unsent training."""
        shared = self._shared
        return shared[name].reshape(shared.specs[name].shape) if name in shared.unsent else None

    def _end_pushes(self) -> None:
        """Begin the calls that an interrupt of a push has left out, and gather the words unless this has begun."""
        self._reducer.start_ready()
        if self._comparison is None:
            self._comparison = queue_of(self._transport).submit(self._gather)
        self._shared.unsent.difference_update(self.names)

    # -- sums come out ------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the calls have ended, and set `outcome`."""
        if self.outcome is not Outcome.PENDING:
            return
        if self._reducer.step == self._step:
            known = self._rules.outer is None or type(self._rules.outer) is NesterovSGD
            try:
                self._reducer.wait(self._fits if known else None)
            except BaseException as error:
                if self._reducer.step == self._step:
                    raise  # the wait was interrupted
                self._reducer_error = error
        step, raised = self._reducer.last, self._reducer_error
        needs_words = step is None or self._words_first or not self._transport.threaded
        different = self._compare() if needs_words else None
        if step is None:
            if different is not None and different.__cause__ is raised:
                different = None  # the words were not gathered, because a sum had failed
            self.error, self.outcome = different or raised, Outcome.FAILED
            return
        self._sums, self.without_gradient = step.left, step.without_gradient
        self.outcome = Outcome.USABLE if step.usable else Outcome.NOT_FINITE
        if raised is not None or (different is not None and not isinstance(different, SparseCommError)):
            raise raised or different  # type: ignore[misc]  # an interrupt after the sums were complete
        if different is not None:
            _log.info("fragment %s was summed, although the ranks could not be compared: %s", self.fragment, different)

    def _fits(self, sums: Mapping[str, SparseVector], largest: float) -> bool:
        """Return whether all values stay finite in the outer step: see `Reducer.wait`."""
        shared, outer = self._shared, self._rules.outer
        nesterov = outer if isinstance(outer, NesterovSGD) else None
        names = shared.on_streams([name for name in self.names if name in sums])
        found = {name: shared.overflows(name, sums[name], largest, nesterov) for name in names}
        self._overflows = {name: indices for name, indices in found.items() if len(indices)}
        return not self._overflows

    def end_comparison(self) -> None:
        """Wait until the words have been gathered; then no call is in flight."""
        if self._comparison is not None and (failed := error_of(self._comparison)) is not None:
            _log.debug("rank %s: %s", self._transport.rank, failed)

    def _compare(self) -> BaseException | None:
        """Wait for the words. Return an error if they differ between ranks, or were not gathered."""
        assert self._comparison is not None
        if (failed := error_of(self._comparison)) is not None:
            return failed
        words, rank = self._gather.words, self._transport.rank
        by_rank = [words[i : i + _WORDS] for i in range(0, len(words), _WORDS)]
        for other, theirs in enumerate(by_rank):
            if theirs[: _COMPARED - 1] != by_rank[rank][: _COMPARED - 1]:
                return self._mismatch(rank, by_rank[rank], other, theirs)
        for other, theirs in enumerate(by_rank):
            if theirs[_COMPARED - 1] != by_rank[0][_COMPARED - 1]:
                return WeightMismatchError(
                    f"rank {rank}: the global parameters of rank {other} in fragment {self.fragment} differ from rank "
                    "0's. Create LocalSteps with the same parameters on all ranks: load one checkpoint, or "
                    "broadcast them. If an interrupt ended an outer step, call LocalSteps.rebuild on all ranks"
                )
        self.nanoseconds = tuple(theirs[4] for theirs in by_rank)
        self.left_out = tuple(other for other, theirs in enumerate(by_rank) if theirs[5])
        return None

    def _mismatch(self, rank: int, mine: Sequence[int], other: int, theirs: Sequence[int]) -> CollectiveMismatchError:
        """Return the error for two ranks at different positions in the schedule."""
        by_speed = self._rules.schedule.by_speed
        positions = " and ".join(
            f"rank {who} exchanges fragment {fragment} for round {round_no}"
            + ("" if by_speed else f" after {steps} local steps")
            for who, (round_no, fragment, steps, *_) in ((rank, mine), (other, theirs))
        )
        if by_speed and mine[:2] == theirs[:2]:
            positions = f"ranks {rank} and {other} divide round {mine[0]} differently into local steps"
        counts = "" if by_speed else ", take the same number of local steps in a round (or set by_speed=True),"
        return CollectiveMismatchError(
            f"{positions}. Nothing was applied, and the pseudo-gradients are in the residuals. All ranks must have the "
            f"same sync_every, by_speed, deadline, fragments and fragment_sync_delay{counts} and resume from states "
            "saved together; LocalSteps.rebuild brings all ranks to one place"
        )

    # -- means are applied --------------------------------------------------------------------------------------------

    @default_float_mode
    def apply(self, parameters: Mapping[str, object], rank: int) -> list[str]:
        """Apply an exchange that has ended. Return the names of the local parameters that were replaced.

        If it is late, no call of its fragment's reducer may be in flight.
        """
        shared, usable, names = self._shared, self.outcome is Outcome.USABLE, [*self.names]
        if self.late:
            self._save_unsent(parameters)
        if usable:
            names = [name for name in names if name not in self.without_gradient]
            self._step_outer([name for name in names if name not in self._stepped], parameters)
        if self.late:
            names = [name for name in self.names if (usable and name in names) or self._was_trained[name]]
        if self.outcome is Outcome.NOT_FINITE:
            for name, indices in self._overflows.items():  # drop these entries, which would overflow again
                self._reducer.residual(name).reshape(-1)[indices] = 0
            text = "rank %s: round %s, fragment %s was not applied: a pseudo-gradient, or the outer step, is not finite"
            _log.warning(text, rank, self.round, self.fragment)
            names += [name for name in shared.specs if name not in names and not shared.finite(name, parameters[name])]
        alpha = self._rules.alpha if usable and not self.late else 0.0
        for name in names:
            if name not in self._written:
                with shared.on_stream(name, parameters[name], writable=True) as local:
                    shared.mix_into(parameters, name, local, alpha)
                    self._written.add(name)
                if alpha:  # if an interrupt prevents this, the parameter counts as trained
                    shared.record_mixed(name, parameters[name])
        return names

    def _save_unsent(self, parameters: Mapping[str, object]) -> None:
        """Add this rank's training, which a late exchange does not contain, to the residuals."""
        shared = self._shared
        for name in self.names:
            with shared.on_stream(name, parameters[name]) as local:
                if name in self._was_trained:
                    continue
                trained = local.size > 0 and shared.trained(name, local)
                if trained:
                    residual = self._reducer.residual(name).reshape(-1)
                    with np.errstate(over="ignore", invalid="ignore"):  # the next exchange multiplies by the decay
                        unsent = shared.difference(name, local) / residual.dtype.type(self._rules.decay)
                    if np.isfinite(unsent).all():
                        residual += unsent
                        shared.unsent.add(name)
                self._was_trained[name] = trained

    def _step_outer(self, names: list[str], parameters: Mapping[str, object]) -> None:
        """Update global parameters by the means."""
        outer, shared = self._rules.outer, self._shared
        together = getattr(outer, "step_together", None)
        try:
            with on_streams(shared.on_stream(name, parameters[name]) for name in names):
                if together is not None and names:
                    together({name: (shared[name], self._mean(name)) for name in names})
                    self._stepped.update(names)
                    return
                for name in names:
                    if outer is not None:
                        outer.step(name, shared[name], self._mean(name))
                    elif (mean := self._means.get(name, self._sums.get(name))) is not None:
                        shared.subtract(name, mean)
                    self._stepped.add(name)
        except BaseException:
            if outer is not None and type(outer) is not NesterovSGD:  # it may have made part of its step
                shared.compared.discard(self.fragment)
            raise

    def _mean(self, name: str) -> Array:
        """Return a mean as a flat array, on the stream of the global parameter."""
        mean = self._means.get(name)
        return self._shared.dense(name, self._sums.get(name)) if mean is None else mean
