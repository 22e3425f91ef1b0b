"""The contribution of a bucket of whose tensors every chunk is selected from."""

from __future__ import annotations

from collections.abc import Sequence

from sparsecomm.backends import Backend
from sparsecomm.feedback import Chunks
from sparsecomm.reducer.bucket_gradient import Segment, SegmentedGradient
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ChunkedGradient"]


class ChunkedGradient(SegmentedGradient):
    """A contribution that takes the first k entries of every chunk of each tensor.

    Residuals decay and gradients are added in the pass that selects. What is selected does not depend on the bucket in
    which a tensor is.
    """

    def __init__(
        self, backend: Backend, residual: Tensor, segments: Sequence[Segment], chunks: Chunks, decay: float
    ) -> None:
        """Prepare a contribution: as `SegmentedGradient`."""
        super().__init__(backend, residual, segments, chunks, decay)
        self._each, self._length = chunks.k, chunks.length

    def topk(self, k: int) -> SparseVector:
        for s in self._segments:
            reached = self.backend.topk_by_chunk(s.gradient, self._each, self._length, s.residual, self._segment_decay)
            self._reached.append(reached)
        entries = self._together()
        self._taken.append(entries)
        return entries
