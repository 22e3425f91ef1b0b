"""The options of `sparsecomm.sparse_allreduce`, in one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from sparsecomm.algorithms import ALGORITHMS, Algorithm, AlgorithmName, find, name_of
from sparsecomm.checks import check_choice, flag
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.choice import CostQuery, Explanation, candidates, decide
from sparsecomm.wire import EXACT, MEAN_OF_CONTRIBUTORS, OPS, WIRES, Op, Wire, WireName

__all__ = ["CallOptions", "Options"]

_WIRES = ("auto", *WIRES)


class CallOptions(TypedDict, total=False):
    """Keyword arguments that functions only hand on to `Options`."""

    algorithm: AlgorithmName | Algorithm
    op: Op
    wire: WireName
    complete: bool


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `sparsecomm.sparse_allreduce`, as the caller gave them; they are described there."""

    algorithm: str = "auto"
    op: str = "sum"
    wire: str = "auto"
    complete: bool = False
    explain: bool = False

    @classmethod
    def of(
        cls,
        algorithm: AlgorithmName | Algorithm = "auto",
        op: Op = "sum",
        wire: WireName = "auto",
        complete: bool = False,
        explain: bool = False,
    ) -> Options:
        """Return the options of a call, of which the algorithm is given by name or as itself.

        Raises:
            InvalidInputError: the algorithm was not registered, or a flag is neither true nor false.
        """
        return cls(name_of(algorithm), op, wire, flag("complete", complete), flag("explain", explain))

    def check(self, dtype: str) -> None:
        """Check them for gradients of that element type.

        Raises:
            InvalidInputError: one of them cannot be used.
        """
        named = find(self.algorithm)
        check_choice("op", self.op, OPS)
        check_choice("wire", self.wire, _WIRES)
        if dtype == "float64" and self.wire != "auto" and WIRES[self.wire].kind is not EXACT:
            raise InvalidInputError(
                f"wire={self.wire!r} carries values of float32 sums, and x is float64; expected plain or packed"
            )
        if self.op == MEAN_OF_CONTRIBUTORS:
            self._check_contributors(named)
        if self.complete and named is not None and not named.reselects:
            keeping = ", ".join(a.name for a in ALGORITHMS.values() if a.reselects)
            raise InvalidInputError(
                f"complete=True with algorithm={self.algorithm!r}, whose result is no global top-k; expected auto or "
                f"one of {keeping}"
            )

    def whole(self) -> Options:
        """Return the options of a call that sums whole gradients. To these all ranks contribute."""
        return Options("dense", "mean" if self.op == MEAN_OF_CONTRIBUTORS else self.op, "plain")

    def _check_contributors(self, named: Algorithm | None) -> None:
        if self.complete:
            raise InvalidInputError(
                f"complete=True with op={self.op!r}: all ranks contribute to what is complete; expected op='mean'"
            )
        if named is not None and named.contributors_unknown:
            counting = ", ".join(a.name for a in ALGORITHMS.values() if not a.contributors_unknown)
            raise InvalidInputError(
                f"op={self.op!r} with algorithm={self.algorithm!r}, which {named.contributors_unknown}; expected auto "
                f"or one of {counting}"
            )

    def chosen(self, ranks: Transport, n: int, k: int, value_bytes: int) -> tuple[Algorithm, Wire, int]:
        """Return the algorithm and wire format of a call, and the checksum of the costs if these decided.

        Args:
            value_bytes: of a value in the accumulator dtype.

        Raises:
            InvalidInputError: the algorithm does not support such a call.
        """
        if self.wire != "auto" and (named := find(self.algorithm)) is not None and named.unsupported is None:
            return named, WIRES[self.wire], 0
        costs = profile.used(ranks.library, ranks.size, ranks.num_nodes)
        best = decide(self._query(ranks, n, k, value_bytes), costs.costs)
        return best.algorithm, best.wire, costs.checksum

    def explanation(self, ranks: Transport, n: int, k: int, value_bytes: int) -> Explanation:
        """Return what a call would be made with, and what else would cost."""
        costs = profile.used(ranks.library, ranks.size, ranks.num_nodes)
        query = self._query(ranks, n, k, value_bytes)
        return Explanation(query, costs.costs, costs.source, candidates(query, costs.costs))

    def _query(self, ranks: Transport, n: int, k: int, value_bytes: int) -> CostQuery:
        return CostQuery(
            ranks.size,
            ranks.num_nodes,
            n,
            k,
            value_bytes,
            self.algorithm,
            self.wire,
            self.complete,
            self.op == MEAN_OF_CONTRIBUTORS,
        )
