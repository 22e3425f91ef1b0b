"""`Algorithm`: one way to sum sparse gradients, with its properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import SparseVector


@dataclass(frozen=True)
class Algorithm:
    """One way to sum sparse gradients over all ranks. Pass it to `sparsecomm.register_algorithm`.

    Attributes:
        name: the value of ``algorithm=`` in `sparse_allreduce`.
        summary: one line.
        cost: formula of the seconds per rank in terms of alpha, beta, P, n, k, b (bytes of an entry) and e (bytes of an
            element).
        result: description of the result.
        source: the paper.
        run: ``run(comm, gradient, k)`` returns the sum, the same on all ranks. No rank may return before every rank has
            contributed.
        predicted_time: ``predicted_time(problem, costs)`` returns the seconds of a call, including selection, merging
            and packing.
        bounded_result: whether the result has at most k entries.
        rejects: whether the result may lack indices that ranks selected. The library then returns these entries to the
            ranks' residuals. If false, the result is the sum of all ranks' selected entries, except for dropped ones.
        by_chunk: whether the argument ``chunk`` (each rank selects k entries of each chunk) is supported.
        automatic: whether "auto" may choose it.
        runs_between_nodes: whether it may run between nodes, as X in "hierarchical:X". It must then call `topk`.
        unsupported: ``unsupported(problem)`` returns why a call cannot be made, or ""; ``None``: all calls can.
        cannot_count_contributors: why ``op="mean_of_contributors"`` is not supported, or "": see `Communicator.sums`.
    """

    name: str
    summary: str
    cost: str
    result: str
    source: str
    run: Callable[[Communicator, Contribution, int], SparseVector] = field(repr=False)
    predicted_time: Callable[[Problem, Costs], float] = field(repr=False)
    bounded_result: bool = False
    rejects: bool = True
    by_chunk: bool = True
    automatic: bool = False
    runs_between_nodes: bool = True
    unsupported: Callable[[Problem], str] | None = field(default=None, repr=False)
    cannot_count_contributors: str = "does not declare that it counts contributors"

    def __hash__(self) -> int:
        return hash(self.name)  # names are unique, and hashing all texts would slow down the cache of choices
