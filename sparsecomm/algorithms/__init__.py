"""The collectives, one file each, and the choice between them."""

from __future__ import annotations

from sparsecomm.algorithms.allgather import ALLGATHER
from sparsecomm.algorithms.base import Algorithm, Link, Problem
from sparsecomm.algorithms.butterfly import BUTTERFLY
from sparsecomm.algorithms.dense import DENSE
from sparsecomm.algorithms.group import Group
from sparsecomm.algorithms.tree import TREE
from sparsecomm.errors import InvalidInputError

__all__ = ["ALGORITHMS", "ETHERNET", "Algorithm", "Group", "Link", "Problem", "choose", "find"]

ALGORITHMS = {a.name: a for a in (DENSE, ALLGATHER, TREE, BUTTERFLY)}

# What "auto" may take: the global top-k, or the whole sum where that is cheaper. The size of the result of the
# others grows with P, which nobody should be given without asking.
_AUTOMATIC = (BUTTERFLY, TREE, DENSE)

# The link that "auto" assumes: 1 Gb/s Ethernet.
ETHERNET = Link(alpha=100e-6, beta=8e-9)


def find(name: str) -> Algorithm | None:
    """The algorithm of that name; None for "auto".

    Raises:
        InvalidInputError: there is none.
    """
    if name == "auto":
        return None
    try:
        return ALGORITHMS[name]
    except (KeyError, TypeError):
        known = ", ".join(["auto", *ALGORITHMS])
        raise InvalidInputError(f"algorithm={name!r}: expected one of {known}") from None


def choose(problem: Problem, link: Link = ETHERNET) -> Algorithm:
    """The cheapest algorithm: the same on all ranks, as it depends on nothing else. The first wins a tie."""
    return min(_AUTOMATIC, key=lambda a: a.seconds(problem, link))
