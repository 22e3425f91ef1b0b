"""The fold: how recursive doubling takes in numbers of ranks that are no power of two.

P = 2^steps + rem. The first 2 rem ranks act in pairs of neighbours: before the first step the even rank sends what it
has to the odd one, which takes part for both, and after the last step the odd rank sends the result back. The others,
and the odd ones of the pairs, have new ranks from 0 to 2^steps - 1, in their order. The names are MPICH's (Thakur,
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
        steps: of recursive doubling; floor(log2 P).
        rem: pairs of neighbours that act as one.
        newrank: this rank's number among the 2^steps that take part; -1 for a rank that hands over.
        hands_over: whether this rank sends all it has to ``partner`` and only receives the result.
        partner: the other rank of this rank's pair; -1 if it is in none.
    """

    steps: int
    rem: int
    newrank: int
    hands_over: bool
    partner: int

    @classmethod
    def of(cls, rank: int, size: int) -> Fold:
        """Return the part of rank ``rank`` of ``size``."""
        steps = size.bit_length() - 1
        rem = size - (1 << steps)
        if rank >= 2 * rem:
            return cls(steps, rem, rank - rem, False, -1)
        if rank % 2 == 0:
            return cls(steps, rem, -1, True, rank + 1)
        return cls(steps, rem, rank // 2, False, rank - 1)

    def rank_of(self, newrank: int) -> int:
        """Return the rank whose new rank is ``newrank``."""
        return 2 * newrank + 1 if newrank < self.rem else newrank + self.rem
