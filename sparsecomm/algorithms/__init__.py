"""The registry of collectives, one file each.

A new algorithm is a file of this folder that ends with ``ALGORITHM = Algorithm(...)``, and its name in
`_Module`.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Literal, TypeAlias, cast, get_args

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.hierarchical import hierarchical
from sparsecomm.algorithms.split import with_larger_result
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError, did_you_mean

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmName",
    "Algorithms",
    "alternatives",
    "find",
    "find_all",
    "inner_algorithms",
    "name_of",
    "register_algorithm",
]

_Module: TypeAlias = Literal[
    "butterfly",  # of equal predicted times, "auto" takes the first
    "tree",
    "split",
    "double",
    "dense",
    "allgather",
    "ssar_recursive_doubling",
    "ssar_split_allgather",
]
_Derived: TypeAlias = Literal[  # usual ones of those that `find` makes of others
    "hierarchical",
    "hierarchical:butterfly",
    "hierarchical:tree",
    "hierarchical:split",
    "hierarchical:allgather",
    "split:2",
    "split:3",
    "split:4",
    "split:8",
    "split:2|allgather",
]
AlgorithmName: TypeAlias = Literal["auto", "fastest"] | _Module | _Derived

_CHOOSING = ("auto", "fastest")
_OUTER = "hierarchical"
RATIO = re.compile("[2-9]|[1-9][0-9]{1,3}")  # R in "split:R"
_WEIGHT = re.compile(r"[1-9][0-9]{0,3}(\.[0-9]{1,4})?")  # W in "X*W|Y"
ALGORITHMS: dict[str, Algorithm] = {}  # by name; only ever grows

for _module in get_args(_Module):
    _made: Algorithm = import_module(f"sparsecomm.algorithms.{_module}").ALGORITHM
    ALGORITHMS[_made.name] = _made
ALGORITHMS[_OUTER] = hierarchical(ALGORITHMS["butterfly"], _OUTER)


# Names stand for one object each, as those in the registry do.
_with_larger_result = cache(with_larger_result)


class Algorithms(dict[str, Algorithm]):
    """Algorithms by name. Printing it shows a table.

    It lists what is registered; ``["split:17"]`` and ``["hierarchical:tree"]`` find what is made of these, too.
    """

    def __missing__(self, name: str) -> Algorithm:
        try:
            found = find(name)
        except InvalidInputError as error:
            raise KeyError(str(error)) from None
        if found is None:
            raise KeyError(f"{name} stands for whichever costs least: see sparsecomm.explain")
        return found

    def __repr__(self) -> str:
        """Return a table of names and summaries."""
        rows = [("algorithm", "what it does"), *((name, each.summary) for name, each in self.items())]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def register_algorithm(algorithm: Algorithm) -> None:
    """Make an algorithm known, so that ``algorithm=`` takes its name. Call it on all ranks, before they use it.

    With ``automatic`` it is a candidate of "auto"; with ``between_nodes`` it also runs as "hierarchical:NAME".

    Raises:
        InvalidInputError: it is no `Algorithm`, or its name is taken or cannot be one.
    """
    if not isinstance(algorithm, Algorithm):
        raise InvalidInputError(f"algorithm: got {type(algorithm).__name__}; expected a sparsecomm.Algorithm")
    name = algorithm.name
    well = isinstance(name, str) and name.isascii() and name.isprintable() and name and not {":", "|", "*"} & set(name)
    if not well or name in _CHOOSING:
        raise InvalidInputError(
            f"algorithm: got the name {name!r}; expected ASCII text without ':', '|' and '*', and neither 'auto' nor "
            "'fastest'"
        )
    if name in ALGORITHMS:
        raise InvalidInputError(f"algorithm: the name {name!r} is taken; choose another one")
    ALGORITHMS[name] = algorithm


def inner_algorithms() -> dict[str, Algorithm]:
    """Return what may run between nodes, by name: X in "hierarchical:X"."""
    return {name: algorithm for name, algorithm in ALGORITHMS.items() if algorithm.between_nodes}


def find(name: str) -> Algorithm | None:
    """Return the algorithm of that name; None for one that stands for several, see `alternatives`.

    Raises:
        InvalidInputError: there is none.
    """
    if isinstance(name, str):
        if name in _CHOOSING:
            return None
        if "|" in name:
            find_all(name)
            return None
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        outer, _, inner = name.partition(":")
        if outer == "split" and RATIO.fullmatch(inner):
            return _with_larger_result(int(inner))
        if outer == _OUTER and inner in inner_algorithms():
            return hierarchical(ALGORITHMS[inner], name)
    known = [*_CHOOSING, *ALGORITHMS]
    near = did_you_mean(name, [*known, *(f"{_OUTER}:{x}" for x in inner_algorithms())])
    raise InvalidInputError(
        f"algorithm={quote(name)}: expected one of {', '.join(known)}; or {_OUTER}:X, where "
        f"X, which runs between nodes, is one of {', '.join(inner_algorithms())}; or split:R, whose result has R k "
        f"entries, R from 2 to 9999; or several of these with | between them, for whichever costs less; X*1.5 counts "
        f"1.5 times its cost{near}"
    )


def find_all(name: str) -> list[tuple[Algorithm | None, float]]:
    """Return what `find` returns of each of several names, and how much the cost of each counts: W of "X*W", or 1.

    Raises:
        InvalidInputError: one of them is wrong.
    """
    found = []
    for each in name.split("|"):
        one, star, weight = each.partition("*")
        if star and not ("|" in name and _WEIGHT.fullmatch(weight)):
            raise InvalidInputError(
                f"algorithm={name!r}: {each!r}: expected a number from 1 to 9999 after *, among several with | between "
                'them, such as "split:2*1.5|allgather"'
            )
        found.append((find(one), float(weight) if star else 1.0))
    return found


def name_of(algorithm: AlgorithmName | Algorithm) -> AlgorithmName:
    """Return the name of an algorithm that is given by name or as itself.

    Raises:
        InvalidInputError: it was not registered.
    """
    if not isinstance(algorithm, Algorithm):
        return algorithm
    if find(algorithm.name) is not algorithm:
        raise InvalidInputError(
            f"algorithm: got {algorithm.name!r}, which is not registered, or another one of that name is; call "
            "sparsecomm.register_algorithm on all ranks first"
        )
    return cast("AlgorithmName", algorithm.name)


def alternatives(name: str, num_nodes: int, P: int) -> list[tuple[Algorithm, float]]:
    """Return the algorithms for which a name stands, of which the cheapest is taken, and of equal ones the first.

    "fastest" stands for the global top-k; "auto" for these or a dense sum; "X|Y" for X and Y; other names for one
    algorithm. The cost of each is multiplied by the number beside it.
    """
    found: list[tuple[Algorithm, float]] = []
    for text, (named, weight) in zip(name.split("|"), find_all(name), strict=True):
        several = _automatic(num_nodes, P, dense=text.startswith("auto")) if named is None else [named]
        found += [(each, weight) for each in several]
    return found


def _automatic(num_nodes: int, P: int, *, dense: bool) -> list[Algorithm]:
    """Return the algorithms from which "auto" (``dense``) and "fastest" choose.

    The size of the result of the others grows with P, which nobody should be given without asking; and a dense sum
    inside nodes moves residuals between ranks.
    """
    flat = [each for name, each in ALGORITHMS.items() if each.automatic and (dense or name != "dense")]
    if not 1 < num_nodes < P:
        return flat
    inner = [algorithm for algorithm in flat if algorithm.between_nodes]
    return [hierarchical(a, f"{_OUTER}:{a.name}") for a in inner] + flat
