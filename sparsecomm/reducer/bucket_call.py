"""`BucketCall`: the call that sums a bucket."""

from __future__ import annotations

import math
import time
from itertools import compress

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.backends import Backend
from sparsecomm.calls.collectives import SumCall
from sparsecomm.calls.label import Label
from sparsecomm.calls.queue import CallQueue
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.node_call import NodeCall, on_all
from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16
from sparsecomm.tensors.interop import CPU
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Transport

_NARROW = FLOAT16, BFLOAT16
_ABSENCE = 1 << 19  # round number of the exchange of absent gradients, above those of algorithms


class BucketCall(SumCall):
    """The call that sums a bucket.

    A rank without a gradient for a tensor contributes zeros and marks its messages as incomplete. All ranks see the
    mark when the algorithm returns. They then exchange which gradients are absent, and which outputs have 16-bit
    elements, in one more trip.
    """

    def __init__(
        self, bucket: Bucket, transport: Transport, queue: CallQueue, density: float, label: Label, counters: Counters
    ) -> None:
        plan, within = bucket.plan(transport, queue, density), None
        with bucket.on_stream(bucket.last_gradient):
            contribution = bucket.contribution(plan)
            if bucket.device is not CPU:
                within = plan.backend.side_stream()  # after all work that the call must wait for
        skip = bucket.settings.skip_nonfinite
        settles_with = bucket.backend if skip else None
        super().__init__(plan, contribution, label, within=within, settles_with=settles_with, submitted=True)
        self.finite = True  # the result, on all ranks; not computed for dense sums without ``skip_nonfinite``
        self.usable = True  # whether a finite result is usable, the same on all ranks
        self.largest = 0.0  # the largest magnitude of the result, if it was computed
        self.nonfinite_here: set[str] = set()  # names of gradients that make the result not finite, on this rank
        self.sums_without_out: dict[str, SparseVector] = {}  # results of tensors without an output, by name
        self.without_gradient: frozenset[str] = frozenset()  # names for which no rank has a gradient
        self._absent, self._knows_absent = frozenset(bucket.absent()), False
        self._narrow = {name: out.dtype for name, out in bucket.outs.items() if out.dtype in _NARROW}  # later, of all
        self.names = [spec.name for spec in bucket.tensors]
        self._bucket, self._counters, self._skip = bucket, counters, skip
        self._write_seconds = 0.0
        self._result: SparseVector | None = None  # until the call is settled
        self._node: NodeCall | None = None  # with `Nodes`, when the call has begun

    def run(self) -> SparseVector:
        counters, moved, m = self._counters, self.transport.counters, self._bucket.num_slices
        num_nodes = self.transport.size // m
        before = moved.bytes_sent, moved.bytes_received, moved.messages_sent
        start = time.perf_counter()
        result = super().run()
        counters.exchange += time.perf_counter() - start - self._write_seconds
        counters.write += self._write_seconds
        inside = (0, 0) if self._node is None else self._node.bytes_inside
        counters.bytes_inside += inside[0]
        counters.bytes_sent += moved.bytes_sent - before[0] - inside[0]
        counters.bytes_received += moved.bytes_received - before[1] - inside[1]
        counters.messages_sent += moved.messages_sent - before[2]
        counters.bytes_dense += 2 * (num_nodes - 1) * self._bucket.nbytes // (num_nodes * m)
        counters.calls += 1
        counters.elements += self._bucket.size
        return result

    def _begin(self) -> None:
        self.comm.begin(self.label.checksum, incomplete=bool(self._absent))

    def _exchange(self) -> SparseVector:
        if self._bucket.nodes is None:
            result = self._quotient(self._sum(self.comm))
        else:
            self._node = NodeCall(self._bucket, self.comm, self.plan.backend, self.transport.counters)
            self._node.sum()
            result = self._gather(self._node, self._sum(self._node.between))
        if self.comm.incomplete:
            self._gather_absent()
        return result

    def _gather(self, node: NodeCall, own: SparseVector) -> SparseVector:
        """Return the result of all slices, given the sum of this rank's slice."""
        if isinstance(own, DenseSum):
            return node.gather(self._quotient(own))[0]
        return self._quotient(node.gather(own)[0])  # quotients may be zero, which no message may contain

    def _gather_absent(self) -> None:
        """Find the names for which no rank has a gradient, and the dtypes of 16-bit outputs. Collective."""
        if self._knows_absent:
            return
        count, bits = len(self.names), [name in self._absent for name in self.names]
        for dtype in _NARROW:
            bits += [self._narrow.get(name) is not dtype for name in self.names]
        common = on_all(self.comm, bits, _ABSENCE)
        self.without_gradient = frozenset(compress(self.names, common))
        for i, dtype in enumerate(_NARROW, 1):
            self._narrow |= {name: dtype for j, name in enumerate(self.names, i * count) if not common[j]}
        self._knows_absent = True

    def _roll_back(self) -> None:
        if self._node is None or not self._node.undo():
            super()._roll_back()
        if self._bucket.nodes is not None:
            self._bucket.keep_unsummed(self.plan.backend)

    def settle(self, *, usable: bool) -> None:
        """With ``skip_nonfinite``, update the residual. ``usable``: the result is applied, on all ranks."""
        result, bucket, start = self._result, self._bucket, time.perf_counter()
        if result is None:
            return
        with bucket.on_stream(bucket.last_gradient), bucket.side_stream():
            super().settle(usable=usable)
            if usable:
                self._mask(bucket.backend)
            self._result = None
        self._counters.exchange += time.perf_counter() - start

    def _finish(self, result: SparseVector) -> None:
        self._forget_gradients()
        super()._finish(result)
        start, bucket, backend = time.perf_counter(), self._bucket, self.plan.backend
        if self._skip or self.plan.algorithm is not ALGORITHMS["dense"]:
            values = result.dense if isinstance(result, DenseSum) else result.values
            self.largest = backend.largest(backend.as_tensor(values, values.shape))
            self.finite = math.isfinite(self.largest)
            if not self.finite:
                self.nonfinite_here = self._bucket.nonfinite_names(self.contribution.taken)
        if self._skip:
            self._result = result
        else:
            self._mask(backend)
        self._count(result)
        self.sums_without_out = bucket.write(backend, result, self.without_gradient, self._narrow)
        self._write_seconds = time.perf_counter() - start

    def _forget_gradients(self) -> None:
        """Forget gradients: from now on the result counts, even if memory runs out before it is applied here."""
        if self._node is not None:
            self._node.forget()
            self._bucket.forget_gradients()

    def _count(self, result: SparseVector) -> None:
        taken = self.contribution.num_taken
        self._counters.selected += self._bucket.size if taken is None else taken
        self._counters.applied += result.size if isinstance(result, DenseSum) else result.nnz

    def _mask(self, backend: Backend) -> None:
        """With masking, clear the velocity at the entries that this rank selected and at the entries of the result."""
        bucket = self._bucket
        if self.plan.algorithm is ALGORITHMS["dense"] or not (bucket.settings.momentum and bucket.settings.masking):
            return  # after a dense sum momentum continues
        assert self._total is not None
        velocity = bucket.backend.as_tensor(bucket.state[1], (bucket.length,))
        if (taken := self.contribution.taken) is not None:
            backend.clear(velocity, taken)
        backend.clear(velocity, self._total)
