"""The collectives, one file each, and the choice between them."""

from __future__ import annotations

from sparsecomm.algorithms.allgather import ALLGATHER
from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.butterfly import BUTTERFLY
from sparsecomm.algorithms.dense import DENSE
from sparsecomm.algorithms.dsar_split_allgather import DSAR_SPLIT_ALLGATHER
from sparsecomm.algorithms.hierarchical import DENSE_INSIDE, SPARSE_INSIDE, hierarchical
from sparsecomm.algorithms.split import SPLIT
from sparsecomm.algorithms.ssar_recursive_doubling import SSAR_RECURSIVE_DOUBLING
from sparsecomm.algorithms.ssar_split_allgather import SSAR_SPLIT_ALLGATHER
from sparsecomm.algorithms.tree import TREE
from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.completion import complete
from sparsecomm.primitives.costs import Costs, Link, Problem
from sparsecomm.primitives.gather import broadcast_words

__all__ = [
    "ALGORITHMS",
    "INNER",
    "Algorithm",
    "Communicator",
    "Costs",
    "Link",
    "Problem",
    "automatic",
    "broadcast_words",
    "complete",
    "find",
]

_FLAT = (DENSE, ALLGATHER, TREE, BUTTERFLY, SPLIT, SSAR_RECURSIVE_DOUBLING, SSAR_SPLIT_ALLGATHER, DSAR_SPLIT_ALLGATHER)

# What may run between machines: "hierarchical:split".
INNER = {a.name: a for a in _FLAT if a is not DENSE}

ALGORITHMS = {a.name: a for a in _FLAT}
ALGORITHMS |= {
    name: hierarchical(BUTTERFLY, dense=name == DENSE_INSIDE, name=name) for name in (SPARSE_INSIDE, DENSE_INSIDE)
}


def find(name: str) -> Algorithm | None:
    """The algorithm of that name; None for "auto".

    Raises:
        InvalidInputError: there is none.
    """
    if name == "auto":
        return None
    try:
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        outer, _, inner = name.partition(":")
        if outer in (SPARSE_INSIDE, DENSE_INSIDE) and inner in INNER:
            return hierarchical(INNER[inner], dense=outer == DENSE_INSIDE, name=name)
    except (AttributeError, TypeError):  # no text
        pass
    known = ", ".join(["auto", *ALGORITHMS])
    raise InvalidInputError(
        f"algorithm={name!r}: expected one of {known}; or {SPARSE_INSIDE}:X or {DENSE_INSIDE}:X, where X, which runs "
        f"between machines, is one of {', '.join(INNER)}"
    )


def automatic(num_nodes: int, P: int) -> list[Algorithm]:
    """What "auto" chooses from: the global top-k, or the whole sum where that is cheaper. The first wins a tie.

    The size of the result of the others grows with P, which nobody should be given without asking; and a dense sum
    inside machines moves residuals between ranks.
    """
    flat = [BUTTERFLY, TREE, SPLIT, DENSE]
    if not 1 < num_nodes < P:
        return flat
    between = [hierarchical(a, dense=False, name=f"{SPARSE_INSIDE}:{a.name}") for a in (BUTTERFLY, TREE, SPLIT)]
    return between + flat
