"""Estimates the clock offsets between ranks from messages in both directions.

A message cannot arrive before it was sent, so the fastest message of each direction bounds the offset. The estimate is
the middle of the two bounds, as in NTP (RFC 5905, section 8). Ranks are added in the order of the narrowest bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from typing import NamedTuple

__all__ = ["Offset", "offsets"]


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
        fastest: by sender and receiver, the receiver's arrival time minus the sender's departure time of the fastest
            message.
        share_clock: whether two ranks share one clock.
    """
    ranks, known = list(ranks), dict[int, Offset]()

    def between(a: int, b: int) -> Offset:
        if share_clock(a, b):
            return Offset(0.0, 0.0)
        there, back = (fastest.get(pair, math.inf) for pair in ((a, b), (b, a)))
        if not math.isfinite(there + back):
            return Offset(0.0, math.inf)
        return Offset((there - back) / 2, abs(there + back) / 2)

    while missing := [rank for rank in ranks if rank not in known]:
        pairs = [(between(a, b), a, b) for a, b in permutations(ranks, 2) if a in known and b not in known]
        if not pairs:
            known[missing[0]] = Offset(0.0, math.inf if known else 0.0)
            continue
        ahead, a, b = min(pairs, key=lambda pair: (pair[0].bound, pair[1:]))
        start = known[a] if math.isfinite(ahead.bound) else Offset(0.0, 0.0)
        known[b] = Offset(start.seconds + ahead.seconds, start.bound + ahead.bound)
    return known
