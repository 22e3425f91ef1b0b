"""Plans: all that does not change between calls of one signature on one communicator, computed and checked once.

MPI has persistent collectives for what is the same in every step of a program. Here a program need not say that it is:
the communicator's queue keeps the plans of its latest signatures, and a call looks its own up.
"""

from __future__ import annotations

from sparsecomm import config
from sparsecomm.backends import Backend
from sparsecomm.calls.options import Options
from sparsecomm.contribution import Chunks
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.choice import decide
from sparsecomm.tuning.profile import KnownCosts
from sparsecomm.wire import OPS, CallSignature, Messages, shape_checksum

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
        choice: the algorithm and the wire format, and the seconds that were predicted for them.
        costs: by which it was made; ``None``: nothing was left to choose.
        mean: whether the sum is divided by the number of ranks.
        comm: the ranks, as the algorithm sees them.
    """

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
        given: tuple[bool, bool] | None = None,
    ) -> None:
        """Choose the algorithm and the wire format, and prepare messages.

        Args:
            ranks, backend, k, chunks: see above.
            dtype: the element type that the ranks agree on.
            shape, size: of the gradient.
            options: have been checked.
            costs: by which the ranks choose, the same on all; ``None``: the options leave nothing to choose, and the
                assumed ones will do: profiles may differ then.
            given: whether the caller has passed a residual, and an out. Ranks must agree on it, and on the shape;
                ``None``: what they must agree on is in the label of calls.

        Raises:
            InvalidInputError: the algorithm does not support such a call, or a setting cannot be used.
        """
        config.timeout()  # which calls ask for themselves
        self.transport, self.backend, self.k, self.chunks = transport, backend, k, chunks
        accumulator = dtype.accumulator
        self.costs, assumed = costs, profile.DEFAULT if costs is None else costs.costs
        self.choice = best = decide(options.query(transport, size, k, accumulator.itemsize), assumed)
        self.algorithm, self.mean = best.algorithm, options.op == "mean"
        call = CallSignature(
            best.algorithm.name,
            dtype.code,
            OPS.index(options.op),
            best.wire.code,
            size,
            k,
            0 if costs is None else costs.checksum,
            chunk=0 if chunks is None else chunks.length,
            shape=0 if given is None else shape_checksum(shape),
            residual=given is not None and given[0],
            out=given is not None and given[1],
        )
        messages = Messages(call, transport.rank, accumulator, shape, backend)
        self.comm = Communicator(transport, backend, messages, best.wire, assumed)
