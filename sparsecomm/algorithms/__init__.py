"""The registry of collectives, one file each.

A new algorithm is a file of this folder that ends with ``ALGORITHM = Algorithm(...)``, and a line in `_MODULES`.
"""

from __future__ import annotations

import re
from importlib import import_module

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.hierarchical import DENSE_INSIDE, SPARSE_INSIDE, hierarchical
from sparsecomm.algorithms.split import with_larger_result
from sparsecomm.errors import InvalidInputError

__all__ = ["ALGORITHMS", "Algorithm", "automatic", "find", "inner_algorithms", "register_algorithm"]

_MODULES = (  # of equal predicted times, "auto" takes the first
    "butterfly",
    "tree",
    "split",
    "dense",
    "allgather",
    "ssar_recursive_doubling",
    "ssar_split_allgather",
    "dsar_split_allgather",
)

RATIO = re.compile("[2-9]|[1-9][0-9]{1,3}")  # R in "split:R"
ALGORITHMS: dict[str, Algorithm] = {}  # by name; only ever grows

for _module in _MODULES:
    _made: Algorithm = import_module(f"sparsecomm.algorithms.{_module}").ALGORITHM
    ALGORITHMS[_made.name] = _made
for _name in (SPARSE_INSIDE, DENSE_INSIDE):
    ALGORITHMS[_name] = hierarchical(ALGORITHMS["butterfly"], dense=_name == DENSE_INSIDE, name=_name)


def register_algorithm(algorithm: Algorithm) -> None:
    """Make an algorithm known, so that ``algorithm=`` takes its name. Call it on all ranks, before they use it.

    With ``automatic`` it is a candidate of "auto"; with ``between_nodes`` it also runs as "hierarchical:NAME".

    Raises:
        InvalidInputError: it is no `Algorithm`, or its name is taken or cannot be one.
    """
    if not isinstance(algorithm, Algorithm):
        raise InvalidInputError(f"algorithm: got {type(algorithm).__name__}; expected a sparsecomm.Algorithm")
    name = algorithm.name
    if not (isinstance(name, str) and name.isascii() and name.isprintable() and name) or ":" in name or name == "auto":
        raise InvalidInputError(f"algorithm: got the name {name!r}; expected ASCII text without ':', and not 'auto'")
    if name in ALGORITHMS:
        raise InvalidInputError(f"algorithm: the name {name!r} is taken; choose another one")
    ALGORITHMS[name] = algorithm


def inner_algorithms() -> dict[str, Algorithm]:
    """Return what may run between nodes, by name: X in "hierarchical:X"."""
    return {name: algorithm for name, algorithm in ALGORITHMS.items() if algorithm.between_nodes}


def find(name: str) -> Algorithm | None:
    """Return the algorithm of that name; None for "auto".

    Raises:
        InvalidInputError: there is none.
    """
    if name == "auto":
        return None
    try:
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        outer, _, inner = name.partition(":")
        if outer == "split" and RATIO.fullmatch(inner):
            return with_larger_result(int(inner))
        if outer in (SPARSE_INSIDE, DENSE_INSIDE) and inner in inner_algorithms():
            return hierarchical(ALGORITHMS[inner], dense=outer == DENSE_INSIDE, name=name)
    except (AttributeError, TypeError):  # no text
        pass
    known = ", ".join(["auto", *ALGORITHMS])
    raise InvalidInputError(
        f"algorithm={name!r}: expected one of {known}; or {SPARSE_INSIDE}:X or {DENSE_INSIDE}:X, where X, which runs "
        f"between machines, is one of {', '.join(inner_algorithms())}; or split:R, whose result has R k "
        "entries, R from 2 to 9999"
    )


def automatic(num_nodes: int, P: int) -> list[Algorithm]:
    """Return what "auto" chooses from: the global top-k, or the whole sum where that is cheaper. The first wins a tie.

    The size of the result of the others grows with P, which nobody should be given without asking; and a dense sum
    inside nodes moves residuals between ranks.
    """
    flat = [algorithm for algorithm in ALGORITHMS.values() if algorithm.automatic]
    if not 1 < num_nodes < P:
        return flat
    inner = [algorithm for algorithm in flat if algorithm.between_nodes]
    return [hierarchical(a, dense=False, name=f"{SPARSE_INSIDE}:{a.name}") for a in inner] + flat
