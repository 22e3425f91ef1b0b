"""The options of calls: `CallSettings` for one call, and `SumSettings` for all functions that make calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, cast

from sparsecomm.algorithms import ALGORITHMS, Algorithm, AlgorithmName, Comparison, find, name_of
from sparsecomm.calls.arguments import chunk_of
from sparsecomm.calls.label import Label
from sparsecomm.checks import check_choice, quote, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Transport
from sparsecomm.tuning.choice import CostQuery
from sparsecomm.wire import EXACT, MEAN_OF_CONTRIBUTORS, OPS, WIRES, Op, WireName


@dataclass(frozen=True, kw_only=True)
class SumSettings:
    """How sums are computed and sent.

    Attributes:
        algorithm: a name from `algorithms`, or an `Algorithm` from it. "split:R" is "split" with a result of R k
            entries, R = 2, 3, ..., which suits runs with few rounds. "fastest" is the global top-k algorithm with the
            shortest predicted time, by the costs that `sparsecomm tune` or the first call measured. "auto" is the
            same, or "dense" if that is predicted to be faster.
        op: "sum"; "mean", the sum divided by the number of ranks; or "mean_of_contributors", the sum at each index
            divided by the number of ranks that sent an entry there, which only some algorithms know
            (docs/algorithms/index.md). The result has the same indices as for "sum".
        wire: format of entries in messages. "plain": 8 bytes each for float32. "packed": indices in about
            2 + log2(n/k) bits, exact values. "packed_bfloat16", "packed_float16", "packed_int8", "packed_int4",
            "packed_int2", "packed_sign": also rounds values; residuals keep the rounding errors. "auto": plain or
            packed, whichever costs less. Dense messages are not packed.

    Raises:
        InvalidInputError: an option is unknown.
    """

    algorithm: AlgorithmName | Algorithm = "auto"
    op: Op = "sum"
    wire: WireName = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", name_of(self.algorithm))
        find(self.algorithm_name)
        check_choice("op", self.op, OPS)
        check_choice("wire", self.wire, ("auto", *WIRES))

    @property
    def algorithm_name(self) -> AlgorithmName | Comparison:
        return cast("AlgorithmName | Comparison", self.algorithm)

    @property
    def common(self) -> dict[str, Any]:
        """These options by name, which all ranks must share."""
        return {"algorithm": self.algorithm_name, "op": self.op, "wire": self.wire}

    def check(self, dtype: str, *, by_chunk: bool = False) -> None:
        """Raise `InvalidInputError` if an option is not supported with gradients of type ``dtype``.

        ``by_chunk``: whether the ranks select entries by chunk, which must then be supported, too.
        """
        if dtype == "float64" and self.wire != "auto" and WIRES[self.wire].kind is not EXACT:
            raise InvalidInputError(
                f"wire={self.wire!r} carries values of float32 sums, and x is float64; pass wire='plain' or 'packed'"
            )
        algorithm = find(self.algorithm_name)
        if algorithm is None:
            return
        if by_chunk and not algorithm.by_chunk:
            raise InvalidInputError(
                f"chunk is not supported with algorithm={algorithm.name!r}, which selects from its own ranges; leave "
                "chunk out, or choose another algorithm"
            )
        if self.op == MEAN_OF_CONTRIBUTORS and (reason := algorithm.cannot_count_contributors):
            supported = ", ".join(other.name for other in ALGORITHMS.values() if not other.cannot_count_contributors)
            raise InvalidInputError(
                f"op={self.op!r} with algorithm={algorithm.name!r}, which {reason}; expected auto or one of {supported}"
            )

    @property
    def chooses_algorithm(self) -> bool:
        """Whether costs decide which algorithm is used."""
        return find(self.algorithm_name) is None

    def for_dense_sum(self) -> SumSettings:
        """Return the settings of a dense sum. All ranks contribute to it, so its mean divides by the world size."""
        return SumSettings(algorithm="dense", op="mean" if self.op == MEAN_OF_CONTRIBUTORS else self.op, wire="plain")

    def query(self, transport: Transport, n: int, k: int, value_bytes: int, per_node: int = 1) -> CostQuery:
        """Return the sizes that the choice depends on.

        ``value_bytes``: the size of a value in a sum. ``per_node``: as in `Plan`.
        """
        P, counted = transport.size // per_node, self.op == MEAN_OF_CONTRIBUTORS
        num_nodes = transport.num_nodes if per_node == 1 else P
        return CostQuery(
            P, num_nodes, n, k, value_bytes, algorithm=self.algorithm_name, wire=self.wire, contributors=counted
        )


@dataclass(frozen=True, kw_only=True)
class CallSettings(SumSettings):
    """The options of `sparsecomm.sparse_allreduce`.

    Attributes:
        chunk: every rank selects k of each ``chunk`` elements, as in `topk`. The chunks do not limit the result: a
            global top-k algorithm returns the largest entries of the whole sum, as many as one rank selects. "dense"
            ignores ``chunk``. Must be the same on all ranks.
        decay: factor in (0, 1] of the residual before x is added, so that old entries fade (SparseLoCo: Sarfi et al.,
            2025). Ranks may differ in it. Not supported with ``algorithm="dense"``.
        label: a name, for example of the layer. Calls with different labels do not match. Without labels, the library
            cannot detect that ranks make two calls of the same size in different orders.
    """

    chunk: int | None = None
    decay: float = 1.0
    label: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None:
            object.__setattr__(self, "chunk", chunk_of(self.chunk))
        factor = to_float(self.decay)
        if not 0 < factor <= 1:  # true for NaN
            raise InvalidInputError(
                f"decay={quote(self.decay)}: expected a number in (0, 1]; 1 keeps all of the residual"
            )
        if factor < 1 and self.algorithm == "dense":
            raise InvalidInputError(f"decay={factor!r} with algorithm='dense', which leaves no residual; leave one out")
        object.__setattr__(self, "decay", factor)
        if not isinstance(self.label, (str, Label)):
            raise InvalidInputError(f"label={quote(self.label)}: expected a str")


# declared above: SumOptions of SumSettings
class SumOptions(TypedDict, total=False):
    algorithm: AlgorithmName | Algorithm
    op: Op
    wire: WireName


# declared above: CallOptions(SumOptions) of CallSettings
class CallOptions(SumOptions, total=False):
    chunk: int | None
    decay: float
    label: str
