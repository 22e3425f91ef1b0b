"""`SparseVector`: the nonzero entries of a long vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sparsecomm.checks import ARGUMENT_ERRORS, quote, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array as Array
from sparsecomm.tensors.arrays import ArrayDType, TensorLike

if TYPE_CHECKING:
    import torch

_new = object.__new__
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
INT64_SIZE = 2**31  # vectors with at least this many elements have int64 indices


def index_dtype(size: int) -> ArrayDType:
    """Return the index dtype for ``size`` elements: int32 up to 2^31 - 1 elements, int64 above."""
    return _INT32 if size < INT64_SIZE else _INT64


class SparseVector:
    """A vector of ``size`` elements with ``nnz`` entries; all other elements are zero.

    Attributes:
        indices: strictly increasing, int32 for ``size`` < 2^31 and int64 above, shape ``(nnz,)``.
        values: float32, or float64 for float64 gradients (the accumulator dtype), shape ``(nnz,)``.
        size: number of elements of the dense vector.
        shape: shape of the dense tensor; defaults to ``(size,)``.

    ``indices`` and ``values`` are NumPy arrays, or CuPy arrays for CUDA tensors. `to_torch` returns a sparse PyTorch
    tensor, and ``to_dense(torch.empty_like(x))`` a dense one. Other libraries import the arrays:
    ``jnp.from_dlpack(values)``.
    """

    __slots__ = ("indices", "shape", "size", "values")

    indices: Array
    values: Array
    size: int
    shape: tuple[int, ...]
    densify: ClassVar[Callable[[interop.Tensor, SparseVector], None]]  # set by sparsecomm.backends

    def __init__(self, indices: object, values: object, size: int, shape: tuple[int, ...] | None = None) -> None:
        """Make a vector from arrays, which are checked, and converted if necessary.

        Raises:
            InvalidInputError: lengths differ, indices are not strictly increasing or not in [0, size), values are not
                real numbers, or the size or shape is invalid.
        """
        interop.refuse_masked(indices, "indices")
        interop.refuse_masked(values, "values")
        try:
            index, value = np.asarray(indices), np.asarray(values)
            lengths = (size,) if shape is None else tuple(shape)
        except ARGUMENT_ERRORS as error:
            kinds = f"indices of type {type(indices).__name__}, values of type {type(values).__name__}"
            raise InvalidInputError(
                f"SparseVector: got {kinds} and shape={quote(shape)}; expected arrays, and a tuple of ints as shape "
                f"({type(error).__name__})"
            ) from error
        elements = to_int(size)
        extents = tuple(extent for length in lengths if (extent := to_int(length)) is not None)
        if elements is None or len(extents) < len(lengths) or math.prod(extents) != elements:
            raise InvalidInputError(
                f"SparseVector: got size={quote(size)} and shape={quote(shape)}; expected a size from 0 to 2^63 - 1, "
                "and a shape with that number of elements"
            )
        if index.ndim != 1 or index.shape != value.shape:
            seen = f"got {index.shape} indices and {value.shape} values"
            raise InvalidInputError(f"SparseVector: {seen}; expected two flat arrays of one length")
        if index.size and index.dtype.kind not in "iu":
            raise InvalidInputError(f"SparseVector: got indices of dtype {index.dtype}; expected integers")
        if value.dtype.kind not in "fiu" and value.dtype.name != "bfloat16":
            raise InvalidInputError(f"SparseVector: got values of dtype {value.dtype}; expected real numbers")
        if index.size and not (index[0] >= 0 and index[-1] < elements and bool(np.all(index[1:] > index[:-1]))):
            raise InvalidInputError(
                f"SparseVector: indices must increase strictly and lie in [0, {elements}); sort them and add up the "
                "values of equal indices"
            )
        self.indices = np.ascontiguousarray(index, index_dtype(elements))
        self.values = np.ascontiguousarray(value, np.float64 if value.dtype == np.float64 else np.float32)
        self.size, self.shape = elements, extents

    @classmethod
    def trusted(cls, indices: Array, values: Array, size: int, shape: tuple[int, ...]) -> SparseVector:
        """Make a vector from valid arrays of a kernel or a decoder, without checks or copies."""
        vector: SparseVector = _new(cls)
        vector.indices, vector.values = indices, values
        vector.size, vector.shape = size, shape
        return vector

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return len(self.values)

    @property
    def _accumulator(self) -> ArrayDType:
        return self._like.dtype

    @property
    def _like(self) -> Array:
        """An array of the values' library, dtype and device, available without finding the entries."""
        return self.values

    @property
    def device(self) -> interop.Device:
        """The device of the entries."""
        kind, index = self._like.__dlpack_device__()
        return interop.CPU if kind == 1 else interop.Device("cuda", index)

    @property
    def density(self) -> float:
        """``nnz / size``; 0 if ``size`` is 0."""
        return self.nnz / self.size if self.size else 0.0

    def part(self, begin: int, end: int) -> SparseVector:
        """Return the entries from position ``begin`` to ``end`` as a vector of the same size. Shares memory."""
        return SparseVector.trusted(self.indices[begin:end], self.values[begin:end], self.size, self.shape)

    def shard(self, index: int, count: int) -> SparseVector:
        """Return shard ``index`` of ``count`` equal shards of the entries. Shares memory."""
        return self if count == 1 else self.part(self.nnz * index // count, self.nnz * (index + 1) // count)

    def at(self, positions: Array) -> SparseVector:
        """Return the entries at ascending positions, or where a boolean mask is true."""
        return SparseVector.trusted(self.indices[positions], self.values[positions], self.size, self.shape)

    def to_dense(self, out: TensorLike | None = None) -> Any:
        """Return the dense tensor: ``out`` if given, else a new array of ``shape`` with the dtype of ``values``.

        Args:
            out: contiguous and writable, with ``size`` elements, on the device of the entries, of any of the four
                float dtypes; 16-bit dtypes are rounded to nearest even.

        Raises:
            InvalidInputError: ``out`` cannot be used; or an index is not in [0, size), because this vector's arrays
                were modified. On a CUDA device, such an entry is omitted instead.
        """
        if out is None:
            out = np.empty_like(self._like, shape=self.shape)  # dispatches to CuPy
        target = interop.tensor(out, "out", writable=True)
        if target.size != self.size:
            raise InvalidInputError(f"out: got {target.size} elements; expected {self.size}, the size of this vector")
        if (target.dtype.itemsize == 8) != (self._accumulator.itemsize == 8):
            expected = f"expected a dtype whose accumulator dtype is {self._accumulator}"
            raise InvalidInputError(f"out: got {target.dtype}; {expected}; allocate it with that dtype")
        SparseVector.densify(target, self)
        return out

    def to_torch(self) -> torch.Tensor:
        """Return a coalesced sparse COO tensor of PyTorch that shares the memory of ``values``."""
        import torch
        from torch.utils.dlpack import from_dlpack

        flat, values = from_dlpack(self.indices).long(), from_dlpack(self.values)
        indices = torch.stack(torch.unravel_index(flat, self.shape)) if self.shape else flat.new_empty((0, len(flat)))
        return torch.sparse_coo_tensor(indices, values, self.shape, is_coalesced=True, check_invariants=False)

    def __repr__(self) -> str:
        return f"SparseVector(size={self.size}, nnz={self.nnz}, values={self.values.dtype})"


class DenseSum(SparseVector):
    """A `SparseVector` stored as a dense array. The first access to its entries is slow, because it finds them."""

    __slots__ = ("_entries", "_find", "dense")

    def __init__(self, dense: Array, shape: tuple[int, ...], find: Callable[[Array], tuple[Array, Array]]) -> None:
        """Store a flat array; ``find`` returns the indices and values of its nonzero elements."""
        self.dense = dense
        self.size, self.shape = int(dense.shape[0]), shape
        self._find = find
        self._entries: tuple[Array, Array] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the dense array without ``find``, which belongs to this process."""
        return DenseSum, (self.dense, self.shape, _nonzeros)

    @property
    def _like(self) -> Array:
        return self.dense

    def _found(self) -> tuple[Array, Array]:
        if self._entries is None:
            self._entries = self._find(self.dense)
        return self._entries

    @property
    def indices(self) -> Array:  # type: ignore[override]
        return self._found()[0]

    @property
    def values(self) -> Array:  # type: ignore[override]
        return self._found()[1]


def _nonzeros(dense: Array) -> tuple[Array, Array]:
    """Return the indices and values of nonzero elements. All NaN get the same bits."""
    indices = dense.nonzero()[0].astype(index_dtype(len(dense)))
    values = dense[indices]
    values[values != values] = np.nan
    return indices, values
