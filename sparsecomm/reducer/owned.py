"""`OwnedCall`: the call of a bucket whose owners make the optimizer's step. `Owner`: what an optimizer defines for it.

Each element of a bucket has one owner, the same in every step. Owners receive sums as in
`sparsecomm.algorithms.double`, make the step with them, and send the updates of weights, rounded to the wire format,
instead of the sums. So only they need the optimizer's state. A dense step is a reduce-scatter, the owners' steps, and
an all-gather of weights.

Nothing changes in the call itself. All ranks learn from all owners whether a step can be used before any rank applies
it, and an interrupted step continues with the same updates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.algorithms.dense import all_gather, reduce_scatter
from sparsecomm.algorithms.double import ranges, sums_of_owner
from sparsecomm.backends import Backend
from sparsecomm.primitives.communicator import ROUNDS, Communicator, gather_parcels
from sparsecomm.reducer.bucket import Bucket, Part
from sparsecomm.reducer.bucket_call import BucketCall
from sparsecomm.reducer.node_call import UPDATES, NodeCall
from sparsecomm.tensors.interop import library_of
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.wire import format_of_updates

FINE, OVERFLOW, NOT_FINITE = range(3)  # verdicts of an owner: the updates are usable, or why not


class Owner(Protocol):
    """Makes an optimizer's step with sums of gradients, for the elements that this rank owns."""

    def sparse_step(self, backend: Backend, bucket: Bucket, parts: Sequence[Part], sums: SparseVector) -> SparseStep:
        """Make the step, without changing any state yet. ``sums``: of the parts, with indices in the bucket."""

    def dense_step(
        self, backend: Backend, bucket: Bucket, parts: Sequence[Part], sums: Array, without: Collection[str]
    ) -> int:
        """Make the step, and overwrite ``sums``, one per element of the parts, with new weights. Return a verdict.

        ``without``: tensors without a gradient on any rank. Their weights do not change. If the verdict is `OVERFLOW`,
        elements that overflow become NaN instead.
        """

    def decided(self, bucket: Bucket, outcome: Outcome) -> None:
        """Receive the outcome of a bucket's call. It is applied if the verdicts of all buckets are `FINE`."""


class SparseStep(NamedTuple):
    """A step of an owner.

    Attributes:
        changes: what all ranks add to the weights, before it is rounded: an element for each sum. If the verdict is
            `OVERFLOW`, 1 for sums that overflow instead, and 0 for others.
        jumps: int8, of the same shape: changes of the exponents of units.
        verdict: `FINE`, or why no rank may apply the step.
    """

    changes: Array
    jumps: Array
    verdict: int


class Outcome(NamedTuple):
    """What the ranks know after a call.

    Attributes:
        result: the updates of all weights; a `DenseSum` contains the new weights.
        own: the part of the result for this rank's slice; with the verdict `OVERFLOW`, its entries that would overflow.
        changes: the jumps of this rank's slice, rounded to the wire format; none on a single rank, which knows them.
        verdict: `FINE`, or why no rank may apply the step, the same on all ranks.
    """

    result: SparseVector
    own: SparseVector
    changes: SparseVector
    verdict: int


class _IgnoredErrors:
    """Ignores rounding errors, because owners keep them in the optimizer's state."""

    def record_dropped(self, entries: SparseVector) -> None: ...


class OwnedCall(BucketCall):
    """The call of a bucket whose owners make a step. Its algorithm is "double", or "dense"."""

    _outcome: Outcome

    def __init__(self, owner: Owner, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._owner = owner

    def _sum(self, comm: Communicator) -> SparseVector:
        dense = self.plan.algorithm is ALGORITHMS["dense"]
        self._outcome = self._dense(comm) if dense else self._sparse(comm)
        self._total = self._outcome.result
        return self._total

    def _quotient(self, total: SparseVector) -> SparseVector:
        return total  # owners have divided the sums

    def _gather(self, node: NodeCall, own: SparseVector) -> SparseVector:
        outcome = self._outcome
        result, verdicts = node.gather(own, outcome.verdict)
        if outcome.verdict < (verdict := max(verdicts)):
            own = own.part(0, 0)  # only entries of other slices would overflow
        self._outcome = outcome._replace(result=result, own=own, verdict=verdict)
        return result

    def _sparse(self, comm: Communicator) -> Outcome:
        """Send each owner this rank's largest entries, and receive updates. Two trips."""
        gradient, bucket, backend, k = self.contribution, self._bucket, self.plan.backend, self.plan.k
        if comm.size == 1:
            return self._step(comm, gradient.topk(k), 0)
        owned = ranges(bucket.length, max(k, bucket.owners), bucket.owners)
        sums = sums_of_owner(comm, gradient, owned)
        comm = comm.subgroup(range(comm.size), UPDATES, wire=format_of_updates(self.plan.choice.wire))
        no_entries = sums.part(0, 0)
        outcome = Outcome(no_entries, no_entries, no_entries, FINE)
        if comm.rank < bucket.owners:
            begin = owned[comm.rank][0]
            outcome = self._step(comm, backend.divide(sums, self.plan.divisor), begin)
        own, within = ((outcome.result, outcome.changes), (outcome.verdict,)), [(begin, end) for begin, end, _ in owned]
        gathered, outcomes = gather_parcels(comm, own, ROUNDS, within)[: len(owned)], []
        lasts = [changes.indices[-1:] for (_, changes), _ in gathered]
        last = iter(library_of(sums.values).concatenate(lasts).tolist())  # on a GPU, the host waits once
        for owner, ((updates, changes), words), (begin, _, count) in zip(range(comm.size), gathered, owned):  # noqa: B905
            (verdict,), positions = comm.checked_words(owner, words, 1), changes.indices - begin
            if updates.nnz > count or (changes.nnz and next(last) - begin >= updates.nnz):
                seen = f"{updates.nnz} updates and changes at {positions[-1:]} instead of at most {count}"
                raise comm.broken(owner, seen)
            indices = updates.indices[positions].astype(changes.indices.dtype, copy=False)
            moved = SparseVector.trusted(indices, changes.values, changes.size, changes.shape)
            outcomes.append(Outcome(updates, updates, moved, verdict))
        verdict = max(outcome.verdict for outcome in outcomes)
        parts = [(outcome.result, outcome.changes) for outcome in outcomes if outcome.verdict == verdict]
        updates, changes = (backend.concatenate_entries([*vectors]) for vectors in zip(*parts, strict=True))
        return Outcome(updates, updates, changes, verdict)

    def _step(self, comm: Communicator, sums: SparseVector, begin: int) -> Outcome:
        """Make the owner's step for elements from ``begin`` on, and round the updates to the format of ``comm``."""
        bucket, backend, xp = self._bucket, self.plan.backend, library_of(sums.values)
        step = self._owner.sparse_step(backend, bucket, bucket.parts(self.transport.rank), sums)
        exact = SparseVector.trusted(sums.indices, step.changes, sums.size, sums.shape)
        if comm.size == 1 and step.verdict == FINE:
            return Outcome(exact, exact, exact.part(0, 0), FINE)  # nobody needs the updates
        changed = backend.not_zero(step.changes)
        nonzero = None if changed.all() else xp.flatnonzero(changed)
        if nonzero is not None:
            exact = exact.at(nonzero)
        if comm.size == 1:
            return Outcome(exact, exact, exact.part(0, 0), step.verdict)
        updates, jumps = comm.round_and_record(exact, _IgnoredErrors()), step.jumps
        if nonzero is not None:
            jumps = jumps[nonzero]
        if updates.nnz < exact.nnz:
            jumps = jumps[xp.searchsorted(exact.indices, updates.indices)]
        # Positions among the updates take fewer bits than indices.
        positions = xp.flatnonzero(jumps)
        jumps, indices = jumps[positions].astype(exact.values.dtype), (positions + begin).astype(sums.indices.dtype)
        changes = SparseVector.trusted(indices, jumps, sums.size, sums.shape)
        return Outcome(updates, updates, comm.round_and_record(changes, _IgnoredErrors()), step.verdict)

    def _dense(self, comm: Communicator) -> Outcome:
        """Add up gradients at their owners, and gather new weights. Two trips."""
        bucket, total, backend = self._bucket, self.contribution.whole(), self.plan.backend
        bounds = [bucket.length * min(rank, bucket.owners) // bucket.owners for rank in range(comm.size + 1)]
        segments = [total[begin:end] for begin, end in pairwise(bounds)]
        reduce_scatter(comm, segments)
        if comm.incomplete:  # equal on all ranks, because each has received messages from all others
            self._gather_absent()
        own = segments[comm.rank]
        if self.plan.divisor > 1:
            own /= self.plan.divisor
        verdict = FINE
        if len(own):
            parts = bucket.parts(self.transport.rank)
            verdict = self._owner.dense_step(backend, bucket, parts, own, self.without_gradient)
        if comm.size > 1:
            sent = backend.zeros(len(own) + 1, own.dtype)  # the last element: the verdict
            sent[:-1], sent[-1] = own, verdict
            gathered = all_gather(comm, sent, [len(segment) + 1 for segment in segments])
            for rank, received in enumerate(gathered):
                if rank != comm.rank:
                    segments[rank][:] = received[:-1]
            verdicts = library_of(own).concatenate([received[-1:] for received in gathered])
            verdict = int(verdicts.max())  # on a GPU, the host waits once
        no_entries = backend.nonzeros(backend.zeros(0, total.dtype), (0,))
        result = backend.nonzeros(total, self.contribution.shape)
        return Outcome(result, result, no_entries, verdict)

    def _finish(self, result: SparseVector) -> None:
        self._forget_gradients()
        self.finite, self.usable = self._outcome.verdict != NOT_FINITE, self._outcome.verdict == FINE
        self.nonfinite_here = set() if self.finite else self._bucket.nonfinite_names(self.contribution.taken)
        self._result = result
        self._count(result)
        self._owner.decided(self._bucket, self._outcome)
