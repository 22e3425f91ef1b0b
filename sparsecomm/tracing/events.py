"""Read trace files: the calls of each rank, the messages between ranks, and the offsets of their clocks."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sparsecomm.errors import InvalidInputError
from sparsecomm.tracing.observers import EXCHANGE
from sparsecomm.tuning.clocks import Offset, offsets

__all__ = ["Call", "Communicator", "Message", "Part", "Rank", "clock_offsets", "late_senders", "messages", "read"]

# The ranks of a communicator, as numbered in the job, and a number that tells communicators of the same ranks apart.
Communicator = tuple[tuple[int, ...], int]


@dataclass
class Part:
    """A part of a call. Ranks are numbered as in the job.

    Attributes:
        name: one of `sparsecomm.tracing.observers.PARTS`.
        start, end: seconds, by the rank's clock.
        sent, received: ranks and bytes of the messages, if it is an exchange.
        waited: the ranks that it waited for when it failed.
        error: the error that it raised; empty if none.
    """

    name: str
    start: float
    end: float
    sent: list[tuple[int, int]] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    error: str = ""


@dataclass
class Call:
    """A call of one rank.

    Attributes:
        number: its number on the communicator.
        what: the properties that the ranks must agree on, in words.
        start, end: seconds, by the rank's clock; ``end`` is None if the file ends within the call.
        error: the error that ended it; empty if none.
        parts: in order, including the parts done after the call was decided.
        sent: bytes.
    """

    number: int
    what: str
    start: float
    end: float | None = None
    error: str = ""
    parts: list[Part] = field(default_factory=list)
    sent: int = 0

    @property
    def exchanges(self) -> list[Part]:
        """The parts that exchange messages."""
        return [part for part in self.parts if part.name == EXCHANGE]


@dataclass
class Rank:
    """The trace of one rank.

    Attributes:
        number: its number in the job.
        host, node: name of its node, and an identifier that all ranks of the node share.
        calls: by communicator.
        events: as in the file.
        last: time of its last event in seconds, by its clock.
        ended: whether its process ended normally.
    """

    number: int
    host: str = ""
    node: str = ""
    calls: dict[Communicator, list[Call]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    last: float = 0.0
    ended: bool = False


class Message(NamedTuple):
    """A message that both its sender and its receiver recorded, with the exchanges that sent and received it."""

    sender: int
    receiver: int
    nbytes: int
    sent: Part
    received: Part


def read(paths: Iterable[Path]) -> dict[int, Rank]:
    """Read trace files, and return their ranks in the order of their numbers.

    Raises:
        InvalidInputError: a file cannot be read or is not a trace file, or two files belong to the same rank.
    """
    found: dict[int, tuple[Path, Rank]] = {}
    for path in paths:
        rank = _read_file(path)
        if rank.number in found:
            raise InvalidInputError(
                f"{found[rank.number][0]} and {path} are both of rank {rank.number}: pass one file of each rank"
            )
        found[rank.number] = path, rank
    return {number: found[number][1] for number in sorted(found)}


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
    """Yield the messages recorded at both ends: the nth that one rank sent is the nth that the other received."""
    calls = [
        (rank.number, (communicator, call.number), call)
        for rank in ranks.values()
        for communicator, each in rank.calls.items()
        for call in each
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
    """Return how far each rank's clock is ahead of the first rank's: see `sparsecomm.tuning.clocks`."""
    fastest: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for message in messages(ranks):
        pair = message.sender, message.receiver
        fastest[pair] = min(fastest[pair], message.received.end - message.sent.start)
    return offsets(ranks, fastest, lambda a, b: ranks[a].node == ranks[b].node)


def late_senders(sent: Iterable[Message], ahead: Mapping[int, Offset]) -> Counter[tuple[int, int]]:
    """Return the seconds in which a rank, the first of a pair, waited for another one that had not begun to send.

    Of several messages in one exchange, only the latest counts. Scalasca calls this "late sender".
    """
    latest: dict[int, tuple[float, int, int]] = {}
    for message in sent:
        exchange = message.received
        begun = message.sent.start - ahead[message.sender].seconds
        start, end = (t - ahead[message.receiver].seconds for t in (exchange.start, exchange.end))
        late = min(begun, end) - start
        if late > max(0.0, latest.get(id(exchange), (0.0,))[0]):
            latest[id(exchange)] = late, message.receiver, message.sender
    found: Counter[tuple[int, int]] = Counter()
    for late, receiver, sender in latest.values():
        found[receiver, sender] += late  # type: ignore[assignment]
    return found
