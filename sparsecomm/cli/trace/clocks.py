"""Set the clocks of the ranks right, by the messages that went both ways between them.

A message cannot arrive before it was sent. Between two ranks the fastest message of each direction bounds by how much
one clock is ahead of the other's, from both sides; the middle is taken, as NTP does (RFC 5905, section 8). Pairs are
taken in the order of how narrow their bounds are, so that each rank is set by those that know it best.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from sparsecomm.cli.trace.events import Call, Communicator, Exchange, Rank

__all__ = ["Message", "Offset", "messages", "offsets"]


@dataclass(frozen=True)
class Message:
    """A message, as both ends have told of it. Ranks are those of the job.

    Attributes:
        sender, receiver: ranks.
        nbytes: its length.
        sent: the exchange that it was sent in.
        received: that in which it came.
    """

    sender: int
    receiver: int
    nbytes: int
    sent: Exchange
    received: Exchange


class Offset(NamedTuple):
    """By how many seconds the clock of a rank is ahead, and by how many that may be wrong."""

    seconds: float
    bound: float


def messages(ranks: Mapping[int, Rank]) -> Iterator[Message]:
    """Yield the messages of which both ends have told: the nth that one sent is the nth that the other received."""
    sends: dict[tuple[Communicator, int, int, int], list[Exchange]] = defaultdict(list)
    for rank, communicator, call in _calls(ranks.values()):
        for exchange in call.exchanges:
            for to, _ in exchange.sent:
                sends[communicator, call.number, rank.number, to].append(exchange)
    for rank, communicator, call in _calls(ranks.values()):
        taken: dict[int, int] = defaultdict(int)
        for exchange in call.exchanges:
            for source, nbytes in exchange.received:
                sent = sends.get((communicator, call.number, source, rank.number), [])
                if taken[source] < len(sent):
                    yield Message(source, rank.number, nbytes, sent[taken[source]], exchange)
                taken[source] += 1


def offsets(ranks: Mapping[int, Rank]) -> dict[int, Offset]:
    """Return by how much the clock of each rank is ahead of that of the first one.

    Those of ranks that no messages connect with it are left as they are, with a bound of infinity.
    """
    fastest: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for message in messages(ranks):
        pair = message.sender, message.receiver
        fastest[pair] = min(fastest[pair], message.received.end - message.sent.start)
    found: dict[int, Offset] = {}
    while missing := [number for number in ranks if number not in found]:
        known = [
            (_between(fastest, ranks[a], ranks[b]), a, b)
            for a, b in permutations(ranks, 2)
            if a in found and b not in found
        ]
        if not known:
            found[missing[0]] = Offset(0.0, 0.0 if not found else math.inf)
            continue
        ahead, a, b = min(known, key=lambda pair: (pair[0].bound, pair[1:]))
        start = found[a] if math.isfinite(ahead.bound) else Offset(0.0, 0.0)
        found[b] = Offset(start.seconds + ahead.seconds, start.bound + ahead.bound)
    return found


def _between(fastest: Mapping[tuple[int, int], float], a: Rank, b: Rank) -> Offset:
    """Return by how much the clock of b is ahead of that of a."""
    if a.node == b.node:
        return Offset(0.0, 0.0)  # they have one clock
    there, back = fastest[a.number, b.number], fastest[b.number, a.number]
    if not math.isfinite(there + back):
        return Offset(0.0, math.inf)
    return Offset((there - back) / 2, abs(there + back) / 2)


def _calls(ranks: Iterable[Rank]) -> Iterator[tuple[Rank, Communicator, Call]]:
    for rank in ranks:
        for communicator, calls in rank.calls.items():
            for call in calls:
                yield rank, communicator, call
