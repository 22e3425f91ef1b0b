"""The failure detector: what ranks tell each other when something is wrong.

Control messages travel next to the data of calls. There are these kinds:

- *waiting*: "I have been waiting for you in call 17, which I take to be ...". When two ranks take call 17 to be
  different things, the one that reads this message knows, and leaves. This ends waits in a cycle without a timeout.
- *left*: "I left call 17 with this error". Ranks that wait in call 17 leave it too.
- *apart*: "I left call 17, for the ranks' calls do not pair any more". Ranks in call 17 and in later ones leave, too.
- *realign*: "I wait for all ranks in `realign`, and 17 was my last call". It has the number of a round: a rank that has
  timed out begins a later one, which the others adopt. Ranks that are in a call leave it.

How these messages travel, and when a rank reads them, is up to the transport.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from sparsecomm import config
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    SparseCommError,
    TimeoutError,
    TransportError,
    describe,
)
from sparsecomm.transport.base import MAX_CALL_BYTES, Mismatch, TrafficCounters, Transport
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory
from sparsecomm.transport.scheduling import check_signals

__all__ = [
    "APART",
    "LEFT",
    "LEFT_BY_DEATH",
    "LEFT_BY_MISMATCH",
    "MAX_CONTROL_BYTES",
    "REALIGN",
    "WAITING",
    "ControlMessage",
    "FailureDetector",
    "format_ranks",
    "missing_ranks_error",
    "unreadable_error",
]

WAITING, LEFT, LEFT_BY_MISMATCH, LEFT_BY_DEATH, APART, REALIGN = range(6)
_ERRORS = {LEFT: TransportError, LEFT_BY_MISMATCH: CollectiveMismatchError, LEFT_BY_DEATH: RankFailedError}
_KIND_OF = {error: kind for kind, error in _ERRORS.items()}
_MAX_RANKS = 32  # that a control message names
_SKIPPED_WAIT = 0.1  # seconds in which a rank that may have skipped a call hears of those that have left it
_GRACE = 0.25  # seconds in which the bytes of a rank arrive that has said since that it waits in a later call
_HOW_TO_REALIGN = "All ranks must call sparsecomm.realign(comm), and then go on with the same call."
MAX_CONTROL_BYTES = 1000  # a control message must leave at once, without the receiver's help
_MAX_NUMBER = 2**62  # of a call or a round: nobody counts so far
_MAX_KEPT = 10_000  # control messages about this call and later ones


class ControlMessage:
    """A control message that has arrived from ``rank``, about call ``number``."""

    __slots__ = "kind", "number", "rank", "text"

    def __init__(self, rank: int, number: int, kind: int, text: bytes) -> None:
        self.rank, self.number, self.kind, self.text = rank, number, kind, text

    @property
    def fault(self) -> str:
        """What shows that no rank of this version has sent this; empty: nothing."""
        if not (WAITING <= self.kind <= REALIGN and 0 <= self.number < _MAX_NUMBER):
            return f"a control message of kind {self.kind} about call {self.number}"
        if len(self.text) > MAX_CONTROL_BYTES:
            return f"a control message of {len(self.text)} bytes"
        if self.kind == REALIGN and (len(self.text) != 8 or self.round_no >= _MAX_NUMBER):
            return f"a control message about round {self.text!r}"
        return ""

    @property
    def round_no(self) -> int:
        """The round of `FailureDetector.realign` that it tells of."""
        return int.from_bytes(self.text, "big")


class FailureDetector(Transport):
    """A transport whose ranks tell each other which calls they left and which they wait in.

    What all transports have in common is here: the numbers of calls, when a wait ends, and the end.
    """

    timeout: float  # seconds that a wait may take in the current call

    def __init__(self, node_of_rank: Sequence[int], num_nodes: int = 0) -> None:
        """Start without a call. ``node_of_rank``: for each rank, the number of its node, of ``num_nodes``."""
        self.node_of_rank, self.num_nodes = node_of_rank, num_nodes or len(set(node_of_rank))
        self.counters = TrafficCounters()
        self.number = 0
        self._settings: object = None  # those that `timeout` was read from
        self._call = b""
        self._mismatch: Mismatch | None = None
        self._in_call = False  # between `begin` and `end` or `abort`
        self._others_know = False  # the other ranks know already that this call has failed
        self._reason: ControlMessage | None = None  # by which this rank learned that, from one that left
        self._control: list[ControlMessage] = []  # about this call and later ones
        self._unreadable: dict[int, TransportError] = {}  # rank -> what it has sent that is no control message
        self._waits_in: dict[int, int] = {}  # rank -> the call in which it last said that it waits
        self._apart = False  # this call failed since the ranks' calls do not pair any more
        self._ahead: tuple[int, int, float] = 0, 0, 0.0  # call, rank that is ahead, when that was seen
        self._round = 0  # of `realign`, the last one in which this rank took part
        self._rounds: dict[int, tuple[int, int]] = {}  # rank -> the last round of which it has told, and its number

    # -- the transport's part -----------------------------------------------------------------------------------------

    @abstractmethod
    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        """Send a control message about the current call, without waiting until it is read."""

    @abstractmethod
    def _listen(self, seconds: float) -> None:
        """Take in the control messages that have come, or that come within so many seconds."""

    def _check_usable(self) -> None:
        """Raise if no call can be made: `InvalidInputError` if the transport is closed."""

    def _abandon(self, number: int) -> None:
        """Take note that bytes of call ``number``, which a rank has left, may still come."""

    def _close(self) -> None:
        """End the transport. A second time does nothing."""

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        self._check_usable()
        self._begin_call(call, mismatch)
        self._start()
        return self.number

    def _begin_call(self, call: bytes, mismatch: Mismatch) -> int:
        """Give the next call its number; change nothing if a setting or an argument cannot be used."""
        self._read_timeout()
        if len(call) > MAX_CALL_BYTES:
            raise InvalidInputError(f"call: {len(call)} bytes, at most {MAX_CALL_BYTES} are allowed")
        if self._in_call:
            self._abandon(self.number)
        self.number += 1
        self._call, self._mismatch = call, mismatch
        self._in_call, self._others_know, self._apart = True, False, False
        self._reason = None
        return self.number

    def _start(self) -> None:
        """Raise if others have left the call that begins. Transports discard first what is left of earlier ones."""
        self._check_leavers()
        if self.skipped:
            self._check_skipped()

    def _read_timeout(self) -> None:
        if (settings := config.texts()) is not self._settings:
            self.timeout, self._settings = config.timeout(), settings

    def conclude(self) -> None:
        pass  # ranks do not vote

    def end(self) -> None:
        self._in_call, self.skipped, self.counted = False, "", self.number

    def abort(self, error: BaseException) -> None:
        if self._in_call:
            self._abandon(self.number)
            self._send_left(error)
            self._in_call = False

    def close(self) -> None:
        """End the transport when the calls of its queue have ended."""
        if self.queue is None:
            self._close()
        else:
            self.queue.finish(self._close)

    # -- messages -----------------------------------------------------------------------------------------------------

    def exchange(self, data: Bytes, to: int, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        request = self.isend(data, to, memory)
        message = self.receive(source, memory, expected)
        request.wait()
        return message

    def broadcast(self, data: Bytes, root: int) -> None:
        """As of `Transport`; the root sends to one rank after another."""
        if self.rank == root:
            for request in [self.isend(data, to) for to in range(self.size) if to != root]:
                request.wait()
        else:
            data[:] = self.receive(root)

    def _check_peer(self, rank: int) -> None:
        """Raise if there is no such rank."""
        if not 0 <= rank < self.size:
            raise TransportError(f"rank {self.rank} names rank {rank} as its peer: there are {self.size} ranks")

    def _count_sent(self, nbytes: int) -> None:
        self.counters.messages_sent += 1
        self.counters.bytes_sent += nbytes

    def _deliver(self, message: Bytes, nbytes: int, memory: MessageMemory) -> Bytes:
        """Count a message that has come to the host, as of so many bytes, and return it in ``memory``."""
        self.counters.messages_received += 1
        self.counters.bytes_received += nbytes
        if memory is HOST:
            return message
        copy = memory.empty(len(message))
        copy[:] = message
        return copy

    # -- control messages ---------------------------------------------------------------------------------------------

    def _send_left(self, error: BaseException) -> None:
        """Tell every other rank that this one leaves the current call with ``error``, unless they know."""
        if self._others_know:
            return
        kind = APART if self._apart else _KIND_OF.get(type(error), LEFT)
        dead = error.ranks if isinstance(error, RankFailedError) else ()
        text = f"{','.join(map(str, dead[:_MAX_RANKS]))};{describe(error)}".encode()[:MAX_CONTROL_BYTES]
        for rank in range(self.size):
            if rank != self.rank and rank not in dead:
                try:  # noqa: SIM105  # suppress() is bytecode
                    self._send_control(rank, kind, text)
                except TransportError:
                    pass  # that rank may be dead
        self._others_know = True

    def _add_control(self, message: ControlMessage) -> None:
        """Keep a control message that has arrived, for `_check_leavers` and `_check_waiters`."""
        if fault := message.fault:
            self._refuse(message.rank, fault)
        elif message.kind == REALIGN:
            self._rounds[message.rank] = message.round_no, message.number
        elif len(self._control) >= _MAX_KEPT:
            self._refuse(message.rank, f"one of {_MAX_KEPT} control messages about calls that it has not begun")
        else:
            if message.kind == WAITING:
                self._waits_in[message.rank] = message.number
            self._control.append(message)

    def _refuse(self, rank: int, what: str) -> None:
        """Take note of a message that cannot be read, for `_check_unreadable`."""
        self._unreadable.setdefault(rank, unreadable_error(self.rank, rank, what))

    def _check_unreadable(self) -> None:
        """Raise, once, for what a rank has sent that is no control message."""
        if self._unreadable:
            raise self._unreadable.popitem()[1]

    def awaited(self, call: bytes) -> bool:
        self._check_usable()
        self._listen(0.0)
        expected = WAITING, self.number + 1, call
        return any((message.kind, message.number, message.text) == expected for message in self._control)

    def _drop_old_control(self) -> None:
        """Drop the messages about earlier calls, whose bytes may still be on the way if a rank has left them."""
        if self._control:
            for message in self._control:
                if message.number < self.number and message.kind != WAITING:
                    self._abandon(message.number)
            self._control = [m for m in self._control if m.number >= self.number or m.kind == APART]

    # -- waits --------------------------------------------------------------------------------------------------------

    def _check_wait(self, peer: int, waited: float, *, ping: bool) -> None:
        """Return to go on waiting for ``peer`` after so many seconds, or raise. Control messages have been taken in.

        ``ping``: tell the peer that it is waited for.
        """
        self._check_leavers()
        self._check_waiters()
        self._check_ahead(peer, waited)
        if waited >= self.timeout:
            raise self._timed_out(peer)
        if ping and peer != self.rank:
            self._send_control(peer, WAITING, self._call)

    def _check_leavers(self) -> None:
        """Raise if another rank has left this call, or knows that calls do not pair any more."""
        self._check_unreadable()
        for rank, (round_no, number) in self._rounds.items():
            if round_no > self._round and number < self.number:  # of a call that it has begun it has sent, or told, all
                self._others_know = True
                raise CollectiveMismatchError(
                    f"rank {rank}, whose last call was {number}, waits in sparsecomm.realign() for rank {self.rank}, "
                    f"which makes call {self.number}: all ranks must call sparsecomm.realign(comm)"
                )
        for message in self._control:
            if message.kind == APART and message.number <= self.number:
                self._control.remove(message)  # later calls fail if they are apart, too
                self._others_know = message.number == self.number
                self._reason = message
                reason = message.text.decode(errors="replace").partition(";")[2]
                raise CollectiveMismatchError(
                    f"rank {message.rank} left call {message.number}; rank {self.rank} is in call {self.number}. "
                    f"{reason}"
                )
            if message.number == self.number and message.kind != WAITING:
                if self.skipped:
                    self._apart = True
                    raise CollectiveMismatchError(
                        f"rank {self.rank} begins call {self.number}, which rank {message.rank} has left: rank "
                        f"{self.rank} did not begin a call that it was asked to make ({self.skipped}), and is behind. "
                        f"{_HOW_TO_REALIGN}"
                    )
                self._others_know = True
                self._reason = message
                raise self._left_with(message)

    def _check_skipped(self) -> None:
        """Raise if others have left a call that this rank may have skipped; what they say has a moment to come."""
        deadline = self.clock() + _SKIPPED_WAIT
        while self.skipped and (remaining := deadline - self.clock()) > 0:
            self._pause(remaining)
            self._check_leavers()

    def _pause(self, seconds: float) -> None:
        """Hear what comes within so many seconds; let signal handlers run."""
        self._check_usable()
        check_signals()
        self._listen(seconds)

    def _check_ahead(self, peer: int, waited: float) -> None:
        """Raise if ``peer``, waited for in vain for so many seconds, has gone on without this call.

        A rank that has made this call has sent all of it before it says that it waits in a later one.
        """
        later = self._waits_in.get(peer, 0)
        if later <= self.number:
            return
        if self._ahead[:2] != (self.number, peer):
            self._ahead = self.number, peer, self.clock()
        elif min(waited, self.clock() - self._ahead[2]) > _GRACE:
            self._apart = True
            raise CollectiveMismatchError(
                f"rank {self.rank} waits in call {self.number} for rank {peer}, which waits in call {later} and has "
                f"sent nothing more of call {self.number}. {_HOW_TO_REALIGN}"
            )

    def _left_with(self, message: ControlMessage) -> SparseCommError:
        """Return the error for what a rank says that has left this call."""
        kind = _ERRORS[message.kind]
        head, _, reason = message.text.decode(errors="replace").partition(";")
        text = f"rank {message.rank} left call {self.number}, which rank {self.rank} is in. {reason}"
        if kind is RankFailedError:
            dead = head.split(",")
            return RankFailedError(text, [rank for rank in range(self.size) if str(rank) in dead])
        error: SparseCommError = kind(text)
        return error

    def _check_waiters(self) -> None:
        """Raise if a rank that waits for this one takes the call for another. Messages about later calls are kept."""
        now = [message for message in self._control if message.number == self.number]
        self._control = [message for message in self._control if message.number > self.number]
        for message in now:
            if message.text != self._call and self._mismatch is not None:
                raise self._mismatch(message.text, message.rank)

    def _timed_out(self, peer: int, state: str = "") -> TimeoutError:
        """Return the error for a wait for ``peer`` that took too long; ``state``: what it does, if that is known."""
        number = self._waits_in.get(peer, self.number)
        if not state and number != self.number:
            state = f"rank {peer} last said that it waits in call {number}"
        state = state and f"; {state}"
        return TimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s for rank {peer} in call {self.number}{state}. "
            f"Rank {peer} may have died, may be stuck, or may not make this call: all ranks must make the same calls "
            "in the same order. If it is only slow, set SPARSECOMM_TIMEOUT to more seconds."
        )

    # -- realignment --------------------------------------------------------------------------------------------------

    def realign(self) -> None:
        self._check_usable()
        self._read_timeout()
        self._in_call, self.skipped = False, ""
        others = [rank for rank in range(self.size) if rank != self.rank]
        deadline = self.clock() + self.timeout
        self._listen(0.0)
        self._announce(max(self._round + 1, self._latest_round()))
        while missing := [rank for rank in others if self._rounds.get(rank, (0, 0))[0] < self._round]:
            if self.clock() >= deadline:
                raise TimeoutError(
                    f"rank {self.rank} waited {self.timeout:g} s in sparsecomm.realign() for {format_ranks(missing)}. "
                    "All ranks must call it. If they are only slow, set SPARSECOMM_TIMEOUT to more seconds."
                )
            self._pause(0.05)
            self._check_unreadable()
            if self._latest_round() > self._round:
                self._announce(self._latest_round())
        self._go_on_from(max(number for _, number in [(0, self.number), *self._rounds.values()]))

    def _latest_round(self) -> int:
        """Return the last round of which another rank has told."""
        return max((round_no for round_no, _ in self._rounds.values()), default=0)

    def _announce(self, round_no: int) -> None:
        """Tell all ranks that this one takes part in a round."""
        for rank in range(self.size):
            if rank != self.rank:
                self._send_control(rank, REALIGN, round_no.to_bytes(8, "big"))
        self._round = round_no

    def _go_on_from(self, number: int) -> None:
        """Forget all calls up to ``number``: the next one is that after it."""
        self.number = number
        self._control = [message for message in self._control if message.number > number]
        self._waits_in.clear()


def unreadable_error(rank: int, source: int, what: str) -> TransportError:
    """Return the error of ``rank``, which got from ``source`` what no rank of this version sends; ``what`` names it."""
    return TransportError(
        f"rank {rank} received from rank {source} {what}, which this version of sparsecomm does not send: install one "
        f"version on all ranks; if they have the same, rank {source}, or the network, has damaged it"
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
