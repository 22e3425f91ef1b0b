"""An algorithm, as the registry knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["Algorithm"]


@dataclass(frozen=True)
class Algorithm:
    """One way to sum sparse gradients over all ranks. `sparsecomm.register_algorithm` takes it.

    Attributes:
        name: what `sparse_allreduce` takes as ``algorithm``.
        summary: what it does, in a line.
        cost: seconds per rank in terms of alpha, beta, P, n, k, b (bytes of an entry) and e (bytes of an element).
        result: what comes back.
        source: the paper it is from.
        run: called by every rank with the communicator of the call, this rank's gradient and k; returns the sum, the
            same on all ranks. No rank may return before every rank has contributed.
        predicted_time: ``cost`` in seconds, with the work of selecting, merging and packing.
        reselects: whether at most k entries come back.
        rejects: whether the result may lack entries that ranks selected, which then take them back. Otherwise it holds
            their sum, up to what the algorithm has recorded as dropped.
        by_chunk: whether ranks may select by chunk.
        automatic: whether "auto" may take it.
        between_nodes: whether it may run between nodes, as X in "hierarchical:X"; it then takes entries only.
        unsupported: returns why a call of these sizes cannot be made, "" if it can; ``None``: all can.
        contributors_unknown: why it cannot divide each sum by the number of ranks that contributed to it, as
            ``op="mean_of_contributors"`` asks; "" if it can, by `sparsecomm.primitives.contributors`.
    """

    name: str
    summary: str
    cost: str
    result: str
    source: str
    run: Callable[[Communicator, Contribution, int], SparseVector] = field(repr=False)
    predicted_time: Callable[[Problem, Costs], float] = field(repr=False)
    reselects: bool = False
    rejects: bool = True
    by_chunk: bool = True
    automatic: bool = False
    between_nodes: bool = True
    unsupported: Callable[[Problem], str] | None = field(default=None, repr=False)
    contributors_unknown: str = "does not say that it counts contributors"

    def __hash__(self) -> int:
        return hash(self.name)  # names are unique; hashing every text would slow down the cache of choices
