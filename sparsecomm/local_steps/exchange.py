"""The exchange of one fragment, and the comparison of the ranks' positions in the schedule."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.handle import Handle
from sparsecomm.calls.queue import queue_of
from sparsecomm.errors import CollectiveMismatchError, SparseCommError, WeightMismatchError
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.step import Accept, error_of
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["FragmentExchange", "Outcome", "gather_of"]

_log = logging.getLogger("sparsecomm")
_LABEL = zlib.crc32(b"local steps") or 1
_WORDS = 6  # round, fragment, division, checksum, nanoseconds, late
_COMPARED = 4  # the first of them


class Outcome(Enum):
    """What has become of an exchange."""

    PENDING = auto()  # its calls have not been waited for
    USABLE = auto()  # the sums are to be applied
    NOT_FINITE = auto()  # a pseudo-gradient, or the outer step, is not finite on some rank
    FAILED = auto()  # a call raised an error


def gather_of(transport: Transport, words: Sequence[int] = (0,) * _WORDS) -> WordsGather:
    """Return the call in which the ranks of an exchange gather these six words of each rank."""
    return WordsGather(transport, list(words), _LABEL)


class FragmentExchange:
    """An exchange that has begun, or ended, and is not applied yet.

    The reducer's calls sum the pseudo-gradients. One more call gathers six words per rank: the round, the fragment, how
    the round is divided into local steps, a checksum of the global parameters, the duration of a local step, and
    whether the rank is late. The first four are also in the label of the reducer's calls. If they differ, all ranks
    raise, the pseudo-gradients stay in the residuals, and the words tell what differs. So the words may come last, and
    nobody waits for them unless the sums have failed.

    Attributes:
        fragment, round: the fragment, and the round in which it is applied.
        late: whether the deadline's thread has begun the exchange, without the program's parameters.
        outcome: see `Outcome`.
        error: why it has failed.
        sums: the sums by name, without those that are zero.
        means: dense means by name, in place of ``sums``, of an exchange that was loaded from a state.
        without_gradient: names of parameters that no rank has trained. They are not changed.
        nanoseconds: duration of a local step, by rank; empty: unknown.
        left_out: the ranks that were late.
        overflows: by name, the indices at which the outer step would overflow.
        stepped: names whose global parameter has been updated.
        saved: if late, by name, whether there was a pseudo-gradient, which is then in the residual.
        written: names whose local parameter has been written.
    """

    def __init__(self, fragment: int, round_no: int, late: bool) -> None:
        self.fragment, self.round, self.late = fragment, round_no, late
        self.outcome = Outcome.PENDING
        self.error: BaseException | None = None
        self.sums: Mapping[str, SparseVector] = {}
        self.means: dict[str, Array] = {}
        self.without_gradient: frozenset[str] = frozenset()
        self.nanoseconds: tuple[int, ...] = ()
        self.left_out: tuple[int, ...] = ()
        self.overflows: dict[str, Array] = {}
        self.stepped: set[str] = set()
        self.saved: dict[str, bool] = {}
        self.written: set[str] = set()
        self._comparison: Handle | None = None
        self._raised: BaseException | None = None  # by the reducer

    @classmethod
    def loaded(
        cls,
        fragment: int,
        round_no: int,
        late: bool,
        means: Mapping[str, Array] | None,
        nanoseconds: tuple[int, ...],
        without_gradient: Iterable[str],
    ) -> FragmentExchange:
        """Return an exchange that has ended, from a state; without ``means`` it is not usable."""
        exchange = cls(fragment, round_no, late)
        exchange.means, exchange.nanoseconds = dict(means or {}), nanoseconds
        exchange.without_gradient = frozenset(without_gradient)
        exchange.outcome = Outcome.NOT_FINITE if means is None else Outcome.USABLE
        return exchange

    def begin(
        self,
        transport: Transport,
        reducer: Reducer,
        division: int,
        checksum: int,
        nanoseconds: int,
        *,
        by_speed: bool,
        words_first: bool,
    ) -> None:
        """Begin. Pushes come next, then `end_pushes`.

        Args:
            transport, reducer: make the calls.
            division: local steps since the fragment's previous exchange; ``by_speed``: a checksum of the pace.
            checksum: of the global parameters; 0: not compared. If only some ranks compare, the exchange fails.
            nanoseconds: duration of a local step; 0: unknown.
            by_speed: whether ranks take different numbers of local steps.
            words_first: whether the words are gathered before the sums, since all ranks need them.
        """
        self._reducer, self._step, self._transport = reducer, reducer.step, transport
        self._by_speed, self._words_first = by_speed, words_first
        words = [self.round, self.fragment, division, checksum, nanoseconds, self.late]
        self._gather = gather_of(transport, words)
        reducer.label = " ".join(map(str, words[:_COMPARED]))
        if words_first:
            self._comparison = queue_of(transport).submit(self._gather)

    def lacks(self, name: str) -> bool:
        """Return whether the pseudo-gradient of a parameter has yet to be pushed."""
        return self._reducer.step == self._step and not self._reducer.pushed(name)

    def push(self, name: str, before: Array, after: object | None) -> None:
        """Push before - after: a flat global parameter less the local one; without ``after`` there is no gradient."""
        self._reducer.push_with(name, after, lambda backend, x, *rest: backend.add_difference(before, x, *rest))

    def end_pushes(self) -> None:
        """Begin the calls that an interrupt of a push has left, and gather the words unless they came first."""
        self._reducer.start_ready()
        if self._comparison is None:
            self._comparison = queue_of(self._transport).submit(self._gather)

    def wait(self, accept: Accept | None = None) -> None:
        """Wait until the calls have ended. If an interrupt ends the wait, call it again.

        Args:
            accept: as of `Reducer.wait`.
        """
        if self.outcome is not Outcome.PENDING:
            return
        if self._reducer.step == self._step:
            try:
                self._reducer.wait(accept)
            except BaseException as error:
                if self._reducer.step == self._step:
                    raise  # the wait was interrupted
                self._raised = error
        step, raised = self._reducer.last, self._raised
        needs_words = step is None or self._words_first or not self._transport.threaded
        different = self._compare() if needs_words else None
        if step is None:
            if different is not None and different.__cause__ is raised:
                different = None  # the words were not gathered, since a call of the sums had failed
            self.error, self.outcome = different or raised, Outcome.FAILED
            return
        self.sums, self.without_gradient = step.left, step.without_gradient
        self.outcome = Outcome.USABLE if step.usable else Outcome.NOT_FINITE
        if raised is not None or (different is not None and not isinstance(different, SparseCommError)):
            raise raised or different  # type: ignore[misc]  # an interrupt, after the sums were complete
        if different is not None:
            _log.info("fragment %s was summed, although the ranks could not be compared: %s", self.fragment, different)

    def drop_overflows(self) -> None:
        """Drop from the residuals the entries that made the outer step overflow."""
        for name, indices in self.overflows.items():
            self._reducer.residual(name).reshape(-1)[indices] = 0
        self.overflows = {}

    def end_comparison(self) -> None:
        """Wait until the words have been gathered, so that no call is in flight."""
        if self._comparison is not None and (failed := error_of(self._comparison)) is not None:
            _log.debug("rank %s: %s", self._transport.rank, failed)

    def _compare(self) -> BaseException | None:
        """Wait for the words. Return the first difference between ranks, or why the words were not gathered."""
        assert self._comparison is not None
        if (failed := error_of(self._comparison)) is not None:
            return failed
        words, rank = self._gather.words, self._transport.rank
        by_rank = [words[i : i + _WORDS] for i in range(0, len(words), _WORDS)]
        for other, theirs in enumerate(by_rank):
            if theirs[: _COMPARED - 1] != by_rank[rank][: _COMPARED - 1]:
                return self._uneven(rank, by_rank[rank], other, theirs)
        for other, theirs in enumerate(by_rank):
            if theirs[_COMPARED - 1] != by_rank[0][_COMPARED - 1]:
                return WeightMismatchError(
                    f"rank {rank}: the global parameters of rank {other} in fragment {self.fragment} are not those of "
                    "rank 0. Create LocalSteps with the same parameters on all ranks: load one checkpoint, or "
                    "broadcast them (PyTorch: sparsecomm.torch.broadcast_parameters). If an interrupt came during a "
                    "step of an outer optimizer, call LocalSteps.rebuild on all ranks"
                )
        self.nanoseconds = tuple(theirs[4] for theirs in by_rank)
        self.left_out = tuple(other for other, theirs in enumerate(by_rank) if theirs[5])
        return None

    def _uneven(self, rank: int, mine: Sequence[int], other: int, theirs: Sequence[int]) -> CollectiveMismatchError:
        """Return the error for ranks that are at different positions in the schedule."""
        positions = " and ".join(
            f"rank {who} exchanges fragment {fragment} for round {round_no}"
            + ("" if self._by_speed else f" after {steps} local steps")
            for who, (round_no, fragment, steps, *_) in ((rank, mine), (other, theirs))
        )
        if self._by_speed and mine[:2] == theirs[:2]:
            positions = f"ranks {rank} and {other} divide round {mine[0]} differently into local steps"
        counts = "" if self._by_speed else ", take the same number of local steps in a round (or set by_speed=True),"
        return CollectiveMismatchError(
            f"{positions}. Nothing was applied, and the pseudo-gradients are in the residuals. All ranks must have the "
            f"same sync_every, by_speed, deadline, fragments and fragment_sync_delay{counts} and resume from states "
            "that were saved together; LocalSteps.rebuild brings all ranks to one place"
        )
