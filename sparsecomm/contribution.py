"""`Contribution`: what one rank's gradient and residual contribute to a call, and what the residual holds afterwards.

With a residual, the call sums ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1), or ``decay * residual +
x``, so that old entries fade (Sarfi et al., "SparseLoCo", 2025, Alg. 1). Entries that this rank selects leave the
residual. Gradient that is missing from the result returns to a residual, index by index:

    If the result has no entry at an index, each rank takes back its selected entry, and dropped partial sums are
    ignored. If the result has an entry there, each rank keeps the partial sums that it dropped.

So no gradient is lost. An algorithm only records what it drops; `Contribution.commit` applies the rule when the call is
decided. After a failed call, the residual is ``decay * residual + x``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype

_BEFORE, _DECAYED, _SUM = range(3)  # contents of a residual


class Chunks(NamedTuple):
    """Selection by chunk: the top ``k`` of every ``length`` elements.

    Chunks do not cross tensors: ``offsets`` has the begin of each tensor and the end of the last one. It is empty for a
    single tensor.
    """

    k: int
    length: int
    offsets: tuple[int, ...] = ()

    def total(self, size: int) -> int:
        """Return the number of entries selected from ``size`` nonzero elements."""
        sizes = [end - begin for begin, end in pairwise(self.offsets or (0, size))]
        return sum(elements // self.length * self.k + min(self.k, elements % self.length) for elements in sizes)


def concatenate_ranges(
    backend: Backend, parts: Iterable[SparseVector], begins: Sequence[int], size: int, shape: tuple[int, ...]
) -> SparseVector:
    """Concatenate the entries of ranges of a tensor. ``begins``: where the ranges begin. ``size``, ``shape``: of it."""
    dtype, moved = index_dtype(size), []
    for part, begin in zip(parts, begins, strict=True):
        indices = part.indices.astype(dtype, copy=False) + dtype.type(begin)
        moved.append(SparseVector.trusted(indices, part.values, size, shape))
    return backend.concatenate_entries(moved)


class Contribution:
    """One rank's contribution to one call.

    An algorithm selects entries with `topk` or `topk_of_ranges`, or takes the dense gradient with `whole`, and records
    dropped entries with `record_dropped`. `commit` or `rollback` ends the contribution. All other methods either
    succeed, or raise and change nothing.

    Attributes:
        shape, size: of the gradient.
        backend: of its device and of the call.
        taken: the entries that this rank has selected and removed from the residual; ``None`` before a selection and
            after `whole`.
        num_taken: the number of these entries, or ``None``.
    """

    def __init__(
        self,
        backend: Backend,
        gradient: Tensor | None,
        residual: Tensor | None,
        shape: tuple[int, ...],
        size: int,
        chunks: Chunks | None = None,
        decay: float = 1.0,
        substitute: Callable[[Sequence[SparseVector]], Tensor | None] | None = None,
    ) -> None:
        """Prepare a contribution.

        Args:
            gradient: ``None`` if it has already been added to the residual.
            residual: ``None`` if there is no residual.
            chunks: selection by chunk; ``None`` selects from the whole gradient.
            decay: factor of the residual, applied once before the gradient is added.
            substitute: called once with the selected entries. If it returns a tensor, this is contributed instead, and
                the residual does not change. On a GPU, one wait can then find the number of entries and whether all
                gradients were added.
        """
        self.backend, self.shape, self.size = backend, shape, size
        self._gradient, self._residual = gradient, residual
        self._chunks, self._decay, self._substitute = chunks, decay, substitute
        self._holds = _BEFORE if gradient is not None else _SUM  # what the residual holds
        self._selection: SparseVector | None = None  # see `with_selection`
        self._parts: list[SparseVector] | None = None  # the entries that this rank has selected
        self._removed: list[tuple[Tensor | None, SparseVector]] = []  # entries removed from a range of the residual
        self._took_whole = False
        self._replacement: tuple[Tensor, Array] | None = None  # a range of the residual, and its values after `commit`
        self._overwritten: SparseVector | None = None  # entries of the residual before sums were added
        self._dropped: list[SparseVector] = []
        self._committed = 0  # completed steps of `commit`

    @property
    def taken(self) -> SparseVector | None:
        return self._taken(self.backend)

    def _taken(self, backend: Backend) -> SparseVector | None:
        if self._parts and len(self._parts) > 1:
            self._parts = [backend.concatenate_entries(self._parts)]
        return self._parts[0] if self._parts else None

    @property
    def num_taken(self) -> int | None:
        return None if self._parts is None else sum(part.nnz for part in self._parts)

    def topk(self, k: int) -> SparseVector:
        """Select this rank's top-k, or the top entries of its chunks, k in all."""
        if self._selection is not None:
            return self._selection
        taken = self._take(k) if self._chunks is None else self._take_by_chunk(self._chunks)
        if self._substitute is not None and self._substituted([taken]):
            taken = self._take(k)
        self._parts = [taken]
        return taken

    def _substituted(self, taken: Sequence[SparseVector]) -> bool:
        """Return whether a substitute has taken the place of the residual. The entries must be selected again."""
        substitute, self._substitute = self._substitute, None
        if substitute is None or (tensor := substitute(taken)) is None:
            return False
        self.rollback()
        self._residual, self._chunks = tensor, None
        return True

    def with_selection(self, entries: SparseVector) -> Contribution:
        """Return a contribution that selects ``entries``, for a stage that sums them. It shares the dropped entries."""
        stage = copy(self)
        stage._selection = entries
        return stage

    def whole(self) -> Array:
        """Take the whole gradient, as a flat dense array in the accumulator dtype that the caller may change."""
        if self._selection is not None:
            raise NotImplementedError("this stage sums selected entries")
        if self._gradient is not None:
            self._apply_decay()
            total = self.backend.accumulate(self._gradient, self._residual)
        else:
            self._substituted(())
            assert self._residual is not None
            total = self.backend.accumulate(self._residual, None)
        self._took_whole = True
        return total

    def topk_of_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[SparseVector]:
        """Select the top-k of each range, given as (begin, end, k), in order."""
        self._add_gradient()
        taken = [self._take_topk(self._range(begin, end), k) for begin, end, k in ranges]
        if self._substituted(taken):
            return self.topk_of_ranges(ranges)
        self.backend.wait_for(taken)
        first = len(self._removed) - len(taken)
        self._parts = [self._moved(taken[i], begin, first + i) for i, (begin, _, _) in enumerate(ranges)]
        return self._parts

    def topk_of_sums(self, begin: int, end: int, received: Sequence[SparseVector], k: int) -> SparseVector:
        """Add received entries to this rank's elements between two indices, and select the top-k of the sums.

        The remaining sums stay in this rank's residual when `commit` ends the call.
        """
        backend, residual = self.backend, self._residual
        self._add_gradient()
        addends = backend.sum_in_pairs([*received]) if received else None
        if residual is not None and residual.dtype.itemsize > 2:
            if addends is not None:
                before = backend.values_of(residual, addends.indices)
                self._overwritten = SparseVector.trusted(addends.indices, before, addends.size, addends.shape)
                backend.scatter_add(residual, addends)
            return self._moved(self._take_topk(self._range(begin, end), k), begin, -1)
        part = self._range(begin, end)
        dense = backend.as_tensor(backend.accumulate(part, None), (end - begin,))  # 16 bits would round the sums
        if addends is not None:
            backend.scatter_add(dense, *backend.split_at_indices(addends, [begin, end]))
        first = backend.take_topk(dense, k)
        if residual is not None:
            self._replacement = part, backend.memory_of(dense)
        return self._concatenate([first], [begin])

    def record_dropped(self, entries: SparseVector) -> None:
        """Record entries that this rank has dropped: rejected by a merge, or lost in rounding."""
        if self._residual is not None:
            self._dropped.append(entries)

    def commit(self, result: SparseVector, *, rejects: bool = True, backend: Backend | None = None) -> None:
        """Update the residual after a successful call. If it runs out of memory, call it again to continue.

        Only the indices of ``result`` are used. ``rejects``: as in `Algorithm`. If false, the result plus all dropped
        entries equals the sum of all ranks' selected entries, so no index needs to be looked up in the result.
        ``backend``: replaces the call's backend, which another call may use once this one has ended.
        """
        residual, backend = self._residual, backend or self.backend
        if residual is None:
            return
        if not self._committed:
            if self._took_whole:
                backend.cast_into(None, residual)  # zero
            elif self._replacement is not None:
                part, sums = self._replacement
                backend.cast_into(sums, part)
            self._committed = 1
        while self._committed <= len(self._dropped):
            entries = self._dropped[self._committed - 1]
            if rejects:
                backend.scatter_add_where(residual, entries, result, True)
            else:
                backend.scatter_add(residual, entries)
            self._committed += 1
        if rejects and self._committed == len(self._dropped) + 1 and (taken := self._taken(backend)) is not None:
            backend.scatter_add_where(residual, taken, result, False)
        self._committed = len(self._dropped) + 2

    def rollback(self, backend: Backend | None = None) -> None:
        """Set the residual to ``decay * residual + x``, as after a failed call. Ignored if `commit` has begun.

        ``backend``: as in `commit`. Then the residual must contain the gradient.
        """
        if self._residual is None or self._committed:
            return
        self._add_gradient()
        backend = backend or self.backend
        while self._removed:
            residual, entries = self._removed[-1]  # the residual is zero there, so adding restores it
            assert residual is not None
            backend.scatter_add(residual, entries)
            self._removed.pop()
        if self._overwritten is not None:
            backend.clear(self._residual, self._overwritten)
            backend.scatter_add(self._residual, self._overwritten)
            self._overwritten = None

    def _take(self, k: int) -> SparseVector:
        """Select the top-k, and add the gradient to the residual in the same pass."""
        gradient, residual = self._gradient, self._residual
        if gradient is None:
            assert residual is not None
            return self._take_topk(residual, k)
        self._apply_decay()
        entries = self.backend.topk(gradient, k, residual)
        self._holds = _SUM
        self._removed.append((residual, entries))
        return entries

    def _take_by_chunk(self, chunks: Chunks) -> SparseVector:
        """Select the top-k of every chunk. The same pass decays the residual and adds the gradient."""
        backend, k, length, residual = self.backend, chunks.k, chunks.length, self._residual
        if self._gradient is not None:
            entries = backend.topk_by_chunk(self._gradient, k, length, residual, self._decay)
            self._holds = _SUM
            self._removed.append((residual, entries))
            return entries
        assert residual is not None
        parts, offsets = [], chunks.offsets or (0, residual.size)
        for begin, end in pairwise(offsets):
            part = residual.part(begin, end)
            parts.append(backend.topk_by_chunk(part, k, length, None))
            backend.clear(part, parts[-1])
            self._removed.append((part, parts[-1]))
        return parts[0] if len(parts) == 1 else self._concatenate(parts, offsets[:-1])

    def _concatenate(self, parts: Sequence[SparseVector], begins: Sequence[int]) -> SparseVector:
        return concatenate_ranges(self.backend, parts, begins, self.size, self.shape)

    def _range(self, begin: int, end: int) -> Tensor:
        """Return a range of the residual, after gradients were added, or of the gradient if there is no residual."""
        dense = self._gradient if self._residual is None else self._residual
        assert dense is not None
        return dense.part(begin, end)

    def _take_topk(self, part: Tensor, k: int) -> SparseVector:
        """Select the top-k of a range, and remove it from the residual if there is one."""
        if self._residual is None:
            return self.backend.topk(part, k, None)
        entries = self.backend.take_topk(part, k)
        self._removed.append((part, entries))
        return entries

    def _moved(self, first: SparseVector, begin: int, number: int) -> SparseVector:
        """Return entries of a range with the indices of the gradient. ``number``: their position in `_removed`."""
        dtype = index_dtype(self.size)
        indices: Any = first.indices.astype(dtype, copy=False)
        entries, offset = SparseVector.trusted(indices, first.values, self.size, self.shape), dtype.type(begin)
        removed = self._residual, entries
        indices += offset  # in place, which needs no memory
        if self._residual is not None:
            self._removed[number] = removed
        return entries

    def _apply_decay(self) -> None:
        """Multiply the residual by the decay, once."""
        if self._holds == _BEFORE:
            if self._decay < 1 and self._residual is not None:
                self.backend.scale(self._residual, self._decay)
            self._holds = _DECAYED

    def _add_gradient(self) -> None:
        """Add the gradient to the residual, unless it was added already."""
        if self._holds != _SUM and self._gradient is not None and self._residual is not None:
            self._apply_decay()
            self.backend.add_into(self._gradient, self._residual)
            self._holds = _SUM
