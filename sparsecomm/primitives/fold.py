"""`Fold`: a step that reduces P ranks to a power of two before recursive doubling.

P = 2^steps + rem. The first 2 rem ranks form pairs of neighbours. Before the first step, the even rank of a pair sends
its entries to the odd one, which takes part for both. After the last step, the odd rank sends the result back. The odd
ranks of pairs and all other ranks have new ranks from 0 to 2^steps - 1, in their order. The names are MPICH's (Thakur,
Rabenseifner and Gropp, IJHPCA 2005, Section 4.3).

    rank       0    1    2    3    4    5    6       P = 7: steps = 2, rem = 3
    fold       0 -> 1    2 -> 3    4 -> 5    6
    newrank         0         1         2    3
    unfold     0 <- 1    2 <- 3    4 <- 5    6
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fold"]


@dataclass(frozen=True, slots=True)
class Fold:
    """A rank's part in the fold.

    Attributes:
        steps: number of steps of recursive doubling, floor(log2 P).
        rem: number of pairs.
        newrank: this rank's number among the 2^steps that take part; -1 for the even rank of a pair.
        hands_over: whether this rank is the even one of a pair, which sends to ``partner`` and receives the result.
        partner: the other rank of this rank's pair; -1 if it has none.
        peers: for each step, the rank to exchange with, whose new rank differs in the bit of this step.
    """

    steps: int
    rem: int
    newrank: int
    hands_over: bool
    partner: int
    peers: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank: int, size: int) -> Fold:
        """Return the part of rank ``rank`` among ``size`` ranks."""
        steps = size.bit_length() - 1
        rem = size - (1 << steps)
        if rank < 2 * rem and rank % 2 == 0:
            return cls(steps, rem, -1, True, rank + 1)
        newrank, partner = (rank - rem, -1) if rank >= 2 * rem else (rank // 2, rank - 1)
        others = [newrank ^ (1 << step) for step in range(steps)]
        peers = tuple(2 * other + 1 if other < rem else other + rem for other in others)
        return cls(steps, rem, newrank, False, partner, peers)
