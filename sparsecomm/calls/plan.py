"""Plans: all that does not change between calls of one signature on one communicator, computed and checked once.

MPI has persistent collectives for what is the same in every step of a program. Here a program need not say that it is:
the communicator's queue keeps the plans of its latest signatures, and a call looks its own up.
"""

from __future__ import annotations

from collections.abc import Hashable

from sparsecomm import _environment, config
from sparsecomm.algorithms import ALGORITHMS, find
from sparsecomm.backends import Backend
from sparsecomm.calls.options import Options
from sparsecomm.checks import FAULTS
from sparsecomm.contribution import Chunks
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.choice import decide
from sparsecomm.wire import OPS, WIRES, CallSignature, Messages, shape_checksum

__all__ = ["Plan", "Plans"]

_MAX_PLANS = 1024  # of one communicator: more than a model has tensors; each takes some KB


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
            InvalidInputError: the algorithm does not support such a call.
        """
        self.ranks, self.backend, self.k, self.chunks = ranks, backend, k, chunks
        accumulator = dtype.accumulator
        named, checksum = find(options.algorithm), 0
        if named is None or options.wire == "auto" or named.unsupported is not None:
            costs = profile.used(ranks.library, ranks.size, ranks.num_nodes)
            best = decide(options.query(ranks, size, k, accumulator.itemsize), costs.costs)
            named, wire, checksum = best.algorithm, best.wire, costs.checksum
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
        self.comm = Communicator(ranks, backend, Messages(call, ranks.rank, accumulator, shape, backend), wire)


class Plans:
    """The plans of a communicator: the latest that were made, until a setting or the registry of algorithms changes.

    A key that cannot be hashed or compared has none: its arguments are refused, or checked in every call.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._texts: object = None  # the settings and the registry for which they hold
        self._algorithms = 0

    def find(self, key: Hashable) -> Plan | None:
        """Return the plan that was kept by that key; ``None`` if there is none, or it holds no more."""
        self._forget()
        try:
            return self._plans.get(key)
        except FAULTS:
            return None

    def keep(self, key: Hashable, plan: Plan) -> Plan:
        """Keep a plan, in place of the oldest one if there are too many; return it."""
        self._forget()
        if len(self._plans) >= _MAX_PLANS:
            self._plans.pop(next(iter(self._plans)), None)
        try:  # noqa: SIM105 - what leaves `suppress` is bytecode
            self._plans[key] = plan
        except FAULTS:
            pass
        return plan

    def _forget(self) -> None:
        """Forget all plans if they hold no more."""
        texts, algorithms = _environment.texts(), len(ALGORITHMS)
        if self._texts is not texts or self._algorithms != algorithms:
            config.timeout()  # raises if it cannot be used; the backend of a new plan does so for its settings
            self._plans.clear()
            self._texts, self._algorithms = texts, algorithms
