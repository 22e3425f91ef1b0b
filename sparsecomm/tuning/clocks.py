"""Estimates the clock offsets between ranks from messages in both directions.

A message cannot arrive before it was sent, so the fastest message of each direction bounds the offset. The estimate is
the middle of the two bounds, as in NTP (RFC 5905, section 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Offset(NamedTuple):
    """Seconds by which the clock of a rank is ahead, and the maximum error."""

    seconds: float
    bound: float


def offsets(
    ranks: Iterable[int],
    fastest: Mapping[tuple[int, int], float],
    share_clock: Callable[[int, int], bool] = lambda a, b: False,
) -> dict[int, Offset]:
    """Return the clock offset of each rank to the first one.

    Ranks that no chain of messages connects to the first one get offset 0 and an infinite bound.

    Args:
        ranks: rank numbers.
        fastest: by (sender, receiver), the shortest time from a message's departure on the sender's clock to its
            arrival on the receiver's clock.
        share_clock: whether two ranks share one clock.
    """

    def between(a: int, b: int) -> Offset:
        if share_clock(a, b):
            return Offset(0.0, 0.0)
        there, back = (fastest.get(pair, math.inf) for pair in ((a, b), (b, a)))
        if not math.isfinite(there + back):
            return Offset(0.0, math.inf)
        return Offset((there - back) / 2, abs(there + back) / 2)

    known = dict[int, Offset]()
    nearest = {rank: (math.inf, -1, Offset(0.0, math.inf)) for rank in ranks}  # a bound, the known rank, the offset
    while nearest:  # Prim's algorithm for the spanning tree with the narrowest bounds
        rank = min(nearest, key=lambda r: (*nearest[r][:2], r)) if known else next(iter(nearest))
        bound, start, ahead = nearest.pop(rank)
        if math.isfinite(bound):
            known[rank] = Offset(known[start].seconds + ahead.seconds, known[start].bound + ahead.bound)
        else:
            known[rank] = Offset(0.0, math.inf if known else 0.0)
        for other, best in nearest.items():
            offset = between(rank, other)
            nearest[other] = min(best, (offset.bound, rank, offset))
    return known
