"""The messages that both their sender and their receiver have recorded, and the clock offsets that follow from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sparsecomm.tracing.events import Call, Communicator, Exchange, Rank
from sparsecomm.tuning.clocks import Offset, offsets

__all__ = ["Message", "clock_offsets", "messages"]


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


def clock_offsets(ranks: Mapping[int, Rank]) -> dict[int, Offset]:
    """Return by how much the clock of each rank is ahead of that of the first one: see `sparsecomm.tuning.clocks`."""
    fastest: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for message in messages(ranks):
        pair = message.sender, message.receiver
        fastest[pair] = min(fastest[pair], message.received.end - message.sent.start)
    return offsets(ranks, fastest, lambda a, b: ranks[a].node == ranks[b].node)


def _calls(ranks: Iterable[Rank]) -> Iterator[tuple[Rank, Communicator, Call]]:
    for rank in ranks:
        for communicator, calls in rank.calls.items():
            for call in calls:
                yield rank, communicator, call
