"""The options of `sparsecomm.sparse_allreduce`, in one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from sparsecomm.algorithms import ALGORITHMS, Algorithm, AlgorithmName, find, find_all, name_of
from sparsecomm.checks import check_choice
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Transport
from sparsecomm.tuning.choice import CostQuery
from sparsecomm.wire import EXACT, MEAN_OF_CONTRIBUTORS, OPS, WIRES, Op, WireName

__all__ = ["CallOptions", "Options"]

_WIRES = ("auto", *WIRES)


class CallOptions(TypedDict, total=False):
    """Keyword arguments that functions only hand on to `Options`."""

    algorithm: AlgorithmName | Algorithm
    op: Op
    wire: WireName


@dataclass(frozen=True)
class Options:
    """The options of `sparsecomm.sparse_allreduce`, as the caller gave them; they are described there."""

    algorithm: str = "auto"
    op: str = "sum"
    wire: str = "auto"

    @classmethod
    def of(cls, algorithm: AlgorithmName | Algorithm = "auto", op: Op = "sum", wire: WireName = "auto") -> Options:
        """Return the options of a call, of which the algorithm is given by name or as itself.

        Raises:
            InvalidInputError: the algorithm was not registered.
        """
        return cls(name_of(algorithm), op, wire)

    def check(self, dtype: str, *, by_chunk: bool = False) -> None:
        """Check them for gradients of that element type; ``by_chunk``: of which ranks select by chunk.

        Raises:
            InvalidInputError: one of them cannot be used.
        """
        find(self.algorithm)
        check_choice("op", self.op, OPS)
        check_choice("wire", self.wire, _WIRES)
        if dtype == "float64" and self.wire != "auto" and WIRES[self.wire].kind is not EXACT:
            raise InvalidInputError(
                f"wire={self.wire!r} carries values of float32 sums, and x is float64; expected plain or packed"
            )
        named = find_all(self.algorithm)
        if by_chunk and (whole := [each.name for each, _ in named if each is not None and not each.by_chunk]):
            raise InvalidInputError(
                f"selection by chunk with algorithm={self.algorithm!r}: {whole[0]} selects of ranges of its own; "
                "leave chunks out, or take another algorithm"
            )
        unknown = [each.contributors_unknown for each, _ in named if each is not None]
        if self.op == MEAN_OF_CONTRIBUTORS and len(unknown) == len(named) and all(unknown):
            counting = ", ".join(a.name for a in ALGORITHMS.values() if not a.contributors_unknown)
            raise InvalidInputError(
                f"op={self.op!r} with algorithm={self.algorithm!r}, which {unknown[0]}; expected auto "
                f"or one of {counting}"
            )

    @property
    def decided(self) -> bool:
        """Whether they leave nothing to choose, so that costs do not matter."""
        return self.wire != "auto" and find(self.algorithm) is not None

    @property
    def chooses_algorithm(self) -> bool:
        """Whether costs decide how long calls take: which algorithm they are made with, not the wire format alone."""
        return find(self.algorithm) is None

    def whole(self) -> Options:
        """Return the options of a call that sums whole gradients. To these all ranks contribute."""
        return Options("dense", "mean" if self.op == MEAN_OF_CONTRIBUTORS else self.op, "plain")

    def query(self, transport: Transport, n: int, k: int, value_bytes: int) -> CostQuery:
        """Return what the choice of an algorithm depends on; ``value_bytes``: of a value in a sum."""
        counted = self.op == MEAN_OF_CONTRIBUTORS
        return CostQuery(transport.size, transport.num_nodes, n, k, value_bytes, self.algorithm, self.wire, counted)
