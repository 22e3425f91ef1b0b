"""Between sparse and dense, and dense sums: kernels/cuda/dense.cu."""

from __future__ import annotations

import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.backends.base import Backend
from sparsecomm.backends.cuda.context import Arguments, CountedVector, Operand, ceil_div, dtype_of
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
        self._scatter("scatter_add", dense_tensor, entries, {})

    def scatter_add_where(
        self, dense_tensor: Tensor, entries: SparseVector, others: SparseVector, present: bool
    ) -> None:
        among = Operand.of(others)
        more: Arguments = {"others": among.indices, "other_host_count": among.host_count}
        more |= {"other_device_count": among.device_count, "present": present}
        self._scatter("scatter_add_where", dense_tensor, entries, more)

    def _scatter(self, kernel: str, dense: Tensor, entries: SparseVector, more: Arguments) -> None:
        """Launch a kernel that adds entries to dense memory."""
        given, types = Operand.of(entries), dense_definitions(dense.dtype, int64_indices=entries.size >= INT64_SIZE)
        self._elementwise(kernel, given.max_count, types, {"dense": dense, **given.arguments(), **more})

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        if isinstance(entries, DenseSum):
            self.cast_into(entries.dense, out)
        elif out.size:
            types = dense_definitions(out.dtype, int64_indices=entries.size >= INT64_SIZE)
            given: Arguments = {"out": out, "n": out.size, "aligned": out.pointer % 16 == 0}
            given |= Operand.of(entries).arguments()
            tiles = ceil_div(out.size, self.tuning.densify_tile)
            self.start(self.prepare("dense.cu", "densify", types, tiles, self.tuning.dense_threads, given))

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        if isinstance(entries, DenseSum):
            given = Operand(entries.dense, entries.dense, entries.size, entries.size, None)
        else:
            given = Operand.of(entries)
        quotients = self.runtime.empty(given.max_count, given.values.dtype)
        arguments: Arguments = given.arguments() | {"by": quotients.dtype.type(divisor), "counts": None}
        arguments["to"] = quotients
        del arguments["indices"]
        self._elementwise("divide", given.max_count, dense_definitions(dtype_of(quotients)), arguments)
        if isinstance(entries, DenseSum):
            return self.nonzeros(quotients, entries.shape)
        if isinstance(entries, CountedVector):
            return entries.with_values(quotients)
        return SparseVector.trusted(given.indices, quotients, entries.size, entries.shape)

    def means(self, entries: SparseVector, counts: Array) -> SparseVector:
        quotients, count = self.runtime.empty(entries.nnz, entries.values.dtype), entries.nnz
        given: Arguments = {"values": entries.values, "host_count": count, "device_count": None}
        given |= {"by": quotients.dtype.type(1), "counts": counts, "to": quotients}
        self._elementwise("divide", count, dense_definitions(dtype_of(quotients)), given)
        return self.with_values(entries, quotients)

    def not_zero(self, values: Array) -> Array:
        """See `Backend`. CuPy's own comparison takes subnormal floats for zero."""
        mask: Array = values.view(f"u{values.itemsize}") << 1 != 0
        return mask

    def well_formed(self, entries: SparseVector, begin: int = 0, end: int | None = None) -> bool:
        end = entries.size if end is None else end
        faults, (indices, values, count) = self.zeros(1, np.uint32), (entries.indices, entries.values, entries.nnz)
        types = dense_definitions(dtype_of(values), int64_indices=entries.size >= INT64_SIZE)
        given: Arguments = {"indices": indices, "values": values, "count": count, "begin": begin, "end": end}
        given["faults"] = faults
        self._elementwise("well_formed", count, types, given)
        return not read_word(self.runtime, faults)

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        total = self.runtime.empty(x.size, x.dtype.accumulator)
        types = dense_definitions(x.dtype, residual.dtype if residual else x.dtype)
        self._elementwise("widen", x.size, types, {"x": x, "residual": residual, "n": x.size, "sum": total})
        return total

    def add(self, total: Array, addend: Array) -> None:
        n = len(total)
        self._elementwise("add", n, dense_definitions(dtype_of(total)), {"sum": total, "addend": addend, "n": n})

    def cast_into(self, values: Array | None, out: Tensor) -> None:
        given: Arguments = {"values": values, "n": out.size, "dense": out}
        self._elementwise("narrow", out.size, dense_definitions(out.dtype), given)

    def _elementwise(self, name: str, max_count: int, types: tuple[str, ...], arguments: Arguments) -> None:
        """Start a kernel of dense.cu with about a thread per entry or element."""
        if max_count:
            threads = self.tuning.dense_threads
            self.start(self.prepare("dense.cu", name, types, self.spread(max_count, threads), threads, arguments))
