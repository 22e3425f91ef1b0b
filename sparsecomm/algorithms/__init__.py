"""The registry of algorithms.

To add an algorithm, add a file to this folder that defines ``ALGORITHM = Algorithm(...)``, and its name to `_Module`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal, TypeAlias, cast, get_args

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.hierarchical import hierarchical
from sparsecomm.algorithms.split import split_with_ratio
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError, did_you_mean

__all__ = [
    "ALGORITHMS", "Algorithm", "AlgorithmName", "Algorithms", "Comparison", "alternatives", "find", "inner_algorithms",
    "name_of", "register_algorithm",
]  # fmt: skip

_Module: TypeAlias = Literal[
    "butterfly",  # at equal predicted times, "auto" chooses the first one
    "tree",
    "split",
    "double",
    "dense",
    "allgather",
    "ssar_recursive_doubling",
    "ssar_split_allgather",
]
_Derived: TypeAlias = Literal[  # common names of algorithms that `find` derives from others
    "hierarchical",
    "hierarchical:butterfly",
    "hierarchical:tree",
    "hierarchical:split",
    "hierarchical:allgather",
    "split:2",
    "split:3",
    "split:4",
    "split:8",
]
AlgorithmName: TypeAlias = Literal["auto", "fastest"] | _Module | _Derived

_CHOOSING = ("auto", "fastest")
_OUTER = "hierarchical"
RATIO = re.compile("[2-9]|[1-9][0-9]{1,3}")  # R in "split:R"
ALGORITHMS: dict[str, Algorithm] = {}  # by name; nothing is ever removed

for _module in get_args(_Module):
    _algorithm: Algorithm = import_module(f"sparsecomm.algorithms.{_module}").ALGORITHM
    ALGORITHMS[_algorithm.name] = _algorithm
ALGORITHMS[_OUTER] = hierarchical(ALGORITHMS["butterfly"], _OUTER)

_cached_split = cache(split_with_ratio)  # so that a name always stands for the same object


@dataclass(frozen=True, repr=False)
class Comparison:
    """A choice among algorithms: a call uses the one with the least predicted time, multiplied by its weight."""

    weights: tuple[tuple[str, float], ...]  # by name

    def __repr__(self) -> str:
        return "|".join(name if weight == 1 else f"{name}*{weight:g}" for name, weight in self.weights)


class Algorithms(dict[str, Algorithm]):
    """The registered algorithms by name. Printing it shows a table.

    Lookup also supports derived algorithms, which are not listed: ``["split:17"]``, ``["hierarchical:tree"]``.
    """

    def __missing__(self, name: str) -> Algorithm:
        try:
            algorithm = find(name)
        except InvalidInputError as error:
            raise KeyError(str(error)) from None
        if algorithm is None:
            raise KeyError(f"{name} stands for several algorithms; expected the name of one; see sparsecomm.explain")
        return algorithm

    def __repr__(self) -> str:
        rows = [("algorithm", "what it does"), *((name, algorithm.summary) for name, algorithm in self.items())]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def register_algorithm(algorithm: Algorithm) -> None:
    """Register an algorithm, so that ``algorithm=`` accepts its name. Register it on all ranks before any rank uses it.

    If `Algorithm.automatic` is set, "auto" may choose it. If `Algorithm.runs_between_nodes` is set,
    "hierarchical:NAME" is also available.

    Raises:
        InvalidInputError: ``algorithm`` is not an `Algorithm`, or its name is invalid or already registered.
    """
    if not isinstance(algorithm, Algorithm):
        raise InvalidInputError(f"algorithm: got {type(algorithm).__name__}; expected a sparsecomm.Algorithm")
    name = algorithm.name
    valid = isinstance(name, str) and name.isascii() and name.isprintable() and name and ":" not in name
    if not valid or name in _CHOOSING:
        raise InvalidInputError(
            f"algorithm: got the name {name!r}; expected ASCII text without ':', and neither 'auto' nor 'fastest'"
        )
    if name in ALGORITHMS:
        raise InvalidInputError(f"algorithm: the name {name!r} is already registered; choose another one")
    ALGORITHMS[name] = algorithm


def inner_algorithms() -> dict[str, Algorithm]:
    """Return, by name, the algorithms that may be X in "hierarchical:X"."""
    return {name: algorithm for name, algorithm in ALGORITHMS.items() if algorithm.runs_between_nodes}


def find(name: str | Comparison) -> Algorithm | None:
    """Return the algorithm with a name; None if it stands for several (see `alternatives`). Raises if unknown."""
    if isinstance(name, Comparison):
        return None
    if isinstance(name, str):
        if name in _CHOOSING:
            return None
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        outer, _, inner = name.partition(":")
        if outer == "split" and RATIO.fullmatch(inner):
            return _cached_split(int(inner))
        if outer == _OUTER and inner in inner_algorithms():
            return hierarchical(ALGORITHMS[inner], name)
    known = [*_CHOOSING, *ALGORITHMS]
    near = did_you_mean(name, [*known, *(f"{_OUTER}:{x}" for x in inner_algorithms())])
    raise InvalidInputError(
        f"algorithm={quote(name)}: expected one of {', '.join(known)}; or {_OUTER}:X, where X is one of "
        f"{', '.join(inner_algorithms())}; or split:R with R from 2 to 9999{near}"
    )


def name_of(algorithm: AlgorithmName | Algorithm) -> AlgorithmName:
    """Return the name of an algorithm that is passed by name or as a registered object."""
    if not isinstance(algorithm, Algorithm):
        return algorithm
    if find(algorithm.name) is not algorithm:
        raise InvalidInputError(
            f"algorithm: got an algorithm with the name {algorithm.name!r}, which is not registered; call "
            "sparsecomm.register_algorithm on all ranks first"
        )
    return cast("AlgorithmName", algorithm.name)


def alternatives(name: str | Comparison, num_nodes: int, P: int) -> list[tuple[Algorithm, float]]:
    """Return the algorithms that a name stands for, with the weights of their predicted times.

    Among equal times, a call uses the first. "fastest" stands for all algorithms of the global top-k, "auto" for these
    and the dense sum, and any other name for one algorithm.
    """
    if isinstance(name, Comparison):
        return [(algorithm, weight) for alternative, weight in name.weights if (algorithm := find(alternative))]
    named = find(name)
    several = _automatic(num_nodes, P, dense=name == "auto") if named is None else [named]
    return [(algorithm, 1.0) for algorithm in several]


def _automatic(num_nodes: int, P: int, *, dense: bool) -> list[Algorithm]:
    """Return the algorithms that "auto" (if ``dense``) or "fastest" chooses from.

    The dense sum has no hierarchical variant, which would move residuals between ranks.
    """
    flat = [a for name, a in ALGORITHMS.items() if a.automatic and (dense or name != "dense")]
    if not 1 < num_nodes < P:
        return flat
    inner = [a for a in flat if a.runs_between_nodes]
    return [hierarchical(a, f"{_OUTER}:{a.name}") for a in inner] + flat
