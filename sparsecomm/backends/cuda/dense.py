"""Between sparse and dense, and dense sums: kernels/cuda/dense.cu."""

from __future__ import annotations

import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.backends.base import Backend
from sparsecomm.backends.cuda.context import Argument, CountedVector, Operand, ceil_div, dtype_of
from sparsecomm.backends.cuda.modules import dense_definitions
from sparsecomm.backends.cuda.runtime import read_word
from sparsecomm.backends.cuda.selection import Selection
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import INT64_SIZE, Array, DenseSum, SparseVector

__all__ = ["DenseArithmetic"]


class DenseArithmetic(Selection):
    """The methods of `sparsecomm.backends.base.Backend` on dense tensors and sums."""

    scale = default_float_mode(Backend.scale)

    def scatter_add(self, dense_tensor: Tensor, entries: SparseVector) -> None:
        self._scatter("scatter_add", dense_tensor, entries)

    def scatter_add_where(
        self, dense_tensor: Tensor, entries: SparseVector, others: SparseVector, present: bool
    ) -> None:
        among = Operand.of(others)
        self._scatter(
            "scatter_add_where",
            dense_tensor,
            entries,
            others=among.indices,
            other_host_count=among.host_count,
            other_device_count=among.device_count,
            present=present,
        )

    def _scatter(self, kernel: str, dense_tensor: Tensor, entries: SparseVector, **more: Argument) -> None:
        """Launch a kernel that adds entries to dense memory."""
        given = Operand.of(entries)
        definitions = dense_definitions(dense_tensor.dtype, int64_indices=entries.size >= INT64_SIZE)
        self._elementwise(kernel, given.max_count, definitions, dense=dense_tensor, **given.arguments(), **more)

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        if isinstance(entries, DenseSum):
            self.cast_into(entries.dense, out)
        elif out.size:
            launch = self.prepare(
                "dense.cu",
                "densify",
                dense_definitions(out.dtype, int64_indices=entries.size >= INT64_SIZE),
                ceil_div(out.size, self.tuning.densify_tile),
                self.tuning.dense_threads,
                out=out,
                n=out.size,
                aligned=out.pointer % 16 == 0,
                **Operand.of(entries).arguments(),
            )
            self.start(launch)

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        if isinstance(entries, DenseSum):
            given = Operand(entries.dense, entries.dense, entries.size, entries.size, None)
        else:
            given = Operand.of(entries)
        quotients = self.runtime.empty(given.max_count, given.values.dtype)
        self._elementwise(
            "divide",
            given.max_count,
            dense_definitions(dtype_of(quotients)),
            values=given.values,
            host_count=given.host_count,
            device_count=given.device_count,
            by=quotients.dtype.type(divisor),
            to=quotients,
        )
        if isinstance(entries, DenseSum):
            return self.nonzeros(quotients, entries.shape)
        if isinstance(entries, CountedVector):
            return entries.with_values(quotients)
        return SparseVector.trusted(given.indices, quotients, entries.size, entries.shape)

    def well_formed(self, entries: SparseVector) -> bool:
        faults, (indices, values, count) = self.zeros(1, np.uint32), (entries.indices, entries.values, entries.nnz)
        types = dense_definitions(dtype_of(values), int64_indices=entries.size >= INT64_SIZE)
        given: dict[str, Argument] = {"indices": indices, "values": values, "count": count, "n": entries.size}
        self._elementwise("well_formed", count, types, **given, faults=faults)
        return not read_word(self.runtime, faults)

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        total = self.runtime.empty(x.size, x.dtype.accumulator)
        definitions = dense_definitions(x.dtype, residual.dtype if residual else x.dtype)
        self._elementwise("widen", x.size, definitions, x=x, residual=residual, n=x.size, sum=total)
        return total

    def add(self, total: Array, addend: Array) -> None:
        n, definitions = len(total), dense_definitions(dtype_of(total))
        self._elementwise("add", n, definitions, sum=total, addend=addend, n=n)

    def cast_into(self, values: Array | None, out: Tensor) -> None:
        self._elementwise("narrow", out.size, dense_definitions(out.dtype), values=values, n=out.size, dense=out)

    def _elementwise(self, name: str, max_count: int, definitions: tuple[str, ...], **arguments: Argument) -> None:
        """Start a kernel of dense.cu with about a thread per entry or element."""
        if max_count:
            threads = self.tuning.dense_threads
            blocks = self.spread(max_count, threads)
            self.start(self.prepare("dense.cu", name, definitions, blocks, threads, **arguments))
