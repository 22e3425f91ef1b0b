"""The options of `sparsecomm.sparse_allreduce`, in one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from sparsecomm.algorithms import ALGORITHMS, Algorithm, find
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.choice import CostQuery, Explanation, candidates, decide
from sparsecomm.wire import EXACT, OPS, WIRES, Wire

__all__ = ["CallOptions", "Options"]


class CallOptions(TypedDict, total=False):
    """Keyword arguments that functions only hand on to `Options`."""

    algorithm: str
    op: str
    wire: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `sparse_allreduce`, as the caller gave them."""

    algorithm: str = "auto"
    op: str = "sum"
    wire: str = "auto"
    complete: bool = False
    explain: bool = False

    def check(self, dtype: str) -> None:
        """
        Raises:
            InvalidInputError: one of them cannot be used, for gradients of that type.
        """
        chosen = find(self.algorithm)
        if self.op not in OPS:
            raise InvalidInputError(f"op={self.op!r}: expected one of {', '.join(OPS)}")
        if self.wire not in ("auto", *WIRES):
            raise InvalidInputError(f"wire={self.wire!r}: expected one of auto, {', '.join(WIRES)}")
        if dtype == "float64" and self.wire != "auto" and WIRES[self.wire].kind != EXACT:
            raise InvalidInputError(
                f"wire={self.wire!r} carries values of float32 sums, and x is float64; expected plain or packed"
            )
        if self.complete and chosen is not None and not chosen.reselects:
            keeping = ", ".join(a.name for a in ALGORITHMS.values() if a.reselects)
            raise InvalidInputError(
                f"complete=True with algorithm={self.algorithm!r}, whose result is no global top-k; expected auto or "
                f"one of {keeping}"
            )

    def chosen(self, ranks: Transport, n: int, k: int, accumulator: int) -> tuple[Algorithm, Wire, int]:
        """What to do it with, and the checksum of the costs if these decided."""
        if self.wire != "auto" and (named := find(self.algorithm)) is not None:
            return named, WIRES[self.wire], 0
        costs = profile.used(ranks.library, ranks.size, ranks.num_nodes)
        best = decide(self._query(ranks, n, k, accumulator), costs.costs)
        return best.algorithm, best.wire, costs.checksum

    def explanation(self, ranks: Transport, n: int, k: int, accumulator: int) -> Explanation:
        costs = profile.used(ranks.library, ranks.size, ranks.num_nodes)
        query = self._query(ranks, n, k, accumulator)
        return Explanation(query, costs.costs, costs.source, candidates(query, costs.costs))

    def _query(self, ranks: Transport, n: int, k: int, accumulator: int) -> CostQuery:
        return CostQuery(ranks.size, ranks.num_nodes, n, k, accumulator, self.algorithm, self.wire, self.complete)
