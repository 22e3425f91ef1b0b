"""`FailureDetector`: ends the waits of all ranks when a call fails on one of them.

Besides the data of calls, ranks send each other control messages. Their kinds are:

- `WAITING`: "I have been waiting for you in call 17, whose description is ...". A receiver with another description of
  call 17 raises and leaves the call. This ends a cycle of waiting ranks before the timeout.
- `LEFT`: "I left call 17 with this error". Ranks that wait in call 17 leave it, too.
- `OUT_OF_STEP`: "I left call 17 because the ranks' calls are out of step". Ranks in call 17 or later leave it.
- `CONTENTS`: "Your call 17 differs from mine, which contains ...", in several pieces. The receiver answers with its own
  contents and leaves the call, too, so that both ranks can say what differs.
- `REALIGN`: "I wait for all ranks in `realign`, and my last call was 17". Ranks in a call leave it. The message has a
  round number: if `realign` is called again after a timeout, it begins the next round, which all ranks join.

Each transport decides how these messages travel and when a rank reads them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from sparsecomm import config
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    TimeoutError,
    TransportError,
    describe,
)
from sparsecomm.signals import poll
from sparsecomm.transport.base import (
    HOST,
    MAX_CALL_BYTES,
    MAX_CONTENTS_BYTES,
    Bytes,
    MessageMemory,
    Mismatch,
    TrafficCounters,
    Transport,
)

WAITING, LEFT, LEFT_BY_MISMATCH, LEFT_BY_DEATH, OUT_OF_STEP, REALIGN, CONTENTS = range(7)
_ERRORS = {LEFT: TransportError, LEFT_BY_MISMATCH: CollectiveMismatchError, LEFT_BY_DEATH: RankFailedError}
_KIND_OF_ERROR = {error: kind for kind, error in _ERRORS.items()}
MAX_CONTROL_BYTES = 1000  # short enough to be sent without waiting for the receiver
FIRST_PING = 0.25  # seconds of waiting before the first `WAITING` message; the interval doubles after each message
_MAX_DEAD_RANKS = 32  # named in a control message
_MAX_NUMBER = 2**62  # of a call or a round
_MAX_STORED = 10_000  # control messages about this call and later ones
_PIECE = MAX_CONTROL_BYTES - 2  # bytes of contents in a message, after the piece's number and the number of pieces
_MAX_PIECES = -(-MAX_CONTENTS_BYTES // _PIECE)
_CONTENTS_TIME = 3.0  # seconds to wait for the contents of another rank
_SKIPPED_WAIT = 0.1  # seconds for which a rank that skipped a call waits in the next one for reports of other ranks
_GRACE = 0.25  # seconds in which data may still arrive from a rank that waits in a later call
_HOW_TO_REALIGN = "Call sparsecomm.realign(comm) on all ranks, then make the same call on all ranks."
_IF_SLOW = {
    "communicator": "If it is only slow, increase SPARSECOMM_TIMEOUT (seconds).",
    "process group": "If it is only slow, increase the timeout= of the process group, which SPARSECOMM_TIMEOUT "
    "(seconds) overrides.",
}


@dataclass(slots=True, eq=False)
class ControlMessage:
    """A control message from ``rank`` about call ``number``."""

    rank: int
    number: int
    kind: int
    text: bytes

    @property
    def fault(self) -> str:
        """Why this is not a valid control message; empty if it is."""
        if not (WAITING <= self.kind <= CONTENTS and 0 <= self.number < _MAX_NUMBER):
            return f"a control message of kind {self.kind} about call {self.number}"
        if len(self.text) > MAX_CONTROL_BYTES:
            return f"a control message of {len(self.text)} bytes"
        if self.kind == REALIGN and (len(self.text) != 8 or self.round_no >= _MAX_NUMBER):
            return f"a control message about round {self.text!r}"
        if self.kind == CONTENTS and (len(self.text) < 2 or not self.text[0] < self.text[1] <= _MAX_PIECES):
            return f"a control message with contents that begin with {self.text[:2]!r}"
        return ""

    @property
    def round_no(self) -> int:
        """The round number of a `REALIGN` message."""
        return int.from_bytes(self.text, "big")

    @property
    def reason(self) -> tuple[str, str]:
        """The dead ranks, separated by commas, and the error text of a message from a rank that left a call."""
        dead, _, text = self.text.decode(errors="replace").partition(";")
        return dead, text


class FailureDetector(Transport):
    """A transport whose ranks report to each other which calls they left, and in which calls they wait.

    All transports inherit call numbers, the checks that end a wait, `realign` and `close` from it.
    """

    _ranks_are = "communicator"  # or "process group": what connects the ranks

    def __init__(self, node_of_rank: Sequence[int], num_nodes: int = 0) -> None:
        """Start outside of a call. ``num_nodes``: number of nodes; 0: count them."""
        self.node_of_rank, self.num_nodes = node_of_rank, num_nodes or len(set(node_of_rank))
        self.counters = TrafficCounters()
        self.number = 0
        self._timeout_text: object = ...  # the variable from which `timeout` was read; not read yet
        self._call = b""
        self._mismatch: Mismatch | None = None
        self._in_call = False  # between `begin` and `end` or `abort`
        self._others_informed = False  # whether the other ranks know that this call has failed
        self._received_reason: ControlMessage | None = None  # the report that made this rank leave the call
        self._control: list[ControlMessage] = []  # about this call and later ones
        self._contents: dict[tuple[int, int], dict[int, bytes]] = {}  # (rank, call) -> contents in pieces
        self._unreadable: dict[int, TransportError] = {}  # sender of an invalid message -> the error to raise
        self._waiting_in: dict[int, int] = {}  # rank -> the latest call in which it reported to wait
        self._out_of_step = False  # whether this call failed because the ranks' calls are out of step
        self._peer_ahead: tuple[int, int, float] = 0, 0, 0.0  # this call, the peer that is ahead, when this was noticed
        self._round = 0  # the latest round of `realign` in which this rank took part
        self._rounds: dict[int, tuple[int, int]] = {}  # rank -> its latest round of `realign`, and its last call
        self._read_timeout()

    # -- for each transport to implement ------------------------------------------------------------------------------

    @abstractmethod
    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        """Send a control message about the current call without waiting for the receiver."""

    @abstractmethod
    def _receive_control(self, seconds: float) -> None:
        """Pass control messages that have arrived, or arrive within ``seconds``, to `_add_control`."""

    def _check_usable(self) -> None:
        """Raise if no call can be made: `InvalidInputError` if the transport is closed."""

    def _abandon(self, number: int) -> None:
        """Record that a rank has left call ``number``, so that its data may arrive late."""

    def _close(self) -> None:
        """Close the transport. Must be idempotent."""

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        self._check_usable()
        self._begin_call(call, mismatch)
        self._prepare_call()
        return self.number

    def _begin_call(self, call: bytes, mismatch: Mismatch) -> int:
        """Begin the next call, and return its number. If an argument or a setting is invalid, change nothing."""
        self._read_timeout()
        if len(call) > MAX_CALL_BYTES:
            raise InvalidInputError(f"call has {len(call)} bytes; at most {MAX_CALL_BYTES} are allowed")
        if self._in_call:
            self._abandon(self.number)
        self.number += 1
        self._call, self._mismatch = call, mismatch
        self._in_call, self._others_informed, self._out_of_step = True, False, False
        self._received_reason = None
        return self.number

    def _prepare_call(self) -> None:
        """Raise if other ranks have already left this call. Subclasses first discard messages of earlier calls."""
        if self._control or self._unreadable or self._rounds:
            self._check_leavers()
        if self.skip_reason:
            deadline = self.clock() + _SKIPPED_WAIT
            while (remaining := deadline - self.clock()) > 0:
                self._pause(remaining)
                self._check_leavers()

    def _read_timeout(self) -> None:
        if (text := config.variable(config.TIMEOUT)) is not self._timeout_text:
            self.timeout, self._timeout_text = config.timeout(), text

    def end(self) -> None:
        self._in_call, self.skip_reason, self.last_success = False, "", self.number

    def abort(self, error: BaseException) -> None:
        if self._in_call:
            self._abandon(self.number)
            self._send_left(error)
            self._in_call = False

    def close(self) -> None:
        """Close the transport after the calls in flight have ended."""
        if self.close_after_calls is None:
            self._close()
        else:
            self.close_after_calls(self._close)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise TransportError(f"rank {self.rank} names rank {rank} as its peer: there are {self.size} ranks")

    def _count_sent(self, nbytes: int) -> None:
        self.counters.messages_sent += 1
        self.counters.bytes_sent += nbytes

    def _deliver(self, message: Bytes, nbytes: int, memory: MessageMemory) -> Bytes:
        """Count a message of ``nbytes`` that arrived in host memory, and return it in ``memory``."""
        self.counters.messages_received += 1
        self.counters.bytes_received += nbytes
        if memory is HOST:
            return message
        copy = memory.empty(len(message))
        copy[:] = message
        return copy

    # -- control messages ---------------------------------------------------------------------------------------------

    def _send_left(self, error: BaseException) -> None:
        """Report to all other ranks that this rank leaves the call with ``error``, unless they already know."""
        if self._others_informed:
            return
        kind = OUT_OF_STEP if self._out_of_step else _KIND_OF_ERROR.get(type(error), LEFT)
        dead = error.ranks if isinstance(error, RankFailedError) else ()
        text = f"{','.join(map(str, dead[:_MAX_DEAD_RANKS]))};{describe(error)}".encode()[:MAX_CONTROL_BYTES]
        for rank in range(self.size):
            if rank != self.rank and rank not in dead:
                with suppress(TransportError):  # the rank may be dead
                    self._send_control(rank, kind, text)
        self._others_informed = True

    def _add_control(self, message: ControlMessage) -> None:
        """Store a control message that has arrived, for `_check_leavers` and `_check_waiters`."""
        if fault := message.fault:
            self._add_unreadable(message.rank, fault)
        elif message.kind == REALIGN:
            self._rounds[message.rank] = message.round_no, message.number
        elif message.kind == CONTENTS:
            call = message.rank, message.number
            if call not in self._contents:  # keep those of a rank's latest call, and of this call
                others = {
                    key: p for key, p in self._contents.items() if key[0] != message.rank or key[1] == self.number
                }
                self._contents = others
            self._contents.setdefault(call, {})[message.text[0]] = message.text
        elif len(self._control) >= _MAX_STORED:
            fault = f"one of {_MAX_STORED} control messages about calls that this rank has not begun"
            self._add_unreadable(message.rank, fault)
        else:
            if message.kind == WAITING:
                self._waiting_in[message.rank] = message.number
            self._control.append(message)

    def _add_unreadable(self, rank: int, description: str) -> None:
        """Store the error for an invalid message from ``rank``, for `_check_leavers`."""
        self._unreadable.setdefault(rank, unreadable_error(self.rank, rank, description))

    def _check_unreadable(self) -> None:
        if self._unreadable:
            raise self._unreadable.popitem()[1]

    def awaited(self, call: bytes) -> bool:
        self._check_usable()
        self._receive_control(0.0)
        expected = WAITING, self.number + 1, call
        return any((message.kind, message.number, message.text) == expected for message in self._control)

    def _drop_old_control(self) -> None:
        """Drop control messages about earlier calls, and abandon those calls that other ranks have left."""
        for message in self._control:
            if message.number < self.number and message.kind != WAITING:
                self._abandon(message.number)
        self._control = [m for m in self._control if m.number >= self.number or m.kind == OUT_OF_STEP]

    def exchange_contents(self, peer: int, contents: bytes) -> bytes | None:
        deadline, sent, lost = self.clock() + min(self.timeout, _CONTENTS_TIME), set[int](), False
        texts = [contents[begin : begin + _PIECE] for begin in range(0, len(contents), _PIECE)]
        while True:
            for rank in {peer, *self._ranks_that_differ()} - sent:
                for i, text in enumerate(texts):
                    with suppress(TransportError):  # the rank may be dead
                        self._send_control(rank, CONTENTS, bytes([i, len(texts)]) + text)
                sent.add(rank)
            pieces = self._contents.get((peer, self.number), {})
            if pieces and all(len(pieces) == text[1] for text in pieces.values()):
                return b"".join(pieces[i][2:] for i in sorted(pieces))
            self._check_leavers()
            if lost or self.clock() >= deadline:
                return None
            try:
                self._receive_control(0.05)
            except TransportError:  # messages may have arrived before a connection broke
                lost = True

    def _ranks_that_differ(self) -> list[int]:
        return [rank for rank, number in self._contents if number == self.number]

    # -- waits --------------------------------------------------------------------------------------------------------

    def _check_wait(self, peer: int, waited: float, next_ping: float) -> float:
        """Raise if the wait for ``peer`` must end after ``waited`` seconds. Call `_receive_control` first.

        Send a `WAITING` message to the peer if the wait has reached ``next_ping`` seconds. Return the next value of
        ``next_ping``; the first one is `FIRST_PING`.
        """
        self._check_leavers()
        self._check_waiters()
        self._check_ahead(peer, waited)
        if waited >= self.timeout:
            raise self._timed_out(peer)
        if waited < next_ping:
            return next_ping
        if peer != self.rank:
            self._send_control(peer, WAITING, self._call)
        return 2 * next_ping + FIRST_PING

    def _check_leavers(self) -> None:
        """Raise if another rank has left this call, or has noticed that the ranks' calls are out of step."""
        self._check_unreadable()
        for rank, (round_no, number) in self._rounds.items():
            if round_no > self._round and number < self.number:  # that rank is between calls
                self._others_informed = True
                raise CollectiveMismatchError(
                    f"rank {rank}, whose last call was {number}, waits in sparsecomm.realign(), but rank {self.rank} "
                    f"makes call {self.number}: call sparsecomm.realign(comm) on all ranks"
                )
        for message in self._control:
            if message.kind == OUT_OF_STEP and message.number <= self.number:
                self._control.remove(message)  # a later call sends its own if the ranks are still out of step
                self._others_informed = message.number == self.number
                self._received_reason = message
                raise CollectiveMismatchError(
                    f"rank {message.rank} left call {message.number}; rank {self.rank} is in call {self.number}. "
                    f"{message.reason[1]}"
                )
            if message.number == self.number and message.kind != WAITING:
                if self.skip_reason:
                    self._out_of_step = True
                    raise CollectiveMismatchError(
                        f"rank {self.rank} begins call {self.number}, which rank {message.rank} has already left: rank "
                        f"{self.rank} skipped an earlier call ({self.skip_reason}) and is behind. {_HOW_TO_REALIGN}"
                    )
                self._others_informed = True
                self._received_reason = message
                dead, reason = message.reason
                text = f"rank {message.rank} left call {self.number}, which rank {self.rank} is in. {reason}"
                if message.kind == LEFT_BY_DEATH:
                    raise RankFailedError(text, [rank for rank in range(self.size) if str(rank) in dead.split(",")])
                raise _ERRORS[message.kind](text)

    def _check_waiters(self) -> None:
        """Raise if a rank that waits for this one is in a different call; keep messages about later calls."""
        current = [message for message in self._control if message.number == self.number]
        self._control = [message for message in self._control if message.number > self.number]
        for message in current:
            if message.text != self._call and self._mismatch is not None:
                raise self._mismatch(message.text, message.rank)
        for rank in self._ranks_that_differ():
            error = CollectiveMismatchError(
                f"rank {rank} found that rank {self.rank} makes another call; make the same calls in the same order on "
                "all ranks"
            )
            error.peer = rank
            raise error

    def _check_ahead(self, peer: int, waited: float) -> None:
        """Raise if ``peer`` waits in a later call, and therefore sends nothing more in this one."""
        later = self._waiting_in.get(peer, 0)
        if later <= self.number:
            return
        if self._peer_ahead[:2] != (self.number, peer):
            self._peer_ahead = self.number, peer, self.clock()
        elif min(waited, self.clock() - self._peer_ahead[2]) > _GRACE:
            self._out_of_step = True
            raise CollectiveMismatchError(
                f"the ranks' calls are out of step: rank {self.rank} waits in call {self.number} for rank {peer}, "
                f"which waits in call {later}. {_HOW_TO_REALIGN}"
            )

    def _timed_out(self, peer: int, state: str = "") -> TimeoutError:
        """Return the timeout error of a wait for ``peer``; ``state`` describes the peer, if known."""
        number = self._waiting_in.get(peer, self.number)
        if not state and number != self.number:
            state = f"rank {peer} last reported that it waits in call {number}"
        state = state and f"; {state}"
        return TimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s for rank {peer} in {self.describe_call()}{state}. "
            f"Rank {peer} may be dead or stuck, or it does not make this call: make the same calls in the same order "
            f"on all ranks. {_IF_SLOW[self._ranks_are]}"
        )

    def _pause(self, seconds: float) -> None:
        """Wait up to ``seconds`` for control messages. Signal handlers run first."""
        self._check_usable()
        poll()
        self._receive_control(seconds)

    # -- realignment --------------------------------------------------------------------------------------------------

    def realign(self) -> None:
        self._check_usable()
        self._read_timeout()
        self._in_call, self.skip_reason = False, ""
        others = [rank for rank in range(self.size) if rank != self.rank]
        deadline = self.clock() + self.timeout
        self._receive_control(0.0)
        self._join_round(max(self._round + 1, self._latest_round()))
        while missing := [rank for rank in others if self._rounds.get(rank, (0, 0))[0] < self._round]:
            if self.clock() >= deadline:
                raise TimeoutError(
                    f"rank {self.rank} waited {self.timeout:g} s in sparsecomm.realign() for {format_ranks(missing)}. "
                    f"Call it on all ranks. {_IF_SLOW[self._ranks_are]}"
                )
            self._pause(0.05)
            self._check_unreadable()
            if self._latest_round() > self._round:
                self._join_round(self._latest_round())
        self._continue_after(max(number for _, number in [(0, self.number), *self._rounds.values()]))

    def _latest_round(self) -> int:
        return max((round_no for round_no, _ in self._rounds.values()), default=0)

    def _join_round(self, round_no: int) -> None:
        """Take part in a round, and report this to all other ranks."""
        for rank in range(self.size):
            if rank != self.rank:
                self._send_control(rank, REALIGN, round_no.to_bytes(8, "big"))
        self._round = round_no

    def _continue_after(self, number: int) -> None:
        """Forget all calls up to ``number``; the next call is ``number + 1``."""
        self.number = number
        self._control = [message for message in self._control if message.number > number]
        self._contents.clear()
        self._waiting_in.clear()


def unreadable_error(rank: int, source: int, description: str) -> TransportError:
    """Return the error of ``rank`` for an invalid message from ``source``."""
    return TransportError(
        f"rank {rank} received from rank {source} {description}, which this version of sparsecomm does not send. "
        f"Install the same version on all ranks. If they have it, rank {source} or the network damaged the message"
    )


def missing_ranks_error(rank: int, seconds: float, group: str, missing: str) -> TimeoutError:
    """Return the error for ranks that do not make the first call on a ``group``: "communicator" or "process group".

    ``missing``: the ranks and a verb for the text "... not called", such as "rank 3 has".
    """
    return TimeoutError(
        f"rank {rank} waited {seconds:g} s for the first call on this {group}, which all its ranks must make: "
        f"{missing} not called. {_IF_SLOW[group]}"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers as text, such as "rank 3" or "ranks 1, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {ranks[0]} ... {ranks[-1]} ({len(ranks)} ranks)"
    return "ranks " + ", ".join(map(str, ranks))
