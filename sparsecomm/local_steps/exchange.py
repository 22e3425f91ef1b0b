"""The exchange of one fragment: the sum of its pseudo-gradients, and the comparison that goes with it."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import CollectiveMismatchError, WeightMismatchError
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.step import error_of
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
        applied: names of which the global parameter has been changed by the mean.
        written: names of which the local parameter has been written.
    """

    _reducer: Reducer
    _step: int  # of the reducer
    _ranks: Transport
    _told: WordsGather
    _comparison: Handle

    def __init__(self, fragment: int, round_no: int, means: Mapping[str, Array] | None) -> None:
        """Make one that has ended, as a state holds it; ``means``: ``None``: it does not count."""
        self.fragment, self.round = fragment, round_no
        self.means: dict[str, Array] = dict(means or {})
        self.ended, self.usable = True, means is not None
        self.error: BaseException | None = None
        self.applied: set[str] = set()
        self.written: set[str] = set()

    @classmethod
    def begun(
        cls, fragment: int, round_no: int, ranks: Transport, reducer: Reducer, steps: int, checksum: int
    ) -> FragmentExchange:
        """Return one whose comparison has begun. Pushes come next.

        Args:
            fragment, round_no: as above.
            ranks: who takes part.
            reducer: of the fragment.
            steps: local steps since the fragment's last exchange.
            checksum: of the global parameters; 0 where it is not compared. Above 0 on some ranks only it fails: an
                interrupt may have divided a step of their outer optimizers.
        """
        made, words = cls(fragment, round_no, {}), [round_no, fragment, steps, checksum]
        made.ended = made.usable = False
        made._reducer, made._step, made._ranks = reducer, reducer.step, ranks
        made._told = WordsGather(ranks, words, _LABEL)
        reducer.label = " ".join(map(str, words))
        made._comparison = queue_of(ranks).submit(made._told)
        return made

    def lacks(self, name: str) -> bool:
        """Return whether the pseudo-gradient of a parameter is still to be pushed."""
        return self._reducer.step == self._step and not self._reducer.parts(name)

    def push(self, name: str, shape: tuple[int, ...]) -> None:
        """Push a pseudo-gradient that is in `means`."""
        self._reducer.push(name, self.means[name].reshape(shape))

    def wait(self) -> None:
        """Wait until all calls have ended. An interrupt ends the wait; call it again."""
        if self.ended:
            return
        compared = self._wait_for_comparison()
        raised: BaseException | None = None
        try:
            self._reducer.wait()
        except BaseException as error:
            if self._reducer.step == self._step:
                raise  # the wait was interrupted
            raised = error
        done = self._reducer.last
        self.error = (compared or raised) if done is None else None
        self.usable, self.ended = done is not None and done.usable, True
        if done is not None and raised is not None:
            raise raised  # an interrupt, when all was done
        if done is not None and compared is not None:  # the sums have the same label on all ranks, so they count
            _log.info("fragment %s was summed, though the comparison of the ranks failed: %s", self.fragment, compared)

    def _wait_for_comparison(self) -> BaseException | None:
        """Wait for the comparison; return what it has found, or why it failed."""
        if (failed := error_of(self._comparison)) is not None:
            return failed
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
