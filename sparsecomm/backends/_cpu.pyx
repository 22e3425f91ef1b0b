# distutils: language = c++
"""Bindings of kernels/cpu. Pointers come as integers; the GIL is released while a kernel works.

Every kernel that computes is called in the default mode of the processor's arithmetic: see float_mode.hpp.

What changes memory in place takes ``done``, a list or None, and appends to it in the same step: see
`sparsecomm.backends.base.Backend`.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool

from functools import wraps

import numpy as np

from sparsecomm.errors import InvalidInputError

cimport numpy as cnp

cnp.import_array()


cdef extern from "kernels.hpp" namespace "sparsecomm" nogil:
    cdef enum class Type(int):
        f16
        bf16
        f32
        f64

    cdef cppclass Dense:
        void* data
        Type type
        size_t size

    cdef cppclass Sparse:
        const void* indices
        const void* values
        size_t count

    cdef cppclass SparseOut:
        void* indices
        void* values
        size_t count

    cdef cppclass Collected:
        pass

    cdef enum class Kind(int):
        exact

    cdef const int KINDS

    size_t c_topk "sparsecomm::in_default_mode<sparsecomm::topk>"(Dense, Dense*, size_t, cbool, void*, void*, int) except +
    size_t c_topk_by_chunk "sparsecomm::in_default_mode<sparsecomm::topk_by_chunk>"(Dense, Dense*, size_t, size_t, double, cbool, void*, void*, int) except +
    size_t chunk_room(size_t, size_t, size_t)
    Collected* threshold_collect "sparsecomm::in_default_mode<sparsecomm::threshold_collect>"(Dense, Dense*, double, int, size_t*) except +
    void threshold_write "sparsecomm::in_default_mode<sparsecomm::threshold_write>"(Collected*, cbool, void*, void*) except +
    void threshold_free(Collected*)
    void c_merge "sparsecomm::in_default_mode<sparsecomm::merge>"(Sparse, Sparse, cbool, cbool, SparseOut*) except +
    void c_merge_topk "sparsecomm::in_default_mode<sparsecomm::merge_topk>"(Sparse, Sparse, size_t, cbool, cbool, SparseOut*, SparseOut*) except +
    void c_scatter_add "sparsecomm::in_default_mode<sparsecomm::scatter_add>"(Dense, Sparse, cbool) except +
    void c_scatter_add_where "sparsecomm::in_default_mode<sparsecomm::scatter_add_where>"(Dense, Sparse, const void*, size_t, cbool, cbool) except +
    cbool c_densify "sparsecomm::in_default_mode<sparsecomm::densify>"(Dense, Sparse, cbool, int) except +
    void c_widen "sparsecomm::in_default_mode<sparsecomm::widen>"(Dense, const Dense*, void*, int) except +
    void c_add "sparsecomm::in_default_mode<sparsecomm::add>"(void*, const void*, size_t, cbool, int) except +
    void c_narrow "sparsecomm::in_default_mode<sparsecomm::narrow>"(const void*, Dense, int) except +
    cbool c_well_formed "sparsecomm::in_default_mode<sparsecomm::well_formed>"(Sparse, size_t, cbool, cbool)
    size_t packed_bytes(Sparse, Kind, cbool, cbool)
    void c_pack "sparsecomm::in_default_mode<sparsecomm::pack>"(Sparse, Kind, cbool, cbool, void*)
    const char* check_packed(const void*, size_t, size_t, size_t, Kind, cbool)
    const char* c_unpack "sparsecomm::in_default_mode<sparsecomm::unpack>"(const void*, size_t, size_t, size_t, Kind, cbool, cbool, void*, void*)
    size_t c_quantize_values "sparsecomm::in_default_mode<sparsecomm::quantize_values>"(const float*, size_t, Kind, float*, float*)
    const char* c_simd_name "sparsecomm::simd_name"()
    cbool c_use_simd "sparsecomm::use_simd"(const char*)
    void c_release_scratch "sparsecomm::release_scratch"()


cdef extern from "float_mode.hpp":
    object call_in_default_mode "sparsecomm::in_default_mode<PyObject_Call>"(object, tuple, dict)


cdef extern from "buffer.hpp" namespace "sparsecomm" nogil:
    void* take_scratch(size_t, size_t*) except +
    void give_scratch(void*, size_t) noexcept


cdef inline Dense dense(uintptr_t pointer, int code, size_t size) noexcept:
    cdef Dense d
    d.data = <void*> pointer
    d.type = <Type> code
    d.size = size
    return d


cdef inline cbool is_flat(cnp.ndarray array, size_t itemsize) noexcept:
    return cnp.PyArray_NDIM(array) == 1 and cnp.PyArray_ITEMSIZE(array) == itemsize and cnp.PyArray_IS_C_CONTIGUOUS(array)


cdef object expect(cnp.ndarray array, size_t itemsize, str what):
    """Raise unless an array is flat, contiguous, and of elements of so many bytes: kernels trust that."""
    if not is_flat(array, itemsize):
        raise ValueError(
            f"{what}: got {array.dtype} of shape {(<object> array).shape}; expected a flat contiguous array of {itemsize} bytes "
            "per element"
        )


cdef Sparse sparse(cnp.ndarray indices, cnp.ndarray values, cbool int64_indices, cbool float64_values) except *:
    """Entries, whose arrays users see and may have replaced."""
    cdef Sparse s
    if not (is_flat(indices, 8 if int64_indices else 4) and is_flat(values, 8 if float64_values else 4)
            and cnp.PyArray_DIM(indices, 0) == cnp.PyArray_DIM(values, 0)):
        raise InvalidInputError(
            f"SparseVector: its arrays were changed to {indices.dtype} of shape {(<object> indices).shape} and {values.dtype} of "
            f"shape {(<object> values).shape}; expected flat contiguous ones of one length, of int{64 if int64_indices else 32} "
            f"and float{64 if float64_values else 32}; make a new vector instead"
        )
    s.indices = cnp.PyArray_DATA(indices)
    s.values = cnp.PyArray_DATA(values)
    s.count = <size_t> cnp.PyArray_DIM(values, 0)
    return s


cdef inline SparseOut room(cnp.ndarray indices, cnp.ndarray values) noexcept:
    cdef SparseOut s
    s.indices = cnp.PyArray_DATA(indices)
    s.values = cnp.PyArray_DATA(values)
    s.count = 0
    return s


cdef class Block:
    """Scratch memory of an array, which is used again when the array is gone."""

    cdef void* memory
    cdef size_t granted

    def __dealloc__(self):
        if self.memory:
            give_scratch(self.memory, self.granted)


cdef enum:
    POOLED = 1 << 16  # bytes from which fresh pages cost more than what is written to them


cdef cnp.ndarray empty(size_t count, int type_number):
    """A new array, not initialised."""
    cdef cnp.npy_intp length = <cnp.npy_intp> count
    cdef size_t nbytes = count * <size_t> cnp.PyArray_DescrFromType(type_number).itemsize
    cdef Block block
    cdef cnp.ndarray array
    if nbytes < POOLED:
        return cnp.PyArray_EMPTY(1, &length, type_number, 0)
    block = Block()
    block.memory = take_scratch(nbytes, &block.granted)
    array = cnp.PyArray_SimpleNewFromData(1, &length, type_number, block.memory)
    cnp.set_array_base(array, block)
    return array


cdef inline int note(list done, item) except -1:
    if done is not None:
        done.append(item)
    return 0


cdef inline int index_type(cbool int64_indices) noexcept:
    return cnp.NPY_INT64 if int64_indices else cnp.NPY_INT32


cdef inline int value_type(cbool float64_values) noexcept:
    return cnp.NPY_FLOAT64 if float64_values else cnp.NPY_FLOAT32


cdef tuple keep(cnp.ndarray indices, cnp.ndarray values, size_t found, entries, list done):
    """Return the first ``found`` of entries, which become attributes of ``entries``, which is appended to ``done``."""
    if found < <size_t> cnp.PyArray_DIM(indices, 0):
        indices, values = indices[:found], values[:found]
        try:
            indices, values = indices.copy(), values.copy()
        except MemoryError:
            pass  # what holds more memory than it needs is as good
    if entries is not None:
        entries.indices, entries.values = indices, values
    note(done, entries)
    return indices, values


def topk(uintptr_t x, int code, size_t size, uintptr_t residual, int residual_code, size_t k, cbool int64_indices, int threads,
         entries=None, list done=None):
    """Return (indices, values) of the top-k of x, or of residual + x if ``residual`` is not 0.

    They become attributes of ``entries``, which is appended to ``done``.
    """
    cdef Dense data = dense(x, code, size), r = dense(residual, residual_code, size)
    cdef Dense* kept_back = &r if residual else NULL
    cdef size_t max_count = min(k, size), found
    cdef cnp.ndarray indices = empty(max_count, index_type(int64_indices)), values = empty(max_count, value_type(code == 3))
    cdef void* to_indices = cnp.PyArray_DATA(indices)
    cdef void* to_values = cnp.PyArray_DATA(values)
    with nogil:
        found = c_topk(data, kept_back, k, int64_indices, to_indices, to_values, threads)
    return keep(indices, values, found, entries, done)


def topk_by_chunk(uintptr_t x, int code, size_t size, uintptr_t residual, int residual_code, size_t k, size_t chunk, double decay,
                  cbool int64_indices, int threads, entries=None, list done=None):
    """Return (indices, values) of the top-k of every chunk of x, or of decay * residual + x.

    They become attributes of ``entries``, which is appended to ``done``.
    """
    if min(chunk, size) > (<size_t> 1 << 31):
        raise InvalidInputError(
            f"chunk={chunk} of {size} elements: expected at most 2^31 on a CPU; select from the whole instead"
        )
    cdef Dense data = dense(x, code, size), r = dense(residual, residual_code, size)
    cdef Dense* kept_back = &r if residual else NULL
    cdef size_t room = chunk_room(size, k, chunk), found
    cdef cnp.ndarray indices = empty(room, index_type(int64_indices)), values = empty(room, value_type(code == 3))
    cdef void* to_indices = cnp.PyArray_DATA(indices)
    cdef void* to_values = cnp.PyArray_DATA(values)
    with nogil:
        found = c_topk_by_chunk(data, kept_back, k, chunk, decay, int64_indices, to_indices, to_values, threads)
    return keep(indices, values, found, entries, done)


def threshold(uintptr_t x, int code, size_t size, uintptr_t residual, int residual_code, double tau, cbool int64_indices,
              int threads, entries=None, list done=None):
    """Return (indices, values) of every entry of x, or of residual + x, with |v| >= tau.

    They become attributes of ``entries``, which is appended to ``done``.
    """
    cdef Dense data = dense(x, code, size), r = dense(residual, residual_code, size)
    cdef Dense* kept_back = &r if residual else NULL
    cdef size_t found = 0
    cdef Collected* collected
    cdef cnp.ndarray indices, values
    with nogil:
        collected = threshold_collect(data, kept_back, tau, threads, &found)
    try:
        indices = empty(found, index_type(int64_indices))
        values = empty(found, value_type(code == 3))
    except BaseException:
        threshold_free(collected)
        raise
    cdef void* to_indices = cnp.PyArray_DATA(indices)
    cdef void* to_values = cnp.PyArray_DATA(values)
    with nogil:
        threshold_write(collected, int64_indices, to_indices, to_values)
    if entries is not None:
        entries.indices, entries.values = indices, values
    note(done, entries)
    return indices, values


def merge(cnp.ndarray a_indices, cnp.ndarray a_values, cnp.ndarray b_indices, cnp.ndarray b_values, cbool int64_indices,
          cbool float64_values):
    """Return (indices, values) of a + b."""
    cdef Sparse a = sparse(a_indices, a_values, int64_indices, float64_values)
    cdef Sparse b = sparse(b_indices, b_values, int64_indices, float64_values)
    cdef cnp.ndarray indices = empty(a.count + b.count, index_type(int64_indices))
    cdef cnp.ndarray values = empty(a.count + b.count, value_type(float64_values))
    cdef SparseOut total = room(indices, values)
    with nogil:
        c_merge(a, b, int64_indices, float64_values, &total)
    return indices[:total.count], values[:total.count]


def merge_topk(cnp.ndarray a_indices, cnp.ndarray a_values, cnp.ndarray b_indices, cnp.ndarray b_values, size_t k,
               cbool int64_indices, cbool float64_values):
    """Return (indices, values) of the top-k of a + b, and (indices, values) of all its other entries."""
    cdef Sparse a = sparse(a_indices, a_values, int64_indices, float64_values)
    cdef Sparse b = sparse(b_indices, b_values, int64_indices, float64_values)
    cdef size_t both = a.count + b.count
    cdef cnp.ndarray kept_indices = empty(min(k, both), index_type(int64_indices))
    cdef cnp.ndarray kept_values = empty(min(k, both), value_type(float64_values))
    cdef size_t others = both - k if both > k else 0
    cdef cnp.ndarray lost_indices = empty(others, index_type(int64_indices)), lost_values = empty(others, value_type(float64_values))
    cdef SparseOut kept = room(kept_indices, kept_values), lost = room(lost_indices, lost_values)
    with nogil:
        c_merge_topk(a, b, k, int64_indices, float64_values, &kept, &lost)
    return (kept_indices[:kept.count], kept_values[:kept.count], lost_indices[:lost.count], lost_values[:lost.count])


def scatter_add(uintptr_t data, int code, size_t size, cnp.ndarray indices, cnp.ndarray values, cbool int64_indices,
                list done=None):
    """Set data[indices] += values."""
    cdef Dense d = dense(data, code, size)
    cdef Sparse entries = sparse(indices, values, int64_indices, code == 3)
    with nogil:
        c_scatter_add(d, entries, int64_indices)
    note(done, None)


def scatter_add_where(uintptr_t data, int code, size_t size, cnp.ndarray indices, cnp.ndarray values, cnp.ndarray others,
                      cbool int64_indices, cbool present, list done=None):
    """Set data[indices] += values, for the indices alone that are among the others, or for those that are not."""
    cdef Dense d = dense(data, code, size)
    cdef Sparse entries = sparse(indices, values, int64_indices, code == 3)
    expect(others, 8 if int64_indices else 4, "indices of others")
    cdef const void* other = cnp.PyArray_DATA(others)
    cdef size_t other_count = <size_t> cnp.PyArray_DIM(others, 0)
    with nogil:
        c_scatter_add_where(d, entries, other, other_count, int64_indices, present)
    note(done, None)


def densify(uintptr_t data, int code, size_t size, cnp.ndarray indices, cnp.ndarray values, cbool int64_indices, int threads):
    """Set data[:] = 0, then data[indices] = values; nothing if an index is not in [0, size), which is an error."""
    cdef Dense d = dense(data, code, size)
    cdef Sparse entries = sparse(indices, values, int64_indices, code == 3)
    cdef cbool good
    with nogil:
        good = c_densify(d, entries, int64_indices, threads)
    if not good:
        raise InvalidInputError(
            f"SparseVector: an index is not in [0, {size}), as its array was written to; make a new vector instead"
        )


def widen(uintptr_t x, int code, size_t size, uintptr_t residual, int residual_code, int threads):
    """Return x, or residual + x, as a new array of the accumulator type."""
    cdef Dense data = dense(x, code, size), r = dense(residual, residual_code, size)
    cdef Dense* kept_back = &r if residual else NULL
    cdef cnp.ndarray out = empty(size, value_type(code == 3))
    cdef void* to = cnp.PyArray_DATA(out)
    with nogil:
        c_widen(data, kept_back, to, threads)
    return out


def add_into(uintptr_t x, int code, size_t size, uintptr_t residual, int residual_code, int threads, list done=None):
    """Set residual = residual + x; the residual is of the accumulator type."""
    cdef Dense data = dense(x, code, size), r = dense(residual, residual_code, size)
    with nogil:
        c_widen(data, &r, <void*> residual, threads)
    note(done, None)


def add(cnp.ndarray total, cnp.ndarray addend, cbool float64_values, int threads):
    """Set total += addend; contiguous arrays of the accumulator type and of one length."""
    expect(total, 8 if float64_values else 4, "total")
    expect(addend, 8 if float64_values else 4, "addend")
    cdef size_t size = <size_t> cnp.PyArray_DIM(total, 0)
    if cnp.PyArray_DIM(addend, 0) != cnp.PyArray_DIM(total, 0):
        raise ValueError(f"addend: got {len(addend)} elements; expected {size}")
    cdef void* to = cnp.PyArray_DATA(total)
    cdef void* of = cnp.PyArray_DATA(addend)
    with nogil:
        c_add(to, of, size, float64_values, threads)


def narrow(cnp.ndarray values, uintptr_t data, int code, size_t size, int threads, list done=None):
    """Set data[:] = values, rounded to the type of data."""
    expect(values, 8 if code == 3 else 4, "values")
    if <size_t> cnp.PyArray_DIM(values, 0) != size:
        raise ValueError(f"values: got {len(values)} elements; expected {size}")
    cdef Dense d = dense(data, code, size)
    cdef void* of = cnp.PyArray_DATA(values)
    with nogil:
        c_narrow(of, d, threads)
    note(done, None)


def well_formed(cnp.ndarray indices, cnp.ndarray values, size_t size, cbool int64_indices, cbool float64_values):
    """Return whether the indices are strictly increasing and in [0, size), and no value is zero."""
    cdef Sparse entries = sparse(indices, values, int64_indices, float64_values)
    return bool(c_well_formed(entries, size, int64_indices, float64_values))


cdef Kind checked_kind(int kind, cbool float64_values) except *:
    if not 0 <= kind < KINDS:
        raise ValueError(f"there is no kind {kind} of values")
    if float64_values and kind != <int> Kind.exact:
        raise ValueError("float64 values are sent as they are only")
    return <Kind> kind


def pack(cnp.ndarray indices, cnp.ndarray values, int kind, cbool int64_indices, cbool float64_values):
    """Return the bytes of entries whose values have been rounded to the kind with this code."""
    cdef Kind checked = checked_kind(kind, float64_values)
    cdef Sparse entries = sparse(indices, values, int64_indices, float64_values)
    cdef cnp.ndarray packed = empty(packed_bytes(entries, checked, int64_indices, float64_values), cnp.NPY_UINT8)
    cdef void* to = cnp.PyArray_DATA(packed)
    with nogil:
        c_pack(entries, checked, int64_indices, float64_values, to)
    return packed


def unpack(cnp.ndarray data, size_t count, size_t n, int kind, cbool int64_indices, cbool float64_values):
    """Return (indices, values) of ``count`` entries of a vector of n elements.

    Raises:
        ValueError: these are not the bytes of so many entries.
    """
    cdef Kind checked = checked_kind(kind, float64_values)
    expect(data, 1, "data")
    cdef size_t nbytes = <size_t> cnp.PyArray_DIM(data, 0)
    cdef const void* of = cnp.PyArray_DATA(data)
    cdef const char* wrong = check_packed(of, nbytes, count, n, checked, float64_values)
    if wrong:
        raise ValueError(wrong.decode())
    cdef cnp.ndarray indices = empty(count, index_type(int64_indices)), values = empty(count, value_type(float64_values))
    cdef void* to_indices = cnp.PyArray_DATA(indices)
    cdef void* to_values = cnp.PyArray_DATA(values)
    with nogil:
        wrong = c_unpack(of, nbytes, count, n, checked, int64_indices, float64_values, to_indices, to_values)
    if wrong:
        raise ValueError(wrong.decode())
    return indices, values


def quantize_values(cnp.ndarray values, int kind):
    """Return (rounded, errors, how many of rounded are zero) of float32 values: what arrives, and what does not."""
    cdef Kind checked = checked_kind(kind, False)
    if checked == Kind.exact:
        raise ValueError("values that are sent as they are have nothing to round")
    expect(values, 4, "values")
    cdef size_t count = <size_t> cnp.PyArray_DIM(values, 0), zeros
    cdef cnp.ndarray rounded = empty(count, cnp.NPY_FLOAT32), errors = empty(count, cnp.NPY_FLOAT32)
    cdef const float* of = <const float*> cnp.PyArray_DATA(values)
    cdef float* to_rounded = <float*> cnp.PyArray_DATA(rounded)
    cdef float* to_errors = <float*> cnp.PyArray_DATA(errors)
    with nogil:
        zeros = c_quantize_values(of, count, checked, to_rounded, to_errors)
    return rounded, errors, zeros


def simd():
    """Return the instruction set that the kernels run on: "avx512", "avx2" or "portable"."""
    return c_simd_name().decode()


def use_simd(str name):
    """Run on another instruction set from now on. Return False if this processor lacks it."""
    return bool(c_use_simd(name.encode()))


def release_scratch():
    """Give the scratch memory kept between calls back to the system."""
    c_release_scratch()


def default_float_mode(function):
    """Make a function compute as kernels do, whatever the mode of the thread that calls it: NumPy's arithmetic in it rounds
    to nearest even, and has denormals.
    """
    @wraps(function)
    def in_default_mode(*args, **kwargs):
        return call_in_default_mode(function, args, kwargs)
    return in_default_mode
