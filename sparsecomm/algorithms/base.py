"""What an algorithm is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["Algorithm"]


@dataclass(frozen=True)
class Algorithm:
    """One way to sum sparse gradients over all ranks.

    Attributes:
        name: what `sparse_allreduce` takes as ``algorithm``.
        summary: what it does, in a line.
        cost: seconds per rank in terms of alpha, beta, P, n, k and b (bytes of an entry).
        result: what comes back.
        source: the paper it is from.
        reselects: whether at most k entries come back, so that ``complete`` is of use.
        run: called by every rank with the comm, its gradient and k.
        seconds: the cost, evaluated, with the work of selecting, merging and packing.
    """

    name: str
    summary: str
    cost: str
    result: str
    source: str
    reselects: bool
    run: Callable[[Communicator, Contribution, int], SparseVector] = field(repr=False)
    seconds: Callable[[Problem, Costs], float] = field(repr=False)
