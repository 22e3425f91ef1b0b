"""Plans: all that does not change between calls of one signature on one communicator, computed and checked once.

MPI has persistent collectives for what is the same in every step of a program. Here a program need not say that it is:
the communicator's queue keeps the plans of its latest signatures, and a call looks its own up.
"""

from __future__ import annotations

from sparsecomm import config
from sparsecomm.algorithms import find
from sparsecomm.backends import Backend
from sparsecomm.calls.options import Options
from sparsecomm.contribution import Chunks
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.choice import decide
from sparsecomm.wire import OPS, WIRES, CallSignature, Messages, shape_checksum

__all__ = ["Plan"]


class Plan:
    """What calls of one signature on one communicator have in common.

    One call of it is under way at a time, as of all calls of a queue.

    Attributes:
        ranks: the transport.
        algorithm: which calls are made with.
        backend: of the gradient's device.
        k: entries that every rank selects.
        chunks: how they are selected; ``None``: from the whole.
        mean: whether the sum is divided by the number of ranks.
        comm: the ranks, as the algorithm sees them.
    """

    def __init__(
        self,
        ranks: Transport,
        backend: Backend,
        dtype: DType,
        shape: tuple[int, ...],
        size: int,
        k: int,
        options: Options,
        chunks: Chunks | None = None,
        given: tuple[bool, bool] | None = None,
    ) -> None:
        """Choose the algorithm and the wire format, and prepare messages.

        Args:
            ranks, backend, k, chunks: see above.
            dtype: the element type that the ranks agree on.
            shape, size: of the gradient.
            options: have been checked.
            given: whether the caller has passed a residual, and an out. Ranks must agree on it, and on the shape;
                ``None``: what they must agree on is in the label of calls.

        Raises:
            InvalidInputError: the algorithm does not support such a call, or a setting cannot be used.
        """
        config.timeout()  # which calls ask for themselves
        self.ranks, self.backend, self.k, self.chunks = ranks, backend, k, chunks
        accumulator = dtype.accumulator
        named, costs, checksum = find(options.algorithm), profile.DEFAULT, 0  # profiles may differ where none is needed
        if named is None or options.wire == "auto" or named.unsupported is not None:
            used = profile.used(ranks.library, ranks.size, ranks.num_nodes)
            costs, checksum = used.costs, used.checksum
            best = decide(options.query(ranks, size, k, accumulator.itemsize), costs)
            named, wire = best.algorithm, best.wire
        else:
            wire = WIRES[options.wire]
        self.algorithm, self.mean = named, options.op == "mean"
        call = CallSignature(
            named.name,
            dtype.code,
            OPS.index(options.op),
            wire.code,
            size,
            k,
            checksum,
            chunk=0 if chunks is None else chunks.length,
            shape=0 if given is None else shape_checksum(shape),
            residual=given is not None and given[0],
            out=given is not None and given[1],
        )
        messages = Messages(call, ranks.rank, accumulator, shape, backend)
        self.comm = Communicator(ranks, backend, messages, wire, costs)
