"""`NodeCall`: what the call of a bucket does inside a node, before and after the sum between nodes.

In most clusters, several ranks share a machine and its slow link. They first add up their gradients densely, so that
only the sum of a node crosses the link. PyTorch's HSDP and its model averaging use the same two levels.

    node A: ranks 0 1        node B: ranks 2 3               2 nodes of 2 ranks; gradients in 2 slices

    gradients      0: a0 a1   1: b0 b1      2: c0 c1   3: d0 d1
    inside         0: a0+b0   1: a1+b1      2: c0+d0   3: c1+d1     dense: a reduce-scatter
    between        0 <-- slice 0, sparse --> 2     1 <-- slice 1, sparse --> 3
    inside         every rank gathers the results of both slices

A rank has the residual of its slice only. If a call fails, the ranks of a node cannot know which of them have received
all addends of their sums. So each rank restores its residual, and keeps its own gradients apart, in `Bucket.unsummed`.
The next call adds them to the residuals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sparsecomm.algorithms.dense import all_gather, reduce_scatter, uses_ring
from sparsecomm.backends import Backend
from sparsecomm.contribution import concatenate_ranges
from sparsecomm.primitives.communicator import ROUNDS, Communicator, gather_parcels, gather_words
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.tensors.interop import library_of
from sparsecomm.tensors.sparse import Array, DenseSum, SparseVector
from sparsecomm.transport import TrafficCounters
from sparsecomm.wire import PLAIN

_AGREE, _SUM, _BETWEEN, UPDATES, _GATHER = range(1, 6)  # stages of a call
_MEETING = 1 << 18  # round number, above those of other messages


class NodeCall:
    """The part of a bucket's call that happens inside this rank's node. Create it when the call has begun.

    Attributes:
        between: the ranks that have the same slice, one of each node.
        bytes_inside: bytes of messages that this rank has sent and received inside the node.
    """

    def __init__(self, bucket: Bucket, comm: Communicator, backend: Backend, traffic: TrafficCounters) -> None:
        assert bucket.nodes is not None
        self._bucket, self._nodes, self._backend = bucket, bucket.nodes, backend
        self._comm, self._traffic = comm, traffic
        self._collectives = self._nodes.collectives.get(bucket.device.kind)
        self.between = comm.subgroup(bucket.nodes.between, _BETWEEN)
        self.bytes_inside = [0, 0]
        self._before: list[Array] = []  # copies of the residual, and the velocity, from before `sum`

    def _inside(self, stage: int) -> Communicator:
        return self._comm.subgroup(self._nodes.inside, stage, wire=PLAIN)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count what is sent and received in this context in `bytes_inside`."""
        traffic, before = self._traffic, (self._traffic.bytes_sent, self._traffic.bytes_received)
        yield
        self.bytes_inside[0] += traffic.bytes_sent - before[0]
        self.bytes_inside[1] += traffic.bytes_received - before[1]

    # -- before the sum between nodes ---------------------------------------------------------------------------------

    def sum(self) -> None:
        """Add the sums of the node's gradients to the residual of this rank's slice. Collective inside the node.

        Tensors without a gradient on any rank of the node are set aside.
        """
        with self._counted():
            bucket, backend = self._bucket, self._backend
            gradients, absent = bucket.gradients(backend), {*bucket.absent()}
            names = [spec.name for spec in bucket.tensors]
            bits = [name in absent for name in names] + [not bucket.unsummed]
            self._before = [array.copy() for array in bucket.state]
            *without, none_unsummed = on_all(self._inside(_AGREE), bits, 0)
            if not none_unsummed:  # a rank of the node has some
                for array, unsummed in zip(bucket.state, bucket.begin_unsummed(backend), strict=True):
                    bucket.add_sums(backend, names, self._sums(unsummed), array)
            bucket.set_aside(name for name, is_absent in zip(names, without, strict=True) if is_absent)
            present = [name for name, is_absent in zip(names, without, strict=True) if not is_absent]
            settings, velocity = bucket.settings, bucket.state[1] if bucket.settings.momentum else None
            sums, decay, momentum = self._sums(gradients), settings.decay, settings.momentum
            bucket.add_sums(backend, present, sums, bucket.residual, velocity, decay, momentum)

    def _sums(self, slices: Array) -> Array:
        """Return the sums of this rank's slice over the node. Does not change ``slices``, which has all slices."""
        comm, length, position = self._inside(_SUM), self._bucket.length, self._nodes.position
        if self._collectives is not None:
            own = self._backend.zeros(length, slices.dtype)
            self._meet(comm)
            self._collectives.reduce_scatter(slices, own)
            return own
        segments = [slices[at : at + length] for at in range(0, len(slices), length)]
        if uses_ring(comm):
            segments = [segment.copy() for segment in segments]
            reduce_scatter(comm, segments)
            return segments[position]
        received = comm.exchange_segments(dict(enumerate(segments)), dict.fromkeys(range(comm.size), length), 0)
        total, *rest = [received[(position + distance) % comm.size] for distance in range(1, comm.size)]
        for segment in [*rest, segments[position]]:
            self._backend.add(total, segment)
        return total

    def undo(self) -> bool:
        """Restore what `sum` and the sum between nodes have changed. Return whether there was anything to restore."""
        if not self._before:
            return False
        self._bucket.restore(self._before)
        self.forget()
        return True

    def forget(self) -> None:
        """Drop the copies. Then `undo` does nothing."""
        self._before = []

    @staticmethod
    def _meet(comm: Communicator) -> None:
        """Wait until all ranks will call `_collectives` next. These would wait forever for a rank that left."""
        on_all(comm, [True], _MEETING)

    # -- after the sum between nodes ----------------------------------------------------------------------------------

    def gather(self, result: SparseVector, word: int = 0) -> tuple[SparseVector, list[int]]:
        """Return the result of all slices, and each rank's ``word``. Collective inside the node.

        ``result``: the result of this rank's slice.
        """
        bucket, comm = self._bucket, self._inside(_GATHER)
        size, length, shape = bucket.size, bucket.length, bucket.shape
        with self._counted():
            if isinstance(result, DenseSum):
                words = [received for (received,) in gather_words(comm, [word], ROUNDS)]
                dense = self._concatenate(comm, result.dense)
                gathered = self._backend.nonzeros(dense[:size], shape)
            else:
                begins = range(0, size, length)
                within = [(0, min(length, size - begin)) for begin in begins]
                parcels = gather_parcels(comm, ((result,), (word,)), 0, within)
                words = [comm.checked_words(rank, received, 1)[0] for rank, (_, received) in enumerate(parcels)]
                parts = (entries for (entries,), _ in parcels)
                gathered = concatenate_ranges(self._backend, parts, begins, size, shape)
            return gathered, words

    def _concatenate(self, comm: Communicator, own: Array) -> Array:
        """Return the arrays of all ranks of the node, one after another."""
        if self._collectives is not None:
            gathered = self._backend.zeros(len(own) * comm.size, own.dtype)
            self._meet(comm)
            self._collectives.all_gather(own, gathered)
            return gathered
        array: Array = library_of(own).concatenate(all_gather(comm, own, [len(own)] * comm.size))
        return array


def on_all(comm: Communicator, bits: Sequence[bool], round_no: int) -> list[bool]:
    """Return which bits are set on all ranks. Collective."""
    words = [sum(bit << i for i, bit in enumerate(bits[start : start + 64])) for start in range(0, len(bits), 64)]
    common = [-1] * len(words)
    for rank_words in gather_words(comm, words, round_no):
        common = [a & b for a, b in zip(common, rank_words, strict=True)]
    return [bool(common[i // 64] >> i % 64 & 1) for i in range(len(bits))]
