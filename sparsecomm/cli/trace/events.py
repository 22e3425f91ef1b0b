"""What the files of SPARSECOMM_TRACE say: the calls of each rank, and their messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsecomm.errors import InvalidInputError
from sparsecomm.tracing.observers import EXCHANGE

__all__ = ["Call", "Communicator", "Exchange", "Part", "Rank", "read"]

# The ranks of a communicator, and which of those with these ranks it is: the same on all of its ranks.
Communicator = tuple[tuple[int, ...], int]


@dataclass
class Part:
    """A part of a call.

    Attributes:
        name: as in `sparsecomm.tracing.observers.PARTS`.
        start, end: seconds, by the rank's clock.
    """

    name: str
    start: float
    end: float


@dataclass
class Exchange(Part):
    """Messages that were sent and received at once. Ranks are those of the job.

    Attributes:
        sent, received: ranks and bytes.
        waited: whom it waited for in vain.
        error: that it raised; empty: none.
    """

    sent: list[tuple[int, int]] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    error: str = ""


@dataclass
class Call:
    """A call of a rank.

    Attributes:
        number: on its communicator.
        what: what the ranks must agree on, in words.
        start: seconds, by the rank's clock.
        end: ``None``: the file ends within the call.
        error: that ended it; empty: none.
        parts: in order, also those that this rank did when the call was decided.
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
    def exchanges(self) -> list[Exchange]:
        """Its messages."""
        return [part for part in self.parts if isinstance(part, Exchange)]


@dataclass
class Rank:
    """What a rank has written.

    Attributes:
        number: in the job.
        host, node: its name, and an identifier that the ranks of one node share.
        calls: by communicator.
        events: as the file has them.
        last: seconds, by its clock, of its last event.
        ended: whether its process ended in order.
    """

    number: int
    host: str = ""
    node: str = ""
    calls: dict[Communicator, list[Call]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    last: float = 0.0
    ended: bool = False


def read(paths: Iterable[Path]) -> dict[int, Rank]:
    """Return the ranks whose files these are, in order of their numbers.

    Raises:
        InvalidInputError: a file cannot be read, or is none of SPARSECOMM_TRACE, or two are of one rank.
    """
    found: dict[int, tuple[Path, Rank]] = {}
    for path in paths:
        rank = _rank(path)
        if rank.number in found:
            raise InvalidInputError(
                f"{found[rank.number][0]} and {path} are both of rank {rank.number}: expected one file of each rank"
            )
        found[rank.number] = path, rank
    return {number: found[number][1] for number in sorted(found)}


def _rank(path: Path) -> Rank:
    try:
        if not path.is_file():  # to open a FIFO could wait for ever, and a device may have no end
            path.stat()  # raises if nothing is there
            raise InvalidInputError(f"{path}: not a regular file; pass files that SPARSECOMM_TRACE wrote")
        with path.open() as file:
            lines = file.read().splitlines() if file.read(2) == "[\n" else []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    if lines and not lines[-1].endswith(","):
        del lines[-1]  # it was cut short when the rank died
    try:
        return _read_events([json.loads(line.rstrip(",")) for line in lines])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{path}: no file of SPARSECOMM_TRACE ({type(error).__name__}: {error})") from None


def _read_events(events: list[dict[str, Any]]) -> Rank:
    head = next((event for event in events if event["name"] == "process_name"), None)
    if head is None:
        raise ValueError("it does not begin with the name of a rank")
    rank = Rank(head["pid"], events=events)
    members: dict[int, list[int]] = {}  # of each communicator of this file
    calls: dict[int, list[Call]] = {}
    same: Counter[tuple[int, ...]] = Counter()  # communicators of the same ranks
    for event in events:
        kind, thread, details = event["ph"], event["tid"], event.get("args", {})
        if kind == "M":
            if event["name"] == "process_labels":
                rank.host, rank.node = details["labels"], details["node"]
            elif event["name"] == "thread_name" and thread not in members:
                members[thread] = details["members"]
                key = tuple(details["members"])
                calls[thread] = rank.calls[key, same[key]] = []
                same[key] += 1
            continue
        start = event["ts"] / 1e6
        rank.last = max(rank.last, start + event.get("dur", 0) / 1e6)
        if kind == "B":
            calls[thread].append(Call(details["call"], details["what"], start))
        elif kind == "E" and calls[thread] and calls[thread][-1].end is None:
            call = calls[thread][-1]
            call.end, call.error, call.sent = start, details.get("error", ""), details["sent"]
        elif kind == "X" and calls[thread]:
            calls[thread][-1].parts.append(_part(event, start, members[thread]))
        elif kind == "i":
            rank.ended = event["name"] == "end"
    return rank


def _part(event: dict[str, Any], start: float, members: Sequence[int]) -> Part:
    details, end = event["args"], start + event["dur"] / 1e6
    if event["cat"] != EXCHANGE:
        return Part(event["cat"], start, end)
    sent, received = ([(members[r], nbytes) for r, nbytes in details.get(key, ())] for key in ("sent", "received"))
    waited = [members[r] for r in details.get("waited", ())]
    return Exchange(EXCHANGE, start, end, sent, received, waited, details.get("error", ""))
