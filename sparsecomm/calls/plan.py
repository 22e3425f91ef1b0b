"""`Plan`: everything that calls of one signature on one communicator share, computed and checked once.

It corresponds to a persistent collective of MPI, but a program need not ask for it: the queue of a communicator stores
the plans of the latest signatures, and each call looks its plan up.
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
    """The plan of calls with one signature on one communicator, of which at most one is in flight.

    Attributes:
        transport: the transport of the communicator.
        backend: of the gradient's device.
        k: number of entries that each rank selects.
        chunks: how they are selected by chunk; ``None`` selects from the whole gradient.
        choice: the chosen algorithm and wire format, and their predicted time.
        algorithm: the chosen algorithm.
        costs: the costs that decided it; ``None`` if nothing was left to choose.
        mean: whether the sum is divided by the number of ranks.
        comm: the communicator that the algorithm uses.
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
        arrays: tuple[bool, bool] | None = None,
    ) -> None:
        """Choose the algorithm and the wire format, and prepare messages.

        Args:
            transport, backend, k, chunks: as in the attributes.
            dtype: the element type that the ranks must agree on.
            shape, size: of the gradient.
            options: checked options.
            costs: costs for the choice, the same on all ranks. Pass ``None`` if the options leave nothing to choose:
                assumed costs are used, since the ranks' profiles may differ.
            arrays: whether the caller passed a residual, and an ``out``. The ranks must agree on both and on the shape.
                ``None`` if the label of calls covers all of this.

        Raises:
            InvalidInputError: the algorithm does not support such a call, or a setting cannot be used.
        """
        config.timeout()  # raises if it cannot be used; calls read it themselves
        self.transport, self.backend, self.k, self.chunks, self.costs = transport, backend, k, chunks, costs
        accumulator = dtype.accumulator
        assumed = profile.DEFAULT if costs is None else costs.costs
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
            shape=0 if arrays is None else shape_checksum(shape),
            residual=arrays is not None and arrays[0],
            out=arrays is not None and arrays[1],
        )
        messages = Messages(call, transport.rank, accumulator, shape, backend)
        self.comm = Communicator(transport, backend, messages, best.wire, assumed)
