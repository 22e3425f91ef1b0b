"""Read trace files; find messages, the offsets between the ranks' clocks, late senders, and causes of failures."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sparsecomm.errors import InvalidInputError
from sparsecomm.quantities import time_text
from sparsecomm.tracing.observers import EXCHANGE
from sparsecomm.transport.control import format_ranks
from sparsecomm.tuning.clocks import Offset, offsets

# The first words of errors that a rank raises because another rank left the call or does not answer.
_CONSEQUENCES = ("TimeoutError", "RankFailedError", "TransportError", "CollectiveMismatchError", "left")
# A communicator: its ranks, as numbered in the job, and an index that tells communicators of the same ranks apart.
Communicator = tuple[tuple[int, ...], int]


@dataclass
class Part:
    """A part of a call. Ranks are numbered as in the job. Times are in seconds, by the clock of the rank."""

    name: str  # one of `sparsecomm.tracing.observers.PARTS`
    start: float
    end: float
    sent: list[tuple[int, int]] = field(default_factory=list)  # rank and bytes of each message
    received: list[tuple[int, int]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)  # the ranks for which it waited when it failed
    error: str = ""


@dataclass
class Call:
    """A call of one rank."""

    number: int  # on the communicator
    description: str  # the properties that the ranks must agree on, as text
    start: float
    end: float | None = None  # None: the file ends within the call
    error: str = ""
    parts: list[Part] = field(default_factory=list)  # including parts after `end`, which need no messages
    sent: int = 0  # bytes

    @property
    def exchanges(self) -> list[Part]:
        return [part for part in self.parts if part.name == EXCHANGE]


@dataclass
class Rank:
    """The trace of one rank of the job."""

    number: int
    host: str = ""
    node: str = ""  # an identifier that all ranks of a node share
    calls: dict[Communicator, list[Call]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)  # as in the file
    last: float = 0.0  # time of the last event
    ended: bool = False  # whether the process ended normally


class Message(NamedTuple):
    """A message that both its sender and its receiver recorded, with the exchanges that sent and received it."""

    sender: int
    receiver: int
    nbytes: int
    sent: Part
    received: Part


def read(paths: Iterable[Path]) -> dict[int, Rank]:
    """Read trace files, and return their ranks in the order of their numbers."""
    files: dict[int, tuple[Path, Rank]] = {}
    for path in paths:
        rank = _read_file(path)
        if rank.number in files:
            both = f"{files[rank.number][0]} and {path}"
            raise InvalidInputError(f"{both} are both of rank {rank.number}: pass one file of each rank")
        files[rank.number] = path, rank
    return {number: files[number][1] for number in sorted(files)}


def _read_file(path: Path) -> Rank:
    try:
        if not path.is_file():  # opening a FIFO could block forever, and a device may be endless
            path.stat()  # raises if nothing is there
            raise InvalidInputError(f"{path}: not a regular file; pass files that SPARSECOMM_TRACE wrote")
        with path.open() as file:
            lines = file.read().split("\n")[:-1] if file.read(2) == "[\n" else []  # a killed rank's last line is cut
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    try:
        return _read_events([json.loads(line.rstrip(",")) for line in lines])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{path}: not a file of SPARSECOMM_TRACE ({type(error).__name__}: {error})") from None


def _read_events(events: list[dict[str, Any]]) -> Rank:
    head = next((event for event in events if event["name"] == "process_name"), None)
    if head is None:
        raise ValueError("it does not begin with the name of a rank")
    rank = Rank(head["pid"], events=events)
    calls: dict[int, list[Call]] = {}  # by the number of the communicator in this file
    same: Counter[tuple[int, ...]] = Counter()  # communicators of the same ranks
    for event in events:
        kind, thread, details = event["ph"], event["tid"], event.get("args", {})
        if kind == "M":
            if event["name"] == "process_labels":
                rank.host, rank.node = details["labels"], details["node"]
            elif event["name"] == "thread_name" and thread not in calls:
                key = tuple(details["members"])
                calls[thread] = rank.calls[key, same[key]] = []
                same[key] += 1
            continue
        start = event["ts"] / 1e6
        end = start + event.get("dur", 0) / 1e6
        rank.last = max(rank.last, end)
        if kind == "B":
            calls[thread].append(Call(details["call"], details["what"], start))
        elif kind == "E" and calls[thread] and calls[thread][-1].end is None:
            call = calls[thread][-1]
            call.end, call.error, call.sent = start, details.get("error", ""), details["sent"]
        elif kind == "X" and calls[thread]:
            sent, received = ([(r, nbytes) for r, nbytes in details.get(key, ())] for key in ("sent", "received"))
            waited, error = details.get("waited", []), details.get("error", "")
            calls[thread][-1].parts.append(Part(event["cat"], start, end, sent, received, waited, error))
        elif kind == "i":
            rank.ended = event["name"] == "end"
    return rank


def messages(ranks: Mapping[int, Rank]) -> Iterator[Message]:
    """Yield the messages that both ranks recorded. The nth that one rank sent is the nth that the other received."""
    calls = [
        (rank.number, (communicator, call.number), call)
        for rank in ranks.values()
        for communicator, calls_of_rank in rank.calls.items()
        for call in calls_of_rank
    ]
    sends: dict[tuple[Any, int, int], list[Part]] = defaultdict(list)
    for number, key, call in calls:
        for exchange in call.exchanges:
            for to, _ in exchange.sent:
                sends[key, number, to].append(exchange)
    unmatched = {key: iter(exchanges) for key, exchanges in sends.items()}
    for number, key, call in calls:
        for exchange in call.exchanges:
            for source, nbytes in exchange.received:
                sent = next(unmatched.get((key, source, number), iter(())), None)
                if sent is not None:
                    yield Message(source, number, nbytes, sent, exchange)


def clock_offsets(ranks: Mapping[int, Rank]) -> dict[int, Offset]:
    """Return by how much each rank's clock is ahead of the first rank's: see `sparsecomm.tuning.clocks`."""
    fastest: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for message in messages(ranks):
        pair = message.sender, message.receiver
        fastest[pair] = min(fastest[pair], message.received.end - message.sent.start)
    return offsets(ranks, fastest, lambda a, b: ranks[a].node == ranks[b].node)


def late_senders(sent: Iterable[Message], ahead: Mapping[int, Offset]) -> Counter[tuple[int, int]]:
    """Return by (receiver, sender) how many seconds the receiver waited before the sender began to send.

    If an exchange receives several messages, only the latest counts (Scalasca's "late sender").
    """
    latest: dict[int, tuple[float, int, int]] = {}
    for message in sent:
        exchange = message.received
        begun = message.sent.start - ahead[message.sender].seconds
        start, end = (t - ahead[message.receiver].seconds for t in (exchange.start, exchange.end))
        late = min(begun, end) - start
        if late > max(0.0, latest.get(id(exchange), (0.0,))[0]):
            latest[id(exchange)] = late, message.receiver, message.sender
    seconds: Counter[tuple[int, int]] = Counter()
    for late, receiver, sender in latest.values():
        seconds[receiver, sender] += late  # type: ignore[assignment]
    return seconds


def verdicts(ranks: Mapping[int, Rank]) -> list[str]:
    """Return a text for each communicator with a failed call: how it ended on each rank, and the most likely cause.

    Most errors of a failed call are consequences of one fault: a rank does not make the call, and the others time out.
    """
    communicators = dict.fromkeys(key for rank in ranks.values() for key in rank.calls)
    return [text for key in communicators if (text := _verdict(key, ranks))]


def _verdict(communicator: Communicator, ranks: Mapping[int, Rank]) -> str:
    members, _ = communicator
    calls = {r: ranks[r].calls.get(communicator, []) for r in members if r in ranks}
    failed = [call.number for of_rank in calls.values() for call in of_rank if call.error or call.end is None]
    if not failed:
        return ""
    number = min(failed)
    participants = {r: call for r, of_rank in calls.items() for call in of_rank if call.number == number}
    (usual, _), *_ = Counter(call.description for call in participants.values()).most_common(1)
    lines = [f"Call {number} of {format_ranks(members)} did not end well: {usual}"]
    for rank, call in participants.items():
        waited = sorted({peer for exchange in call.exchanges if exchange.error for peer in exchange.waited})
        ended = "its file ends within the call" if call.end is None else call.error.split(". ")[0] or "ended well"
        lines.append(f"  rank {rank}: {f'waited for {format_ranks(waited)}: ' if waited else ''}{ended}")
    causes = _causes(number, usual, members, ranks, calls, participants)
    return "\n".join([*lines, f"=> {next(causes)}"])


def _causes(
    number: int,
    usual: str,
    members: Sequence[int],
    ranks: Mapping[int, Rank],
    calls: Mapping[int, Sequence[Call]],
    participants: Mapping[int, Call],
) -> Iterator[str]:
    """Yield a text for each possible cause of a failed call, the most certain one first."""
    absent = [r for r in members if r not in ranks]
    if absent:
        yield f"There is no file of {format_ranks(absent)}. Pass all files; a rank without one made no call."
    others = {r: call.description for r, call in participants.items() if call.description != usual}
    if others:
        differing = "; ".join(f"rank {r} made {what}" for r, what in others.items())
        yield f"Look at {format_ranks(list(others))}: {differing}."
    behind = [r for r in members if not any(call.number >= number for call in calls[r])]
    if behind:
        texts = []
        for r in behind:
            done = f"{calls[r][-1].number} calls" if calls[r] else "no call"
            ended = "ended normally" if ranks[r].ended else "wrote nothing more: it died, or is stuck in the program"
            texts.append(f"rank {r} made {done}, and {ended}")
        yield f"Look at {format_ranks(behind)}, which did not make call {number}: {'; '.join(texts)}."
    own = {r: call for r, call in participants.items() if call.error and not call.error.startswith(_CONSEQUENCES)}
    if own:
        rank = min(own, key=lambda r: own[r].end or 0.0)
        yield f"Look at rank {rank}, which left the call with an error of its own: {own[rank].error}"
    stopped = [r for r, call in participants.items() if call.end is None]
    if 0 < len(stopped) < len(participants):
        left = max(call.end or 0.0 for call in participants.values())
        silent = ", ".join(time_text(max(0.0, left - ranks[r].last)) for r in stopped)
        yield (
            f"Look at {format_ranks(stopped)}, which began the call and wrote nothing more ({silent} before the other "
            "ranks gave up): it died there, or is stuck."
        )
    yield "All ranks waited: messages may have been lost, or one rank is slow. See who waited for whom."
