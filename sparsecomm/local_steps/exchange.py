"""The exchange of one fragment: the sum of its pseudo-gradients, and the comparison that goes with it."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import CollectiveMismatchError, SparseCommError, TransportError, WeightMismatchError
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.step import Accept, error_of
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["End", "FragmentExchange", "awaited"]

_log = logging.getLogger("sparsecomm")
_LABEL = zlib.crc32(b"local steps") or 1
_NOTHING = SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))
_WORDS = 6  # of a rank
_IN_TIME, _LEFT_OUT, _EARLIER = range(3)  # what a rank contributes: all, nothing, what it had trained some time before


class End:
    """A task that comes after the calls of an exchange, and sends nothing.

    Attributes:
        seconds: the time at which it was reached; ``None``: it has not been.
    """

    def __init__(self, clock: Callable[[], float], then: Callable[[], object]) -> None:
        self.seconds: float | None = None
        self._clock, self._then = clock, then

    def run(self) -> SparseVector:
        self.seconds = self._clock()
        self._then()
        return _NOTHING

    def leave(self, error: BaseException) -> None:
        self.run()


class _Question:
    """A task that finds out whether another rank waits for this one in an exchange, and sends nothing."""

    def __init__(self, transport: Transport) -> None:
        self.awaited = False
        self._transport = transport

    def run(self) -> SparseVector:
        try:
            self.awaited = self._transport.awaited(WordsGather(self._transport, [0] * _WORDS, _LABEL).description)
        except TransportError:  # what the next call raises
            self.awaited = False
        return _NOTHING

    def leave(self, error: BaseException) -> None:
        pass


def awaited(transport: Transport) -> bool:
    """Return whether another rank has said that it waits for this one in an exchange that this one has not begun.

    It says so after a quarter of a second of waiting, and then less and less often.
    """
    question = _Question(transport)
    queue_of(transport).call(question)
    return question.awaited


class FragmentExchange:
    """An exchange under way, or one that has ended and is not applied yet.

    The ranks tell each other the round, the fragment, how they divide the round and a checksum, and make the calls of
    the reducer, all in the background. The same four are in the label of these calls. So where they differ the calls
    fail on all ranks, which leaves the pseudo-gradients in the residuals, and all ranks can say what differs. Each rank
    tells besides how long its local steps take, and whether it had come when its exchange began. Where that is needed
    they tell it first; otherwise at last, and nobody waits for it unless the calls of the reducer have failed.

    Attributes:
        fragment, round: which it is, and in which round it is applied.
        means: by name: dense means, of a state; and what a late rank has pushed, which the means overwrite.
        sums: by name: the other means; zeros are not in it.
        without_gradient: names of parameters that no rank has trained: nothing of them is exchanged or changed.
        late: this rank had not come, and the exchange was begun without its program.
        sent: by name: if late: what it had trained some time before, and contributes.
        nanoseconds: of a local step, by rank; empty: they are not known.
        left_out: ranks that had not come when it began there.
        ended: all calls have been waited for.
        usable: it has ended, and counts.
        error: why it does not count; ``None``: a pseudo-gradient was not finite, or it does.
        before: by name: if late: the global parameter before it was changed.
        applied: names of which the global parameter has been changed by the mean.
        moved: by name: if late: to what the local parameter is set.
        written: names of which the local parameter has been written.
        overflows: by name: indices at which the outer step would have overflowed; the exchange does not count then.
    """

    _reducer: Reducer
    _step: int  # of the reducer
    _transport: Transport
    _told: WordsGather
    _by_speed: bool
    _tells_first: bool

    def __init__(
        self,
        fragment: int,
        round_no: int,
        means: Mapping[str, Array] | None,
        nanoseconds: tuple[int, ...] = (),
        sent: Mapping[str, Array] | None = None,
        without_gradient: Iterable[str] = (),
    ) -> None:
        """Make one that has ended, as a state holds it.

        Args:
            fragment, round_no, nanoseconds, without_gradient: see above.
            means: ``None``: it does not count.
            sent: see above; ``None``: this rank was not late.
        """
        self.fragment, self.round = fragment, round_no
        self.means: dict[str, Array] = dict(means or {})
        self.late, self.sent = sent is not None, dict(sent or {})
        self.nanoseconds, self.left_out = nanoseconds, ()
        self.without_gradient = frozenset(without_gradient)
        self.ended, self.usable = True, means is not None
        self.error: BaseException | None = None
        self.before: dict[str, Array] = {}
        self.applied: set[str] = set()
        self.moved: dict[str, Array] = {}
        self.written: set[str] = set()
        self.overflows: dict[str, Array] = {}
        self._end: tuple[End, Handle] | None = None
        self.sums: Mapping[str, SparseVector] = {}
        self._comparison: Handle | None = None
        self._raised: BaseException | None = None  # by the reducer

    left_out: tuple[int, ...]

    @classmethod
    def begun(
        cls,
        fragment: int,
        round_no: int,
        transport: Transport,
        reducer: Reducer,
        division: int,
        checksum: int,
        nanoseconds: int,
        *,
        by_speed: bool = False,
        tells_first: bool = False,
        sent: Mapping[str, Array] | None = None,
    ) -> FragmentExchange:
        """Return one that has begun. Pushes come next, then `compare`.

        Args:
            fragment, round_no, sent: as above.
            ranks: who takes part.
            reducer: of the fragment.
            division: local steps since the fragment's last exchange; ``by_speed``: a checksum of those of all ranks.
            checksum: of the global parameters; 0 where it is not compared. Above 0 on some ranks only it fails: an
                interrupt may have divided a step of their outer optimizers.
            nanoseconds: of a local step of this rank; 0: not known.
            by_speed: the ranks take unequally many local steps.
            tells_first: all ranks need to know how long local steps take, or who has come.
        """
        made = cls(fragment, round_no, {}, sent=sent)
        made.ended = made.usable = False
        made._reducer, made._step, made._transport, made._by_speed = reducer, reducer.step, transport, by_speed
        made._tells_first = tells_first
        compared = [round_no, fragment, division, checksum]
        contributes = _IN_TIME if sent is None else _EARLIER if sent else _LEFT_OUT
        made._told = WordsGather(transport, [*compared, nanoseconds, contributes], _LABEL)
        reducer.label = " ".join(map(str, compared))
        if tells_first:
            made._comparison = queue_of(transport).submit(made._told)
        return made

    def lacks(self, name: str) -> bool:
        """Return whether the pseudo-gradient of a parameter is still to be pushed."""
        return self._reducer.step == self._step and not self._reducer.pushed(name)

    def push_difference(self, name: str, before: Array, after: object | None) -> None:
        """Push the pseudo-gradient: a flat global parameter, less the local one. ``None``: this rank has none."""
        self._reducer.push_with(name, after, lambda backend, x, *rest: backend.add_difference(before, x, *rest))

    def push(self, name: str, shape: tuple[int, ...]) -> None:
        """Push what is in `means`; if there is nothing, this rank has no pseudo-gradient."""
        mean = self.means.get(name)
        self._reducer.push(name, None if mean is None else mean.reshape(shape))

    def compare(self) -> None:
        """Tell the other ranks what the label says, now that all is pushed, unless that was done first.

        An interrupt may have come when all was pushed, and not all calls of the reducer had begun. So these begin here.
        """
        self._reducer.start_ready()
        if self._comparison is None:
            self._comparison = queue_of(self._transport).submit(self._told)

    def end(self, clock: Callable[[], float], then: Callable[[], object]) -> End:
        """Return what takes note of the time when the calls have ended, now that all is pushed, and calls ``then``."""
        if self._end is None:
            end = End(clock, then)
            self._end = end, queue_of(self._transport).submit(end)
        return self._end[0]

    def wait(self, accept: Accept | None = None) -> None:
        """Wait until all calls have ended. An interrupt ends the wait; call it again.

        ``accept``: as of `Reducer.wait`.
        """
        if self.ended:
            return
        compared = self._wait_for_comparison() if self._tells_first else None
        if self._reducer.step == self._step:
            try:
                self._reducer.wait(accept)
            except BaseException as error:
                if self._reducer.step == self._step:
                    raise  # the wait was interrupted
                self._raised = error
        done, raised = self._reducer.last, self._raised
        if done is not None:
            self.sums, self.without_gradient = done.left, done.without_gradient
        if not self._tells_first and (done is None or not self._transport.threaded):
            compared = self._wait_for_comparison()
        if self._end is not None and (failed := error_of(self._end[1])) is not None:
            _log.debug("rank %s: %s", self._transport.rank, failed)
        if raised is not None and compared is not None and compared.__cause__ is raised:
            compared = None  # the ranks were not compared, since a call of the sums had failed
        self.error = (compared or raised) if done is None else None
        self.usable, self.ended = done is not None and done.usable, True
        if done is not None and raised is not None:
            raise raised  # an interrupt, when all was done
        if done is not None and compared is not None and not isinstance(compared, SparseCommError):
            raise compared  # an interrupt of the comparison, which was made here
        if done is not None and compared is not None:  # the sums have the same label on all ranks, so they count
            _log.info("fragment %s was summed, though the comparison of the ranks failed: %s", self.fragment, compared)

    def drop_overflows(self) -> None:
        """Drop from the residuals what would overflow again."""
        for name, indices in self.overflows.items():
            self._reducer.residual(name).reshape(-1)[indices] = 0
        self.overflows = {}

    def end_comparison(self) -> None:
        """Wait until the ranks have told each other all, so that no call of the exchange is under way."""
        if self._comparison is not None and (failed := error_of(self._comparison)) is not None:
            _log.debug("rank %s: %s", self._transport.rank, failed)

    def _wait_for_comparison(self) -> BaseException | None:
        """Wait for the comparison; return what it has found, or why it failed."""
        assert self._comparison is not None
        if (failed := error_of(self._comparison)) is not None:
            return failed
        words, mine = self._told.words, self._transport.rank
        each = [tuple(words[i : i + _WORDS]) for i in range(0, len(words), _WORDS)]
        for rank, theirs in enumerate(each):
            if theirs[:3] != each[mine][:3]:
                return _uneven(mine, each[mine], rank, theirs, by_speed=self._by_speed)
        for rank, theirs in enumerate(each):
            if theirs[3] != each[0][3]:
                return WeightMismatchError(
                    f"rank {mine}: the global parameters of rank {rank} in fragment {self.fragment} are not those of "
                    "rank 0. They begin as copies of the parameters with which LocalSteps was made: give all ranks the "
                    "same first, by loading one checkpoint, or by a broadcast (PyTorch: "
                    "sparsecomm.torch.broadcast_parameters). If an interrupt has come while an outer optimizer made a "
                    "step, call LocalSteps.rebuild on all ranks"
                )
        self.nanoseconds = tuple(theirs[4] for theirs in each)
        self.left_out = tuple(rank for rank, theirs in enumerate(each) if theirs[5] != _IN_TIME)
        return None


def _uneven(
    mine: int, my: tuple[int, ...], rank: int, theirs: tuple[int, ...], *, by_speed: bool
) -> CollectiveMismatchError:
    if by_speed:
        said = " and ".join(
            f"rank {who} exchanges fragment {fragment} for round {round_no}"
            for who, (round_no, fragment, *_) in ((mine, my), (rank, theirs))
        )
        if my[:2] == theirs[:2]:
            said = f"ranks {mine} and {rank} divide round {my[0]} differently into local steps"
        settings = "the same sync_every, by_speed, round_seconds, deadline, fragments and fragment_sync_delay"
    else:
        said = " and ".join(
            f"rank {who} has taken {steps} local steps since the last exchange of fragment {fragment}, for round "
            f"{round_no}"
            for who, (round_no, fragment, steps, *_) in ((mine, my), (rank, theirs))
        )
        settings = (
            "the same sync_every, fragments and fragment_sync_delay, take equally many local steps in a round (or have "
            "by_speed=True)"
        )
    return CollectiveMismatchError(
        f"{said}. Nothing was applied, and the pseudo-gradients wait in the residuals. All ranks must have {settings}, "
        "and go on from states that were saved together; LocalSteps.rebuild brings them to one place"
    )
