"""The failure detector: what ranks of different processes tell each other when something is wrong.

Control messages travel next to the data of calls:

- *left*: "I left call 17 with this error". Ranks that wait in call 17 leave it too.
- *waiting*: "I have been waiting for you in call 17, which I take to be ...". When two ranks take call 17 to be
  different things, the one that reads this message knows, and leaves. This ends waits in a cycle without a timeout.

How these messages travel, and when a rank reads them, is up to the transport.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sparsecomm import config
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    SparseCommError,
    TimeoutError,
    TransportError,
)
from sparsecomm.transport.base import MAX_CALL_BYTES, Mismatch, Transport

__all__ = ["WAITING", "ControlMessage", "FailureDetector", "format_ranks", "missing_ranks_error"]

WAITING, _LEFT = 0, 1  # kinds of control messages; those from `_LEFT` on say with which error a rank left
_LEFT_WITH = (TransportError, CollectiveMismatchError, RankFailedError)
_MAX_RANKS = 32  # that a control message names
_MAX_TEXT_BYTES = 1000  # a control message must leave at once, without the receiver's help


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

    def __init__(self, node_of_rank: Sequence[int]) -> None:
        """Start without a call. ``node_of_rank``: for each rank, the number of its node."""
        self.node_of_rank, self.num_nodes = node_of_rank, len(set(node_of_rank))
        self.number = 0
        self._call = b""
        self._mismatch: Mismatch | None = None
        self._in_call = False  # between `begin` and `end` or `abort`
        self._told = 0  # lower ranks know that this one has left the call
        self._others_know = False  # the other ranks know already that this call has failed
        self._control: list[ControlMessage] = []  # about this call and later ones
        self._waits_in: dict[int, int] = {}  # rank -> the call in which it last said that it waits

    @abstractmethod
    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        """Send a control message about the current call, without waiting until it is read."""

    # -- calls ------------------------------------------------------------------------------------------------------

    def _begin_call(self, call: bytes, mismatch: Mismatch) -> int:
        """Do the common part of `begin`; change nothing if a setting or an argument cannot be used."""
        timeout = config.timeout()
        if len(call) > MAX_CALL_BYTES:
            raise InvalidInputError(f"call: {len(call)} bytes, at most {MAX_CALL_BYTES} are allowed")
        self.number += 1  # no signal comes between here and the return: from then on the call can be aborted
        self._call, self._mismatch, self.timeout = call, mismatch, timeout
        self._in_call, self._others_know, self._told = True, False, 0
        return self.number

    def end(self) -> None:
        self._in_call = False

    def abort(self, error: BaseException) -> None:
        if not self._in_call:
            return
        self._send_left(error)
        self._in_call = False

    def _send_left(self, error: BaseException) -> None:
        """Tell every other rank that this one leaves the current call with ``error``, unless they know.

        After an interrupt this goes on. A rank that is told twice does not mind.
        """
        kind = _LEFT + (_LEFT_WITH.index(type(error)) if type(error) in _LEFT_WITH else 0)
        dead = error.ranks if isinstance(error, RankFailedError) else ()
        head = ",".join(map(str, dead[:_MAX_RANKS]))
        text = f"{head};{type(error).__name__}: {error}".encode()[:_MAX_TEXT_BYTES]
        while self._told < self.size and not self._others_know:
            if self._told != self.rank and self._told not in dead:
                with contextlib.suppress(TransportError):  # that rank may be dead
                    self._send_control(self._told, kind, text)
            self._told += 1
        self._others_know = True

    # -- control messages -------------------------------------------------------------------------------------------

    def _add_control(self, message: ControlMessage) -> None:
        """Keep a control message that has arrived, for `_check_leavers` and `_check_waiters`."""
        if message.kind == WAITING:
            self._waits_in[message.rank] = message.number
        self._control.append(message)

    def _drop_old_control(self) -> list[int]:
        """Drop the messages about earlier calls; return the numbers of those that a rank left."""
        if not self._control:
            return []
        old = [message.number for message in self._control if message.number < self.number and message.kind != WAITING]
        self._control = [message for message in self._control if message.number >= self.number]
        return old

    def _check_leavers(self) -> None:
        """Raise if another rank has left this call."""
        for message in self._control:
            if message.number == self.number and message.kind != WAITING:
                self._others_know = True
                raise self._left_with(message)

    def _left_with(self, message: ControlMessage) -> SparseCommError:
        """Return the error for what a rank says that has left this call."""
        kind = _LEFT_WITH[message.kind - _LEFT] if message.kind < _LEFT + len(_LEFT_WITH) else TransportError
        head, _, reason = message.text.decode(errors="replace").partition(";")
        text = f"rank {message.rank} left call {self.number}, which rank {self.rank} is in. {reason}"
        if kind is RankFailedError:
            return RankFailedError(text, [int(rank) for rank in head.split(",") if rank.isdigit()])
        return kind(text)

    def _check_waiters(self) -> None:
        """Raise if a rank that waits for this one takes the call for another. Messages about later calls are kept."""
        now = [message for message in self._control if message.number == self.number]
        self._control = [message for message in self._control if message.number > self.number]
        for message in now:
            if message.text != self._call and self._mismatch is not None:
                raise self._mismatch(message.text, message.rank)

    def _timed_out(self, peer: int) -> TimeoutError:
        """Return the error for a wait for ``peer`` that took too long."""
        number = self._waits_in.get(peer, self.number)
        state = f"; rank {peer} last said that it waits in call {number}" if number != self.number else ""
        return TimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s for rank {peer} in call {self.number}{state}. "
            f"Rank {peer} may have died, may be stuck, or may not make this call: all ranks must make the same calls "
            "in the same order. If it is only slow, set SPARSECOMM_TIMEOUT to more seconds."
        )


def missing_ranks_error(rank: int, seconds: float, group: str, missing: str) -> TimeoutError:
    """Return the error of ``rank``, which waited for the first call of all ranks on a new transport.

    Args:
        group: what the transport is for, such as "communicator".
        missing: who has not called, with the verb: "rank 3 has", "ranks 1, 2 have".
    """
    return TimeoutError(
        f"rank {rank} waited {seconds:g} s for the first call on this {group}, which all its ranks must make: "
        f"{missing} not called. If it is only slow, set SPARSECOMM_TIMEOUT to more seconds."
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as "ranks 1, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {ranks[0]} ... {ranks[-1]} ({len(ranks)} ranks)"
    return "ranks " + ", ".join(map(str, ranks))
