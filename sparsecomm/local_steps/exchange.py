"""The exchange of one fragment: the sum of its pseudo-gradients, and the comparison that goes with it."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import CollectiveMismatchError, WeightMismatchError
from sparsecomm.reducer import Reducer
from sparsecomm.tensors.arrays import Array
from sparsecomm.transport import Transport

__all__ = ["FragmentExchange"]

_log = logging.getLogger("sparsecomm")
_LABEL = zlib.crc32(b"local steps") or 1


class FragmentExchange:
    """An exchange under way, or one that has ended and is not applied yet.

    The ranks tell each other the round, the fragment, the number of local steps and a checksum, and then make the calls
    of the reducer, all in the background. The same four are in the label of these calls. So where they differ the calls
    fail on all ranks, which leaves the pseudo-gradients in the residuals, and all ranks can say what differs.

    Attributes:
        fragment, round: which it is, and in which round it is applied.
        means: by name: the pseudo-gradients that this rank has pushed, which the means overwrite.
        ended: all calls have been waited for.
        usable: it has ended, and counts.
        error: why it does not count; ``None``: a pseudo-gradient was not finite, or it does.
        pushed, applied: names of which the pseudo-gradient was pushed, and the mean applied.
        written: by name, what has been done to write the local parameter.
    """

    def __init__(self, fragment: int, round_no: int) -> None:
        self.fragment, self.round = fragment, round_no
        self.means: dict[str, Array] = {}
        self.ended = self.usable = False
        self.error: BaseException | None = None
        self.pushed: set[str] = set()
        self.applied: list[str] = []
        self.written: dict[str, list[object]] = {}
        self._step = 0
        self._ranks: Transport | None = None
        self._told: WordsGather | None = None
        self._handle: Handle | None = None

    @classmethod
    def of_state(cls, fragment: int, round_no: int, means: Mapping[str, Array] | None) -> FragmentExchange:
        """Return one that has ended; ``None``: it does not count."""
        made = cls(fragment, round_no)
        made.means, made.ended, made.usable = dict(means or {}), True, means is not None
        return made

    def begin(self, ranks: Transport, reducer: Reducer, steps: int, checksum: int) -> None:
        """Begin the comparison, or go on where that was interrupted. The reducer's pushes come next.

        Args:
            ranks: who takes part.
            reducer: of the fragment.
            steps: local steps since the fragment's last exchange.
            checksum: of the global parameters; 0 where it is not compared. Above 0 on some ranks only it fails: an
                interrupt may have divided a step of their outer optimizers.
        """
        if self._handle is None:
            words = [self.round, self.fragment, steps, checksum]
            reducer.label = " ".join(map(str, words))
            self._step = reducer.step
            self._ranks, self._told = ranks, WordsGather(ranks, words, _LABEL)
            self._handle = Handle(queue_of(ranks), self._told)
        queue_of(ranks).enqueue(self._handle)

    def push(self, reducer: Reducer, name: str, shape: tuple[int, ...]) -> None:
        """Push the pseudo-gradient in `means`, unless that was done before an interrupt."""
        if not reducer.parts(name):
            reducer.push(name, self.means[name].reshape(shape))
        self.pushed.add(name)

    def wait(self, reducer: Reducer) -> None:
        """Wait until all calls have ended. An interrupt ends the wait; call it again."""
        if self.ended:
            return
        compared = self._comparison()
        raised: BaseException | None = None
        try:
            reducer.wait()
        except BaseException as error:
            if reducer.step == self._step:
                raise  # the wait was interrupted
            raised = error
        done, failed = reducer.last, None
        if done is None:
            failed = compared or raised
        elif compared is not None:  # the sums have the same label on all ranks, so they count
            _log.info("fragment %s was summed, though the comparison of the ranks failed: %s", self.fragment, compared)
        self.error, self.usable, self.ended = failed, done is not None and done.usable, True
        if done is not None and raised is not None:
            raise raised  # an interrupt, when all was done

    def _comparison(self) -> BaseException | None:
        """Wait for the comparison; return what it has found, or why it failed."""
        if self._handle is None or self._told is None or self._ranks is None:
            return None  # an interrupt came before it began
        try:
            self._handle.wait()
        except BaseException as error:
            if error is not self._handle.error:
                raise  # the wait was interrupted
            return error
        words, mine = self._told.words, self._ranks.rank
        each = [tuple(words[4 * rank : 4 * rank + 4]) for rank in range(self._ranks.size)]
        for rank, theirs in enumerate(each):
            if theirs[:3] != each[mine][:3]:
                return _uneven(mine, each[mine], rank, theirs)
        for rank, theirs in enumerate(each):
            if theirs != each[0]:
                return WeightMismatchError(
                    f"rank {mine}: the global parameters of rank {rank} in fragment {self.fragment} are not those of "
                    "rank 0. They begin as copies of the parameters with which LocalSteps was made: give all ranks the "
                    "same first, by loading one checkpoint, or by a broadcast (PyTorch: "
                    "sparsecomm.torch.broadcast_parameters). If an interrupt has come while an outer optimizer made a "
                    "step, call LocalSteps.rebuild on all ranks"
                )
        return None


def _uneven(mine: int, my: tuple[int, ...], rank: int, theirs: tuple[int, ...]) -> CollectiveMismatchError:
    said = " and ".join(
        f"rank {who} has taken {steps} local steps since the last exchange of fragment {fragment}, for round {round_no}"
        for who, (round_no, fragment, steps, _) in ((mine, my), (rank, theirs))
    )
    return CollectiveMismatchError(
        f"{said}. Nothing was applied, and the pseudo-gradients wait in the residuals. All ranks must have the same "
        "sync_every, fragments and fragment_sync_delay, take equally many local steps in a round, and go on from "
        "states that were saved together; LocalSteps.rebuild brings them to one place"
    )
