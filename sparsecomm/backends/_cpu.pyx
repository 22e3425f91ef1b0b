# distutils: language = c++
"""`CpuBackend`: the backend of host memory, which calls the C++ kernels in ``kernels/cpu``, most of them without the GIL."""

cimport cython
from libc.string cimport memset
from libcpp.vector cimport vector

from contextvars import copy_context
from functools import wraps

import numpy as np

from sparsecomm import config
from sparsecomm.backends.adamw import OVERFLOWS, AdamWStep
from sparsecomm.backends.base import Backend
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors._dlpack import address
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport.base import HOST

cimport numpy as cnp

from sparsecomm.backends.kernels cimport *
from sparsecomm.tensors._dlpack cimport Tensor

cnp.import_array()


cdef enum:
    MIN_POOLED = 1 << 16  # bytes from which new pages cost more than writing to reused ones


cdef inline cbool of_int64(size_t size) noexcept nogil:
    """Return whether indices of ``size`` elements are int64."""
    return size >= <size_t> 1 << 31


cdef inline int index_type(size_t size) noexcept:
    return cnp.NPY_INT64 if of_int64(size) else cnp.NPY_INT32


cdef inline int value_type(cbool float64_values) noexcept:
    return cnp.NPY_FLOAT64 if float64_values else cnp.NPY_FLOAT32


cdef inline cbool is_float64(Tensor x) noexcept:
    return x.code == <int> Type.f64


cdef inline size_t width(Tensor x) noexcept:
    """Return the bytes of an element in the accumulator dtype."""
    return 8 if is_float64(x) else 4


cdef inline Dense dense(Tensor x) noexcept:
    """Return a tensor as a kernel argument."""
    cdef Dense d
    d.data, d.type, d.size = <void*> x.pointer, <Type> x.code, <size_t> x.size
    return d


cdef inline Dense* dense_or_null(Tensor x, Dense* place) noexcept:
    """Return ``place``, where the kernel argument is stored; NULL for None."""
    if x is None:
        return NULL
    place[0] = dense(x)
    return place


cdef class Scratch:
    """Memory that the backends of one owner reuse from call to call."""

    cdef Memory memory

    def release(self, size_t keep):
        """Give unused memory back to the system, except for ``keep`` bytes."""
        self.memory.release(keep)


@cython.no_gc
cdef class Block:
    """The owner of an array's scratch memory, which is returned to ``scratch`` when the array is deleted."""

    cdef Scratch scratch
    cdef void* memory
    cdef size_t granted

    def __dealloc__(self):
        if self.memory:
            self.scratch.memory.give(self.memory, self.granted)


cdef cnp.ndarray empty(Scratch scratch, size_t count, int type_number):
    """Return a new, uninitialized array."""
    cdef cnp.npy_intp length = <cnp.npy_intp> count
    cdef size_t nbytes = count * <size_t> cnp.PyArray_DescrFromType(type_number).itemsize
    cdef Block block
    cdef cnp.ndarray array
    if nbytes < MIN_POOLED:
        return cnp.PyArray_EMPTY(1, &length, type_number, 0)
    block = Block()
    block.scratch = scratch
    block.memory = scratch.memory.take(nbytes, &block.granted)
    array = cnp.PyArray_SimpleNewFromData(1, &length, type_number, block.memory)
    cnp.set_array_base(array, block)
    return array


cdef inline cbool is_flat(cnp.ndarray array, size_t itemsize) noexcept:
    return cnp.PyArray_NDIM(array) == 1 and cnp.PyArray_ITEMSIZE(array) == itemsize and cnp.PyArray_IS_C_CONTIGUOUS(array)


cdef void* checked(cnp.ndarray array, size_t itemsize, str name, Py_ssize_t size=-1) except? NULL:
    """Return the address of an array, which must be flat and contiguous with ``size`` elements of ``itemsize`` bytes."""
    if not is_flat(array, itemsize) or size >= 0 and cnp.PyArray_DIM(array, 0) != size:
        raise ValueError(
            f"{name}: got {array.dtype} of shape {(<object> array).shape}; expected a flat contiguous array of "
            f"{f'{size} elements of ' if size >= 0 else ''}{itemsize} bytes each"
        )
    return cnp.PyArray_DATA(array)


cdef void* checked_residual(Tensor residual, Tensor x) except? NULL:
    """Return the address of a residual, which must have the size and the accumulator dtype of ``x``."""
    if residual.size != x.size or residual.code != <int> (Type.f64 if is_float64(x) else Type.f32):
        raise ValueError(f"residual: got {residual.size} elements of {residual.dtype}; expected {x.size} of the accumulator dtype")
    return <void*> residual.pointer


cdef class Entries:
    """The arrays of a sparse vector, kept alive, and checked because users may have replaced them."""

    cdef cnp.ndarray indices, values
    cdef Sparse data
    cdef size_t size
    cdef cbool int64_indices, float64_values

    def __cinit__(self, entries):
        self.indices, self.values, self.size = entries.indices, entries.values, entries.size
        self.int64_indices, self.float64_values = of_int64(self.size), cnp.PyArray_ITEMSIZE(self.values) == 8
        self.data.indices, self.data.values = cnp.PyArray_DATA(self.indices), cnp.PyArray_DATA(self.values)
        self.data.count = <size_t> cnp.PyArray_SIZE(self.values)
        if not (is_flat(self.indices, 8 if self.int64_indices else 4) and is_flat(self.values, 8 if self.float64_values else 4)
                and cnp.PyArray_DIM(self.indices, 0) == cnp.PyArray_DIM(self.values, 0)):
            raise self.changed(self.float64_values)

    cdef object changed(self, cbool float64_values):
        return InvalidInputError(
            f"SparseVector: its arrays were changed to {self.indices.dtype} of shape {(<object> self.indices).shape} and "
            f"{self.values.dtype} of shape {(<object> self.values).shape}; expected flat contiguous arrays of equal length "
            f"with int{64 if self.int64_indices else 32} and float{64 if float64_values else 32}; make a new vector instead"
        )

    cdef int expect(self, cbool float64_values) except -1:
        if self.float64_values != float64_values:
            raise self.changed(float64_values)
        return 0

    cdef const void* other_indices(self, others, size_t* count) except? NULL:
        """Return the indices of a vector of the same size, and their number."""
        cdef cnp.ndarray indices = others.indices
        count[0] = <size_t> cnp.PyArray_SIZE(indices)
        return checked(indices, 8 if self.int64_indices else 4, "indices of others")

    cdef Room room(self, Scratch scratch, size_t count, shape):
        return room(scratch, count, self.size, shape, self.float64_values)


cdef inline Entries checked_entries(entries, cbool float64_values):
    """Return the arrays of a vector whose values must be float64 (``float64_values``) or float32."""
    cdef Entries found = Entries.__new__(Entries, entries)
    found.expect(float64_values)
    return found


cdef class Targets:
    """The entries of an update of weights, or a value for each of them."""

    cdef Entries entries
    cdef Sparse data
    cdef cbool int64_indices

    def __cinit__(self, entries, Tensor weights):
        if isinstance(entries, DenseSum):
            self.data.indices, self.data.count = NULL, <size_t> weights.size
            self.data.values = checked(entries.dense, width(weights), "entries", weights.size)
            return
        self.entries = checked_entries(entries, is_float64(weights))
        self.data, self.int64_indices = self.entries.data, self.entries.int64_indices
        if self.entries.size != <size_t> weights.size:
            raise ValueError(f"got entries of {self.entries.size} elements; expected {weights.size} elements")


cdef Moments moments_of(moments, Tensor weights):
    """Return moments of ``weights`` as a kernel argument."""
    cdef size_t itemsize = width(weights)
    cdef Moments state
    state.mean = checked(moments.mean, itemsize, "mean", weights.size)
    state.squares = checked(moments.squares, itemsize, "squares", weights.size)
    state.last = <int*> checked(moments.last, 4, "last", weights.size)
    state.compensation = NULL
    if moments.compensation is not None:
        state.compensation = checked(moments.compensation, itemsize, "compensation", weights.size)
    return state


cdef AdamWResults results_of(list arrays, cnp.ndarray jumps):
    """Return the arrays of a step of AdamW as a kernel argument."""
    cdef AdamWResults results
    results.weights, results.mean = cnp.PyArray_DATA(arrays[0]), cnp.PyArray_DATA(arrays[1])
    results.squares = cnp.PyArray_DATA(arrays[2])
    results.changes = NULL if arrays[3] is None else cnp.PyArray_DATA(arrays[3])
    results.jumps = <signed char*> cnp.PyArray_DATA(jumps)
    return results


cdef class Room:
    """New arrays for up to ``count`` entries of a vector of ``size`` elements, which a kernel fills."""

    cdef cnp.ndarray indices, values
    cdef SparseOut out
    cdef size_t size, count
    cdef object shape

    cdef object vector(self, size_t found, cbool copy=False):
        """Return the first ``found`` entries. ``copy``: if not all room is used, copy them to free it."""
        if found < self.count:
            self.indices, self.values = self.indices[:found], self.values[:found]
            if copy:
                try:
                    self.indices, self.values = self.indices.copy(), self.values.copy()
                except MemoryError:
                    pass  # use views
        return trusted(self.indices, self.values, self.size, self.shape)


cdef Room room(Scratch scratch, size_t count, size_t size, shape, cbool float64_values):
    cdef Room r = Room.__new__(Room)
    r.indices = empty(scratch, count, index_type(size))
    r.values = empty(scratch, count, value_type(float64_values))
    r.out.indices, r.out.values = cnp.PyArray_DATA(r.indices), cnp.PyArray_DATA(r.values)
    r.count, r.size, r.shape = count, size, shape
    return r


cdef inline Room room_in(Tensor x, size_t count, Scratch scratch):
    """Return room for entries of x."""
    return room(scratch, count, x.size, x.shape, is_float64(x))


cdef object new = object.__new__


cdef object trusted(indices, values, size_t size, shape):
    made = new(SparseVector)
    made.indices, made.values, made.size, made.shape = indices, values, size, shape
    return made


cdef Kind checked_kind(kind, cbool float64_values) except *:
    if float64_values and kind.code != <int> Kind.exact:
        raise ValueError("float64 values cannot be rounded; expected the kind exact")
    return <Kind> <int> kind.code


# Set NumPy's errstate so that it ignores errors, and reset it. NumPy 2 keeps it in a context variable.
cdef object IGNORE = None, set_errstate, reset_errstate
with np.errstate(all="ignore"):
    found = [item for item in copy_context().items() if item[0].name == "numpy.ufunc.extobj"]
if found:
    variable, IGNORE = found[0]
    set_errstate, reset_errstate = variable.set, variable.reset
else:  # NumPy 1
    set_errstate, reset_errstate = lambda _: np.seterr(all="ignore"), lambda former: np.seterr(**former)


def float_mode_only(function):
    """As `default_float_mode`, but NumPy warns or raises as the program has set it: for functions that call user code."""
    @wraps(function)
    def in_default_mode(*args, **kwargs):
        return call_in_default_mode(function, args, kwargs)
    return in_default_mode


def default_float_mode(function):
    """Decorate a function to run in the default float mode: round to nearest even, with denormals. NumPy never raises.

    NumPy computes in the mode of the calling thread, and warns or raises as `numpy.seterr` says. Programs change both.
    """
    @wraps(function)
    def in_default_mode(*args, **kwargs):
        former = set_errstate(IGNORE)
        try:
            return call_in_default_mode(function, args, kwargs)
        finally:
            reset_errstate(former)
    return in_default_mode


class AtOnce:
    """The context and `sparsecomm.backends.base.Timeline` of a backend whose methods return when their work is done."""

    def on_stream(self, x):
        return self

    def join(self, former, x):
        pass

    def wait(self):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


AT_ONCE = AtOnce()


class CpuBackend(Backend):
    """A `sparsecomm.backends.base.Backend` for host memory, with ``threads`` threads and memory from ``scratch``."""

    def __init__(self, threads=None, scratch=None):
        self.threads = config.threads() if threads is None else threads
        self.scratch = Scratch() if scratch is None else scratch
        if (asked := config.simd()) is not None and asked != simd() and not use_simd(asked):
            raise InvalidInputError(f"SPARSECOMM_SIMD={asked}: this processor does not support it; unset it, or set portable")

    def on_stream(self, x):
        return AT_ONCE

    def side_stream(self, *, wait=True):
        return AT_ONCE

    def timeline(self):
        return AT_ONCE

    def memory(self, direct):
        return HOST

    def memory_of(self, tensor):
        return interop.as_numpy(tensor)

    def as_tensor(self, array, shape, dtype=None):
        if dtype is not None:
            return Tensor(address(array), len(array), shape, dtype, interop.CPU, False, array)
        return interop.tensor(array.reshape(shape), "array", writable=True)

    def zeros(self, count, dtype):
        return np.zeros(count, dtype)

    def empty(self, count, like):
        return empty(self.scratch, count, like.dtype.num)

    # -- selection ----------------------------------------------------------------------------------------------------

    def topk(self, Tensor x not None, size_t k, Tensor residual):
        cdef Scratch scratch = self.scratch
        cdef Dense data = dense(x), r
        cdef Room entries = room_in(x, min(k, data.size), scratch)
        found = c_topk(
            data, dense_or_null(residual, &r), k, of_int64(data.size), entries.out.indices, entries.out.values, self.threads, scratch.memory
        )
        return entries.vector(found, True)

    def take_topk(self, Tensor x not None, size_t k):
        cdef Scratch scratch = self.scratch
        cdef Dense data = dense(x)
        cdef Room entries = room_in(x, min(k, data.size), scratch)
        found = c_take_topk(data, k, of_int64(data.size), entries.out.indices, entries.out.values, self.threads, scratch.memory)
        return entries.vector(found, True)

    def topk_by_chunk(self, Tensor x not None, size_t k, size_t chunk, Tensor residual, double decay=1.0):
        cdef Scratch scratch = self.scratch
        cdef Dense data = dense(x), r
        chunk = min(chunk, max(data.size, k))
        if min(chunk, data.size) > (<size_t> 1 << 31):
            raise InvalidInputError(
                f"chunk={chunk} of {data.size} elements: must be at most 2^31 on a CPU; select without chunks instead"
            )
        cdef Room entries = room_in(x, chunk_room(data.size, k, chunk), scratch)
        found = c_topk_by_chunk(
            data, dense_or_null(residual, &r), k, chunk, decay, of_int64(data.size), entries.out.indices, entries.out.values,
            self.threads, scratch.memory,
        )
        return entries.vector(found, True)

    def threshold(self, Tensor x not None, double tau, Tensor residual):
        cdef Scratch scratch = self.scratch
        cdef Dense r
        cdef size_t found = 0
        cdef Collected* collected = threshold_collect(dense(x), dense_or_null(residual, &r), tau, self.threads, &found, scratch.memory)
        cdef Room entries
        try:
            entries = room_in(x, found, scratch)
        except BaseException:
            threshold_free(collected)
            raise
        threshold_write(collected, of_int64(x.size), entries.out.indices, entries.out.values)
        return entries.vector(found)

    # -- dense tensors ------------------------------------------------------------------------------------------------

    def add_into(self, Tensor x not None, Tensor residual not None):
        if residual.dtype.itemsize == 2:
            return self.cast_into(self.accumulate(x, residual), residual)
        cdef Dense r = dense(residual)
        c_widen(dense(x), &r, r.data, self.threads)

    scale = default_float_mode(Backend.scale)

    # -- buckets ------------------------------------------------------------------------------------------------------

    def add_first(self, addends, residual, velocity, double decay, double momentum, cbool if_finite):
        begin, x, scale, exponents, minuend = addends[0]
        total, value = residual[begin : begin + x.size], None
        dtype = interop.FLOAT64 if total.itemsize == 8 else interop.FLOAT32
        cdef Tensor r = Tensor(address(total), x.size, x.shape, dtype, interop.CPU, False, total)
        if exponents is not None:
            return 1, [] if self._add_quotient(x, exponents, scale, r, if_finite) else [0]
        if velocity is None and minuend is not None:
            return 1, [] if self._add_difference(minuend, x, r, decay, if_finite) else [0]
        if velocity is not None or scale != 1:
            value = self.accumulate(x, None)
            if minuend is not None:
                np.subtract(minuend, value, out=value)
            elif scale != 1:
                value *= scale
        if if_finite and not self.finite(x if value is None else self.as_tensor(value, x.shape)):
            return 1, [0]
        if decay < 1:
            total *= decay
        if value is None:
            self.add_into(x, r)
        elif velocity is None:
            total += value
        else:
            moving = velocity[begin : begin + x.size]
            moving *= momentum
            moving += value
            total += moving
        return 1, []

    def flat(self, size, dtype, addends, cbool if_finite):
        """Write each value in one pass, and zeros only where no addend lies."""
        array, left_out = np.empty(size, dtype), []
        if sum(addend.x.size for addend in addends) < size:
            array[:] = 0
        for i, (begin, x, scale, _, minuend) in enumerate(addends):
            part = array[begin : begin + x.size]
            value = self.memory_of(x) if x.dtype.itemsize > 2 else self.accumulate(x, None)
            if minuend is not None:
                np.subtract(minuend, value, out=part)
            elif scale != 1:
                np.multiply(value, part.dtype.type(scale), out=part)
            else:
                part[:] = value
            if if_finite and not self.finite(self.as_tensor(part, x.shape)):
                part[:] = 0
                left_out.append(i)
        return array, [(range(len(addends)), left_out)]

    def _add_difference(self, cnp.ndarray minuend not None, Tensor x not None, Tensor residual not None, double decay, cbool if_finite):
        cdef void* source = checked(minuend, width(x), "minuend", x.size)
        return bool(c_add_difference(source, dense(x), decay, if_finite, checked_residual(residual, x), self.threads))

    def _add_quotient(self, Tensor x not None, cnp.ndarray exponents not None, double scale, Tensor residual not None, cbool if_finite):
        cdef void* units = checked(exponents, width(x) // 4, "exponents", x.size)
        return bool(c_add_quotient(dense(x), units, scale, if_finite, checked_residual(residual, x), self.threads))

    # -- AdamW --------------------------------------------------------------------------------------------------------

    def adamw(self, parts, exponents, sums, double margin, cbool keep_changes):
        of_parts = self._parts_of([(part.begin, part.weights) for part in parts], sums)
        made = [self._adamw(part, exponents, entries, True, margin) for part, entries in zip(parts, of_parts)]
        changes = np.concatenate([results[3] for _, results, _, _ in made])
        jumps = np.concatenate([jumps for _, _, jumps, _ in made])
        if not keep_changes:
            made = [(entries, [*results[:3], None], jumps, found) for entries, results, jumps, found in made]
        return self._step(changes, jumps, made)

    def adamw_dense(self, parts, exponents, cnp.ndarray sums not None, size_t begin):
        segments = [sums[part.begin - begin : part.begin - begin + part.weights.size] for part in parts]
        made = [
            self._adamw(part, exponents, self.nonzeros(segment, segment.shape), False, 0)
            for part, segment in zip(parts, segments)
        ]
        step = self._step(sums[:0], sums[:0], made)
        for part, segment, (_, results, jumps, found) in zip(parts, segments, made):
            rounded = self.nonzeros(results[0], segment.shape)
            if part.weights.dtype.itemsize == 2:
                rounded = self.rounded(rounded, part.weights.dtype)
            segment[:] = rounded.dense
            if found:
                segment[jumps == OVERFLOWS] = np.nan
        return step

    def _step(self, changes, jumps, made):
        overflows = any(found for _, _, _, found in made)
        values = [entries.dense if isinstance(entries, DenseSum) else entries.values for entries, _, _, _ in made]
        finite = not overflows or all(self.finite(self.as_tensor(each, each.shape)) for each in values)
        return AdamWStep(changes, jumps, overflows, finite, made)

    def _adamw(self, part, cnp.ndarray exponents not None, entries, cbool with_changes, double margin):
        """Return the entries, new weights, means, squares and changes, jumps of exponents, and the number of overflows."""
        cdef Tensor weights = part.weights
        cdef cnp.ndarray table = part.table
        cdef size_t itemsize = width(weights), count = cnp.PyArray_SIZE(table) // 6
        cdef Targets targets = Targets(entries, weights)
        cdef cnp.ndarray of_part = exponents[part.begin : part.begin + weights.size]
        cdef void* units = checked(of_part, itemsize // 4, "exponents", weights.size)
        cdef cnp.ndarray rows = table.reshape(-1)
        cdef const void* coefficients = checked(rows, itemsize, "table")
        if 6 * count != <size_t> cnp.PyArray_SIZE(rows) or not count:
            raise ValueError(f"got a table of {cnp.PyArray_SIZE(rows)} numbers; expected rows of 6 numbers")
        cdef int real = value_type(is_float64(weights))
        made = [empty(self.scratch, targets.data.count, real) for _ in range(3 + with_changes)]
        made += [None] * (4 - len(made))
        jumps = empty(self.scratch, targets.data.count, cnp.NPY_INT8)
        found = c_adamw(
            dense(weights), moments_of(part.moments, weights), units, targets.data, targets.int64_indices, coefficients, count,
            part.unit_eps, part.eps, weights.dtype.rounds_to_infinity, margin, part.step, results_of(made, jumps), self.threads,
        )
        return entries, made, jumps, found

    def store_adamw(self, parts, exponents, made, cbool write):
        for part, results in zip(parts, made.results):
            self._store_adamw(part, exponents, *results[:3], write)

    def _store_adamw(self, part, cnp.ndarray exponents, entries, list results, cnp.ndarray jumps, cbool write):
        cdef Tensor weights = part.weights
        cdef Targets targets = Targets(entries, weights)
        cdef cnp.ndarray of_part
        cdef void* units = NULL
        if exponents is not None:
            of_part = exponents[part.begin : part.begin + weights.size]
            units = checked(of_part, width(weights) // 4, "exponents", weights.size)
        else:
            results = [*results[:3], None]
        for array in results[: 3 + (units != NULL)]:
            checked(array, width(weights), "result", targets.data.count)
        checked(jumps, 1, "result", targets.data.count)
        c_store_adamw(
            dense(weights), moments_of(part.moments, weights), units, targets.data, targets.int64_indices,
            results_of(results, jumps), part.step, write, self.threads,
        )

    def change_units(self, Tensor residual not None, cnp.ndarray exponents not None, changes):
        cdef Targets targets = Targets(changes, residual)
        cdef void* units = checked(exponents, residual.dtype.itemsize // 4, "exponents", residual.size)
        c_change_units(dense(residual), units, targets.data, targets.int64_indices)

    def largest(self, Tensor x not None):
        return c_largest(dense(x), self.threads)

    def cast_into(self, values, Tensor out not None):
        cdef Dense to = dense(out)
        cdef cnp.ndarray array
        if values is None:
            with nogil:
                memset(to.data, 0, to.size * (8 if to.type == Type.f64 else 4 if to.type == Type.f32 else 2))
            return
        array = np.ascontiguousarray(values)
        c_narrow(checked(array, width(out), "values", out.size), to, self.threads)

    def scatter_add(self, Tensor dense_tensor not None, entries):
        cdef Entries added = checked_entries(entries, is_float64(dense_tensor))
        c_scatter_add(dense(dense_tensor), added.data, added.int64_indices)

    def scatter_add_where(self, Tensor dense_tensor not None, entries, others, cbool present):
        cdef Entries added = checked_entries(entries, is_float64(dense_tensor))
        cdef size_t count
        cdef const void* among = added.other_indices(others, &count)
        c_scatter_add_where(dense(dense_tensor), added.data, among, count, added.int64_indices, present)

    def densify(self, Tensor out not None, entries):
        if isinstance(entries, DenseSum):
            return self.cast_into(entries.dense, out)
        cdef Entries added = checked_entries(entries, is_float64(out))
        if not c_densify(dense(out), added.data, added.int64_indices, self.threads):
            raise InvalidInputError(
                f"SparseVector: an index is not in [0, {out.size}), because its array was modified; make a new vector instead"
            )

    def accumulate(self, Tensor x not None, Tensor residual):
        cdef Dense r
        cdef cnp.ndarray total = empty(self.scratch, x.size, value_type(is_float64(x)))
        c_widen(dense(x), dense_or_null(residual, &r), cnp.PyArray_DATA(total), self.threads)
        return total

    mixed = default_float_mode(Backend.mixed)

    def mix_into(self, Tensor x not None, cnp.ndarray values not None, double weight):
        c_mix(dense(x), weight, checked(values, width(x), "values", x.size), self.threads)

    def add(self, cnp.ndarray total not None, cnp.ndarray addend not None):
        cdef size_t itemsize = 8 if cnp.PyArray_ITEMSIZE(total) == 8 else 4
        cdef void* to = checked(total, itemsize, "total")
        cdef Py_ssize_t size = cnp.PyArray_DIM(total, 0)
        c_add(to, checked(addend, itemsize, "addend", size), size, itemsize == 8, self.threads)

    def nonzeros(self, dense_sum, shape):
        def find(values):
            entries = self.threshold(self.as_tensor(values, values.shape), 0.0, None)
            return entries.indices, entries.values

        return DenseSum(dense_sum, shape, find)

    # -- sparse vectors -----------------------------------------------------------------------------------------------

    def merge(self, a, b):
        cdef Entries left = Entries.__new__(Entries, a)
        cdef Entries right = checked_entries(b, left.float64_values)
        cdef Room total = left.room(self.scratch, left.data.count + right.data.count, a.shape)
        c_merge(left.data, right.data, left.int64_indices, left.float64_values, &total.out)
        return total.vector(total.out.count)

    def sum_and_count(self, vectors):
        cdef list arrays = [Entries.__new__(Entries, vector) for vector in vectors]
        cdef Entries first = arrays[0], each
        cdef vector[Sparse] given
        cdef size_t number = 0
        for each in arrays:
            each.expect(first.float64_values)
            given.push_back(each.data)
            number += each.data.count
        cdef Scratch scratch = self.scratch
        cdef Room sums = first.room(scratch, number, vectors[0].shape)
        cdef cnp.ndarray counts = empty(scratch, number, value_type(first.float64_values))
        c_sum_and_count(
            given.data(), given.size(), first.int64_indices, first.float64_values, &sums.out, cnp.PyArray_DATA(counts), scratch.memory
        )
        found = sums.vector(sums.out.count)
        return found, trusted(found.indices, counts[: sums.out.count], first.size, found.shape)

    def means(self, entries, cnp.ndarray counts not None):
        cdef Entries sums = Entries.__new__(Entries, entries)
        cdef void* by = checked(counts, 8 if sums.float64_values else 4, "counts", <Py_ssize_t> sums.data.count)
        cdef Room quotients = sums.room(self.scratch, sums.data.count, entries.shape)
        c_divide_by(sums.data, by, sums.int64_indices, sums.float64_values, &quotients.out)
        return quotients.vector(quotients.out.count)

    def merge_topk(self, a, b, size_t k):
        cdef Entries left = Entries.__new__(Entries, a)
        cdef Entries right = checked_entries(b, left.float64_values)
        cdef size_t both = left.data.count + right.data.count
        cdef Scratch scratch = self.scratch
        cdef Room kept = left.room(scratch, min(k, both), a.shape), rejected = left.room(scratch, both - k if both > k else 0, a.shape)
        c_merge_topk(
            left.data, right.data, k, left.int64_indices, left.float64_values, &kept.out, &rejected.out, scratch.memory
        )
        return kept.vector(kept.out.count), rejected.vector(rejected.out.count)

    def values_at(self, entries, others):
        cdef Entries given = Entries.__new__(Entries, entries)
        cdef size_t count
        cdef const void* among = given.other_indices(others, &count)
        cdef cnp.ndarray found = empty(self.scratch, count, value_type(given.float64_values))
        c_values_at(given.data, among, count, given.int64_indices, given.float64_values, cnp.PyArray_DATA(found))
        return found

    def concatenate_entries(self, list vectors not None):
        first = vectors[0]
        if len(vectors) == 1:
            return first
        cdef size_t count = sum([len(v.values) for v in vectors])
        indices = empty(self.scratch, count, cnp.NPY_INT64 if first.indices.dtype == np.int64 else cnp.NPY_INT32)
        values = empty(self.scratch, count, value_type(first.values.dtype == np.float64))
        np.concatenate([v.indices for v in vectors], out=indices)
        return trusted(indices, np.concatenate([v.values for v in vectors], out=values), first.size, first.shape)

    def divide(self, entries, divisor):
        if isinstance(entries, DenseSum):
            return self.nonzeros(entries.dense / divisor, entries.shape)
        values = entries.values
        quotients = empty(self.scratch, len(values), value_type(values.dtype == np.float64))
        return trusted(entries.indices, np.divide(values, divisor, out=quotients), entries.size, entries.shape)

    def well_formed(self, entries, size_t begin=0, end=None):
        cdef Entries given = Entries.__new__(Entries, entries)
        return bool(c_well_formed(given.data, begin, given.size if end is None else end, given.int64_indices, given.float64_values))

    # -- packed entries -----------------------------------------------------------------------------------------------

    def pack(self, entries, kind):
        cdef Entries given = Entries.__new__(Entries, entries)
        cdef Kind sent = checked_kind(kind, given.float64_values)
        cdef size_t nbytes = packed_bytes(given.data, sent, given.int64_indices, given.float64_values)
        cdef cnp.ndarray packed = empty(self.scratch, nbytes, cnp.NPY_UINT8)
        c_pack(given.data, sent, given.int64_indices, given.float64_values, cnp.PyArray_DATA(packed))
        return packed

    def unpack(self, cnp.ndarray data not None, head, size_t count, size_t n, kind, cbool float64_values):
        cdef Kind sent = checked_kind(kind, float64_values)
        cdef const void* source = checked(data, 1, "data")
        cdef size_t nbytes = <size_t> cnp.PyArray_DIM(data, 0)
        cdef const char* wrong = check_packed(source, nbytes, count, n, sent, float64_values)
        cdef Room entries
        if not wrong:
            entries = room(self.scratch, count, n, None, float64_values)
            wrong = c_unpack(source, nbytes, count, n, sent, of_int64(n), float64_values, entries.out.indices, entries.out.values)
        if wrong:
            raise ValueError(wrong.decode())
        return entries.indices, entries.values

    def quantize_values(self, cnp.ndarray values not None, kind):
        cdef Kind sent = checked_kind(kind, False)
        if sent == Kind.exact:
            raise ValueError("the kind exact does not round values")
        cdef const float* source = <const float*> checked(values, 4, "values")
        cdef size_t count = <size_t> cnp.PyArray_DIM(values, 0)
        cdef cnp.ndarray rounded = empty(self.scratch, count, cnp.NPY_FLOAT32), errors = empty(self.scratch, count, cnp.NPY_FLOAT32)
        zeros = c_quantize_values(source, count, sent, <float*> cnp.PyArray_DATA(rounded), <float*> cnp.PyArray_DATA(errors))
        return rounded, errors, zeros


def simd():
    """Return the instruction set that kernels use: "avx512", "avx2" or "portable"."""
    return c_simd_name().decode()


def use_simd(str name):
    """Use another instruction set from now on. Return False if the processor does not support it."""
    return bool(c_use_simd(name.encode()))
