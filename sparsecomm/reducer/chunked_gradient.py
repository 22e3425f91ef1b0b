"""The contribution of a bucket of whose tensors every chunk is selected from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sparsecomm.backends import Backend
from sparsecomm.feedback import Chunks
from sparsecomm.reducer.bucket_gradient import Segment, SegmentedGradient
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ChunkedGradient"]


class ChunkedGradient(SegmentedGradient):
    """A contribution that takes the first k entries of every chunk of each tensor.

    Gradients that are still to be added are added in the pass that selects, and residuals decay in it. What is selected
    does not depend on the bucket in which a tensor is.
    """

    def __init__(
        self,
        backend: Backend,
        residual: Tensor,
        offsets: Sequence[int],
        segments: Sequence[Segment],
        chunks: Chunks,
        decay: float,
    ) -> None:
        """Prepare a contribution.

        Args:
            backend: of the call.
            residual: of the whole bucket.
            offsets: of its tensors in elements, and its size.
            segments: gradients that are still to be added: of all tensors, or none.
            chunks: how to select.
            decay: of the residual, if there are segments; otherwise it has decayed.
        """
        super().__init__(backend, residual, segments, decay)
        self._offsets, self._of_tensor = offsets, chunks

    def topk(self, k: int) -> SparseVector:
        if not self._segments:
            return super().topk(k)
        each, length = self._of_tensor.k, self._of_tensor.length
        for segment in self._segments:
            self.backend.topk_by_chunk(
                segment.gradient, each, length, segment.residual, self._segment_decay, self._reached
            )
        entries = self._joined(self._reached, self._offsets[:-1])
        self._taken.append(entries)
        return entries

    def _selected_of(self, dense: Tensor, k: int) -> SparseVector:
        tensors = [dense.part(begin, end) for begin, end in pairwise(self._offsets)]
        return self._joined([self._of_tensor.of(self.backend, tensor) for tensor in tensors], self._offsets[:-1])
