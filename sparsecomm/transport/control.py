"""What ranks of different processes tell each other when something is wrong, next to the data of their calls.

- *left*: "I left call 17 with this error". Whoever waits in call 17 leaves it too.
- *waiting*: "I have been waiting for you in call 17, which I take to be ...". When two ranks take call 17 to be
  different things, the one that reads this knows, and leaves. This ends waits in a circle without a timeout.

How these messages travel, and when a rank reads them, is up to the transport.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sparsecomm import config
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, RankFailedError, TimeoutError, TransportError
from sparsecomm.transport.base import Mismatch, Transport

__all__ = ["WAITING", "ControlMessage", "FailureDetector", "named", "not_all_came"]

WAITING, _LEFT = 0, 1  # kinds of news; those from 1 on say with which error a rank left
_LEFT_WITH = (TransportError, CollectiveMismatchError, RankFailedError)
_LONGEST_TEXT = 1000  # bytes; a control message must leave at once, without the receiver's help
_LONGEST_CALL = 256


@dataclass(frozen=True)
class ControlMessage:
    """A control message that has arrived from ``rank``, about call ``number``."""

    rank: int
    number: int
    kind: int
    text: bytes


class FailureDetector(Transport):
    """A transport whose ranks tell each other which calls they left and which they wait in."""

    timeout: float  # seconds that a wait may take in the current call

    def __init__(self, nodes: Sequence[int]) -> None:
        """``nodes``: the number of the machine of each rank."""
        self.node_of_rank, self.num_nodes = nodes, len(set(nodes))
        self._number = 0
        self._call = b""
        self._mismatch: Mismatch | None = None
        self._inside = False  # between `begin` and `end` or `abort`
        self._told = False  # the other ranks know already that this call has failed
        self._control: list[ControlMessage] = []  # about this call and later ones
        self._seen: dict[int, int] = {}  # rank -> the call in which it said that it waits

    @abstractmethod
    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        """Send a control message about the current call, without waiting until it is read."""

    # -- calls ------------------------------------------------------------------------------------------------------

    def _start(self, call: bytes, mismatch: Mismatch) -> int:
        """The beginning of `begin`, with nothing done if a setting or an argument cannot be used."""
        timeout = config.timeout()
        if len(call) > _LONGEST_CALL:
            raise InvalidInputError(f"call: {len(call)} bytes, at most {_LONGEST_CALL} are allowed")
        self._number += 1  # no signal comes between here and the return: from then on the call can be aborted
        self._call, self._mismatch, self.timeout = call, mismatch, timeout
        self._inside, self._told = True, False
        return self._number

    def end(self) -> None:
        self._inside = False

    def abort(self, error: BaseException) -> None:
        if not self._inside:
            return
        self._inside = False
        if self._told:
            return  # the rank that told this one has told all
        kind = _LEFT + (_LEFT_WITH.index(type(error)) if type(error) in _LEFT_WITH else 0)
        text = f"{type(error).__name__}: {error}".encode()[:_LONGEST_TEXT]
        for rank in range(self.size):
            if rank != self.rank:
                with contextlib.suppress(TransportError):  # that rank may be dead
                    self._send_control(rank, kind, text)

    # -- news -------------------------------------------------------------------------------------------------------

    def _learn(self, message: ControlMessage) -> None:
        if message.kind == WAITING:
            self._seen[message.rank] = message.number
        self._control.append(message)

    def _forget(self) -> list[int]:
        """Forget the news about earlier calls; return the numbers of those that a rank left."""
        if not self._control:
            return []
        old = [message.number for message in self._control if message.number < self._number and message.kind != WAITING]
        self._control = [message for message in self._control if message.number >= self._number]
        return old

    def _check_leavers(self) -> None:
        """Leave this call if another rank has."""
        for message in self._control:
            if message.number == self._number and message.kind != WAITING:
                self._told = True
                kind = _LEFT_WITH[message.kind - _LEFT] if message.kind < _LEFT + len(_LEFT_WITH) else TransportError
                reason = message.text.decode(errors="replace")
                raise kind(f"rank {message.rank} left call {self._number}, which rank {self.rank} is in. {reason}")

    def _check_waiters(self) -> None:
        """Raise if a rank that waits for this one takes the call for another. Messages about later calls are kept."""
        now = [message for message in self._control if message.number == self._number]
        self._control = [message for message in self._control if message.number > self._number]
        for message in now:
            if message.text != self._call and self._mismatch is not None:
                raise self._mismatch(message.text, message.rank)

    def _timed_out(self, peer: int) -> TimeoutError:
        seen = self._seen.get(peer)
        doing = f"; rank {peer} last said that it waits in call {seen}" if seen not in (None, self._number) else ""
        return TimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s for rank {peer} in call {self._number}{doing}. "
            f"Rank {peer} may have died, may be stuck, or may not make this call: all ranks must make the same calls "
            "in the same order. If it is only slow, set SPARSECOMM_TIMEOUT to more seconds."
        )


def not_all_came(rank: int, seconds: float, group: str, missing: str) -> TimeoutError:
    """For a ``group`` whose transport ``rank`` cannot make, since so many are ``missing``: "rank 3 has"."""
    return TimeoutError(
        f"rank {rank} waited {seconds:g} s for the first call on this {group}, which all its ranks must make: "
        f"{missing} not called. If it is only slow, set SPARSECOMM_TIMEOUT to more seconds."
    )


def named(ranks: Sequence[int]) -> str:
    """In words, such as "ranks 1, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {ranks[0]} ... {ranks[-1]} ({len(ranks)} ranks)"
    return "ranks " + ", ".join(map(str, ranks))
