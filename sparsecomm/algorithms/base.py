"""What an algorithm is, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sparsecomm.algorithms.group import Group
from sparsecomm.feedback import Gradient
from sparsecomm.sparse import SparseVector

__all__ = ["Algorithm", "Link", "Problem", "log2_ceil"]


@dataclass(frozen=True)
class Link:
    """A network between ranks: ``alpha`` seconds per message and ``beta`` seconds per byte."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Problem:
    """The sizes that decide a cost: ranks, elements, entries, bytes of an entry and of a dense element."""

    P: int
    n: int
    k: int
    entry_bytes: int = 8
    element_bytes: int = 4


@dataclass(frozen=True)
class Algorithm:
    """One way to sum sparse gradients over all ranks.

    Attributes:
        name: what `sparse_allreduce` takes as ``algorithm``.
        summary: what it does, in a line.
        cost: seconds per rank in terms of alpha, beta, P, n, k and b (bytes of an entry).
        result: what comes back.
        source: the paper it is from.
        run: called by every rank with the group, its gradient and k.
        seconds: the cost, evaluated.
    """

    name: str
    summary: str
    cost: str
    result: str
    source: str
    run: Callable[[Group, Gradient, int], SparseVector] = field(repr=False)
    seconds: Callable[[Problem, Link], float] = field(repr=False)


def log2_ceil(P: int) -> int:
    """Rounds in which P ranks can hear of each other, two by two."""
    return (P - 1).bit_length()
