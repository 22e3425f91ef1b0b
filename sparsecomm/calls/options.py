"""`Options`: the algorithm, op and wire format of `sparsecomm.sparse_allreduce`."""

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
    """Keyword arguments of functions that pass them on to `Options.of`."""

    algorithm: AlgorithmName | Algorithm
    op: Op
    wire: WireName


@dataclass(frozen=True)
class Options:
    """The options of a call, as in `sparsecomm.sparse_allreduce`. The algorithm is a name."""

    algorithm: str = "auto"
    op: str = "sum"
    wire: str = "auto"

    @classmethod
    def of(cls, algorithm: AlgorithmName | Algorithm = "auto", op: Op = "sum", wire: WireName = "auto") -> Options:
        """Return the options of a call, with the algorithm as a name or an object.

        Raises:
            InvalidInputError: the algorithm is not registered.
        """
        return cls(name_of(algorithm), op, wire)

    def check(self, dtype: str, *, by_chunk: bool = False) -> None:
        """Check that calls can be made with these options.

        Args:
            dtype: name of the gradient's element type.
            by_chunk: whether the ranks select entries by chunk.

        Raises:
            InvalidInputError: an option is unknown, or not supported for such gradients.
        """
        find(self.algorithm)
        check_choice("op", self.op, OPS)
        check_choice("wire", self.wire, _WIRES)
        if dtype == "float64" and self.wire != "auto" and WIRES[self.wire].kind is not EXACT:
            raise InvalidInputError(
                f"wire={self.wire!r} carries values of float32 sums, and x is float64; pass wire='plain' or 'packed'"
            )
        algorithms = [algorithm for algorithm, _ in find_all(self.algorithm)]
        if by_chunk and (unsupported := [each.name for each in algorithms if each is not None and not each.by_chunk]):
            raise InvalidInputError(
                f"chunk is not supported with algorithm={self.algorithm!r}: {unsupported[0]} selects from its own "
                "ranges; leave chunk out, or choose another algorithm"
            )
        reasons = ["" if each is None else each.contributors_unknown for each in algorithms]
        if self.op == MEAN_OF_CONTRIBUTORS and all(reasons):
            supported = ", ".join(each.name for each in ALGORITHMS.values() if not each.contributors_unknown)
            raise InvalidInputError(
                f"op={self.op!r} with algorithm={self.algorithm!r}, which {reasons[0]}; expected auto or one of "
                f"{supported}"
            )

    @property
    def decided(self) -> bool:
        """Whether nothing is left to choose, so that costs do not matter."""
        return self.wire != "auto" and not self.chooses_algorithm

    @property
    def chooses_algorithm(self) -> bool:
        """Whether costs decide which algorithm is used."""
        return find(self.algorithm) is None

    def whole(self) -> Options:
        """Return the options of a call that sums dense gradients, to which all ranks contribute."""
        return Options("dense", "mean" if self.op == MEAN_OF_CONTRIBUTORS else self.op, "plain")

    def query(self, transport: Transport, n: int, k: int, value_bytes: int) -> CostQuery:
        """Return the sizes that the choice depends on; ``value_bytes`` is the size of a value in a sum."""
        counted = self.op == MEAN_OF_CONTRIBUTORS
        return CostQuery(transport.size, transport.num_nodes, n, k, value_bytes, self.algorithm, self.wire, counted)
