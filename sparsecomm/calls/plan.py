"""`Plan`: the preparations that calls of one signature share.

A plan corresponds to a persistent collective of MPI, but programs need not ask for it: the queue of a communicator
stores the plans of the latest signatures, and each call looks its plan up.
"""

from __future__ import annotations

from sparsecomm.backends import Backend
from sparsecomm.calls.options import SumSettings
from sparsecomm.contribution import Chunks
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.choice import decide
from sparsecomm.tuning.profile import KnownCosts
from sparsecomm.wire import MEAN_OF_CONTRIBUTORS, OPS, CallSignature, Messages
from sparsecomm.wire.header import shape_checksum


class Plan:
    """The plan of calls with one signature on one communicator. Only one of them may be in flight at a time."""

    def __init__(
        self,
        transport: Transport,
        backend: Backend,
        settings: SumSettings,
        *,
        dtype: DType,
        shape: tuple[int, ...],
        size: int,
        k: int,
        costs: KnownCosts | None = None,
        chunks: Chunks | None = None,
        arrays: tuple[bool, bool] | None = None,
        per_node: int = 1,
    ) -> None:
        """Choose the algorithm and the wire format, and prepare messages.

        Args:
            backend, dtype, shape, size: of the gradient.
            settings: supported with ``dtype`` and ``chunks``.
            k: number of entries that each rank selects.
            costs: costs for the choice, the same on all ranks. Pass ``None`` if the settings leave nothing to choose.
                The plan then uses `profile.DEFAULT`, because the ranks may have different profiles.
            chunks: the chunks from which entries are selected; ``None`` selects from the whole gradient.
            arrays: two bools: whether the caller passed a residual, and whether it passed ``out``. The ranks compare
                both and the shape. Pass ``None`` to skip this comparison, if the label of the calls covers it.
            per_node: the number of ranks per node. If above 1, nodes have added up their ranks' gradients, and all
                ranks make this call at the same time, each for its slice, with one rank of every other node.
        """
        self.transport, self.backend, self.k, self.chunks, self.costs = transport, backend, k, chunks, costs
        self.settings = settings
        accumulator = dtype.accumulator
        assumed = (profile.DEFAULT if costs is None else costs.costs).shared_by(per_node)
        # The chosen algorithm and wire format, and their predicted time.
        self.choice = best = decide(settings.query(transport, size, k, accumulator.itemsize, per_node), assumed)
        self.algorithm = best.algorithm
        # The sum is divided by this. `MEAN_OF_CONTRIBUTORS` has already divided it by the number of contributing nodes.
        self.divisor = transport.size if settings.op == "mean" else 1
        if settings.op == MEAN_OF_CONTRIBUTORS:
            self.divisor = per_node
        call = CallSignature(
            best.algorithm.name,
            dtype.code,
            OPS.index(settings.op),
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
