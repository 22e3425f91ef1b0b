"""By how much the clocks of ranks differ, from messages that went both ways between them.

A message cannot arrive before it was sent. So the fastest message of each direction bounds by how much one clock is
ahead of the other; the middle between the two bounds is taken, as NTP does (RFC 5905, section 8). Pairs are taken in
the order of how narrow their bounds are, so that each rank is compared with those that know it best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from typing import NamedTuple

__all__ = ["Offset", "offsets"]


class Offset(NamedTuple):
    """By how many seconds the clock of a rank is ahead, and the maximum error."""

    seconds: float
    bound: float


def offsets(
    ranks: Iterable[int],
    fastest: Mapping[tuple[int, int], float],
    share_clock: Callable[[int, int], bool] = lambda a, b: False,
) -> dict[int, Offset]:
    """Return by how much the clock of each rank is ahead of that of the first one.

    Ranks that exchanged no messages with it, not even through others, get offset 0 and an infinite bound.

    Args:
        ranks: their numbers.
        fastest: by sender and receiver, the receiver's time when a message came less the sender's when it left, of the
            fastest message.
        share_clock: whether two ranks have one clock.
    """
    ranks, found = list(ranks), dict[int, Offset]()

    def between(a: int, b: int) -> Offset:
        if share_clock(a, b):
            return Offset(0.0, 0.0)
        there, back = (fastest.get(pair, math.inf) for pair in ((a, b), (b, a)))
        if not math.isfinite(there + back):
            return Offset(0.0, math.inf)
        return Offset((there - back) / 2, abs(there + back) / 2)

    while missing := [rank for rank in ranks if rank not in found]:
        known = [(between(a, b), a, b) for a, b in permutations(ranks, 2) if a in found and b not in found]
        if not known:
            found[missing[0]] = Offset(0.0, 0.0 if not found else math.inf)
            continue
        ahead, a, b = min(known, key=lambda pair: (pair[0].bound, pair[1:]))
        start = found[a] if math.isfinite(ahead.bound) else Offset(0.0, 0.0)
        found[b] = Offset(start.seconds + ahead.seconds, start.bound + ahead.bound)
    return found
