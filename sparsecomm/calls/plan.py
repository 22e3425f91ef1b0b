"""`Options` and `Plan`: the checked options of calls, and the preparations that calls of one signature share.

A plan corresponds to a persistent collective of MPI, but programs need not ask for it: the queue of a communicator
stores the plans of the latest signatures, and each call looks its plan up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from sparsecomm import config
from sparsecomm.algorithms import ALGORITHMS, Algorithm, AlgorithmName, find, find_all, name_of
from sparsecomm.backends import Backend
from sparsecomm.checks import check_choice
from sparsecomm.contribution import Chunks
from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.choice import CostQuery, decide
from sparsecomm.tuning.profile import KnownCosts
from sparsecomm.wire import EXACT, MEAN_OF_CONTRIBUTORS, OPS, WIRES, CallSignature, Messages, Op, WireName
from sparsecomm.wire.header import shape_checksum


class CallOptions(TypedDict, total=False):
    """Types of the keyword arguments that a function with ``**options`` passes to `Options.of`."""

    algorithm: AlgorithmName | Algorithm
    op: Op
    wire: WireName


@dataclass(frozen=True)
class Options:
    """The options of a call, as in `sparsecomm.sparse_allreduce`. ``algorithm`` is always a name, not an object."""

    algorithm: str = "auto"
    op: str = "sum"
    wire: str = "auto"

    @classmethod
    def of(cls, algorithm: AlgorithmName | Algorithm = "auto", op: Op = "sum", wire: WireName = "auto") -> Options:
        """Return the options of a call; raise `InvalidInputError` if the algorithm is an unregistered object."""
        return cls(name_of(algorithm), op, wire)

    def check(self, dtype: str, *, by_chunk: bool = False) -> None:
        """Raise `InvalidInputError` if an option is unknown, or not supported with gradients of type ``dtype``.

        ``by_chunk``: whether the ranks select entries by chunk, which must then be supported, too.
        """
        find(self.algorithm)
        check_choice("op", self.op, OPS)
        check_choice("wire", self.wire, ("auto", *WIRES))
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
        reasons = ["" if each is None else each.cannot_count_contributors for each in algorithms]
        if self.op == MEAN_OF_CONTRIBUTORS and all(reasons):
            supported = ", ".join(each.name for each in ALGORITHMS.values() if not each.cannot_count_contributors)
            raise InvalidInputError(
                f"op={self.op!r} with algorithm={self.algorithm!r}, which {reasons[0]}; expected auto or one of "
                f"{supported}"
            )

    @property
    def chooses_algorithm(self) -> bool:
        """Whether costs decide which algorithm is used."""
        return find(self.algorithm) is None

    def for_dense_sum(self) -> Options:
        """Return the options of a dense sum. All ranks contribute to it, so its mean divides by the world size."""
        return Options("dense", "mean" if self.op == MEAN_OF_CONTRIBUTORS else self.op, "plain")

    def query(self, transport: Transport, n: int, k: int, value_bytes: int, per_node: int = 1) -> CostQuery:
        """Return the sizes that the choice depends on.

        ``value_bytes``: the size of a value in a sum. ``per_node``: as in `Plan`.
        """
        P, counted = transport.size // per_node, self.op == MEAN_OF_CONTRIBUTORS
        num_nodes = transport.num_nodes if per_node == 1 else P
        return CostQuery(P, num_nodes, n, k, value_bytes, self.algorithm, self.wire, counted)


class Plan:
    """The plan of calls with one signature on one communicator. Only one of them may be in flight at a time."""

    def __init__(
        self,
        transport: Transport,
        backend: Backend,
        dtype: DType,
        shape: tuple[int, ...],
        size: int,
        k: int,
        options: Options,
        costs: KnownCosts | None,
        chunks: Chunks | None = None,
        arrays: tuple[bool, bool] | None = None,
        per_node: int = 1,
    ) -> None:
        """Choose the algorithm and the wire format, and prepare messages.

        Args:
            backend, dtype, shape, size: of the gradient.
            k: number of entries that each rank selects.
            options: checked options.
            costs: costs for the choice, the same on all ranks. Pass ``None`` if the options leave nothing to choose.
                The plan then uses `profile.DEFAULT`, because the ranks may have different profiles.
            chunks: the chunks from which entries are selected; ``None`` selects from the whole gradient.
            arrays: two bools: whether the caller passed a residual, and whether it passed ``out``. The ranks compare
                both and the shape. Pass ``None`` to skip this comparison, if the label of the calls covers it.
            per_node: the number of ranks per node. If above 1, nodes have added up their ranks' gradients, and all
                ranks make this call at the same time, each for its slice, with one rank of every other node.
        """
        config.timeout()  # raises early if SPARSECOMM_TIMEOUT is invalid; each call reads it again
        self.transport, self.backend, self.k, self.chunks, self.costs = transport, backend, k, chunks, costs
        self.options = options
        accumulator = dtype.accumulator
        assumed = (profile.DEFAULT if costs is None else costs.costs).shared_by(per_node)
        # The chosen algorithm and wire format, and their predicted time.
        self.choice = best = decide(options.query(transport, size, k, accumulator.itemsize, per_node), assumed)
        self.algorithm = best.algorithm
        # The sum is divided by this. `MEAN_OF_CONTRIBUTORS` has already divided it by the number of contributing nodes.
        self.divisor = transport.size if options.op == "mean" else 1
        if options.op == MEAN_OF_CONTRIBUTORS:
            self.divisor = per_node
        call = CallSignature(
            best.algorithm.name,
            dtype.code,
            OPS.index(options.op),
            best.wire.code,
            size,
            k,
            0 if costs is None else costs.checksum,
            chunk=0 if chunks is None else chunks.length,
            shape=0 if arrays is None else shape_checksum(shape),
            residual=arrays is not None and arrays[0],
            out=arrays is not None and arrays[1],
        )
        messages = Messages(call, transport.rank, accumulator, shape, backend)
        self.comm = Communicator(transport, backend, messages, best.wire, assumed)
