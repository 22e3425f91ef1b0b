# distutils: language = c++
"""The C++ codec of patches (kernels/patches) for tensors in host memory. Loops over elements release the GIL."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from cpython.bytes cimport PyBytes_FromStringAndSize

import numpy as np

from sparsecomm import config
from sparsecomm.tensors._dlpack cimport Tensor

cdef extern from "patches.hpp" namespace "sparsecomm::patches" nogil:
    const size_t C_PIECE "sparsecomm::patches::PIECE"
    const size_t C_BLOCK "sparsecomm::patches::BLOCK"
    const unsigned int C_CLASSES "sparsecomm::patches::CLASSES"
    cdef cppclass Elements:
        uint32_t itemsize, shift, mask, low
        cbool is_float
    cdef cppclass Sums:
        uint64_t before, after
    cdef cppclass Changes:
        uint32_t members[16]
        uint32_t count[16]
        vector[uint32_t] rank
        vector[uint64_t] distance
    cdef cppclass CLocated "sparsecomm::patches::Located":
        vector[uint32_t] position
        vector[uint8_t] value
    uint64_t c_digest_of "sparsecomm::patches::digest_of"(uint64_t, size_t)
    uint64_t sum_of_blocks(const void*, size_t, int) except +
    vector[uint8_t] c_diff "sparsecomm::patches::diff"(
        const void*, const void*, size_t, Elements, int, Sums*, size_t*) except +
    cbool c_locate "sparsecomm::patches::locate"(
        const void*, size_t, Elements, const uint8_t*, size_t, int, Sums*, vector[CLocated]*) except +
    void c_write "sparsecomm::patches::write"(void*, Elements, const vector[CLocated]&, int)
    vector[uint8_t] join(const vector[vector[uint8_t]]&) except +
    void c_encode "sparsecomm::patches::encode"(
        const uint32_t*, const uint64_t*, size_t, const uint8_t*, const uint32_t*, const uint64_t*, int,
        vector[vector[uint8_t]]*) except +
    cbool c_decode "sparsecomm::patches::decode"(
        const uint8_t*, size_t, size_t, size_t, size_t, int, vector[Changes]*) except +
    cbool c_use_simd "sparsecomm::patches::use_simd"(const char*)


PIECE, BLOCK, CLASSES = C_PIECE, C_BLOCK, C_CLASSES  # of kernels/patch_elements.hpp


cdef class Layout:
    """How to read a tensor's elements: see ``Elements`` in kernels/patches/patches.hpp.

    Attributes:
        per_item: elements per item of the tensor: 2 for complex numbers.
    """

    cdef readonly uint32_t itemsize, shift, mask, low
    cdef readonly bint is_float
    cdef readonly size_t per_item

    def __init__(self, itemsize, shift, mask, low, is_float, per_item):
        self.itemsize, self.shift, self.mask, self.low = itemsize, shift, mask, low
        self.is_float, self.per_item = is_float, per_item

    cdef Elements elements(self):
        cdef Elements elements
        elements.itemsize, elements.shift, elements.mask = self.itemsize, self.shift, self.mask
        elements.low, elements.is_float = self.low, self.is_float
        return elements


cdef class Located:
    """The new elements of a tensor, decoded but not written.

    Attributes:
        before, after: the tensor's digests, as it is and with the new elements.
    """

    cdef vector[CLocated] pieces
    cdef Elements elements
    cdef readonly uint64_t before, after

    def write(self, Tensor tensor not None):
        """Write the new elements to a tensor with the shape and dtype of the one they were decoded for."""
        cdef int threads = config.threads()
        with nogil:
            c_write(<void*> tensor.pointer, self.elements, self.pieces, threads)


def digest(Tensor tensor not None):
    """Return the digest of a tensor's bytes."""
    cdef size_t nbytes = tensor.nbytes
    cdef uint64_t total
    cdef int threads = config.threads()
    with nogil:
        total = sum_of_blocks(<const void*> tensor.pointer, nbytes, threads)
    return c_digest_of(total, nbytes)


def diff(Tensor old not None, Tensor new not None, Layout layout not None):
    """Return the coded changes of a tensor, their number, and the digests of both versions."""
    cdef size_t n = old.size * layout.per_item, nbytes = old.nbytes, changed
    cdef int threads = config.threads()
    cdef vector[uint8_t] coded
    cdef Elements elements = layout.elements()
    cdef Sums sums
    with nogil:
        coded = c_diff(<const void*> old.pointer, <const void*> new.pointer, n, elements, threads, &sums, &changed)
    return as_bytes(coded), changed, c_digest_of(sums.before, nbytes), c_digest_of(sums.after, nbytes)


def locate(Tensor tensor not None, Layout layout not None, const uint8_t[::1] coded not None):
    """Decode what `diff` returned. Return None if it does not fit the tensor."""
    cdef size_t n = tensor.size * layout.per_item, nbytes = tensor.nbytes
    cdef const uint8_t* begin = &coded[0] if coded.shape[0] else NULL
    cdef int threads = config.threads()
    cdef Located located = Located()
    located.elements = layout.elements()
    cdef Sums sums
    cdef cbool fits
    with nogil:
        fits = c_locate(
            <const void*> tensor.pointer, n, located.elements, begin, coded.shape[0], threads, &sums, &located.pieces)
    if not fits:
        return None
    located.before, located.after = c_digest_of(sums.before, nbytes), c_digest_of(sums.after, nbytes)
    return located


def digest_of(uint64_t total, size_t nbytes):
    """Return the digest of a tensor of ``nbytes`` bytes from the sum of the hashes of its blocks, modulo 2^64."""
    return c_digest_of(total, nbytes)


cdef class Coder:
    """Codes changes that a device has found: the pieces of a tensor, in order."""

    cdef vector[vector[uint8_t]] pieces

    def add(self, const uint32_t[::1] members, const uint64_t[::1] starts, const uint8_t[::1] label,
            const uint32_t[::1] rank, const uint64_t[::1] distance):
        """Add some pieces. Arguments: see ``encode`` in kernels/patches/patches.hpp."""
        cdef size_t pieces = starts.shape[0] - 1
        cdef int threads = config.threads()
        if label.shape[0]:
            with nogil:
                c_encode(&members[0], &starts[0], pieces, &label[0], &rank[0], &distance[0], threads, &self.pieces)
        else:
            self.pieces.resize(self.pieces.size() + pieces)

    def coded(self):
        """Return what `diff` would return for the tensor."""
        return as_bytes(join(self.pieces))


def decode(const uint8_t[::1] coded not None, size_t n, size_t first, size_t pieces):
    """Decode the changes of some pieces of a tensor of ``n`` elements, without the tensor.

    Returns:
        For each class of each piece, the number of changes and the number of elements (0 if the latter is not coded).
        Then ranks and distances of all changes, by piece and class. None if the bytes are damaged.
    """
    cdef const uint8_t* begin = &coded[0] if coded.shape[0] else NULL
    cdef int threads = config.threads()
    cdef vector[Changes] decoded
    cdef cbool fits
    cdef size_t total = 0, p
    with nogil:
        fits = c_decode(begin, coded.shape[0], n, first, pieces, threads, &decoded)
    if not fits:
        return None
    for p in range(pieces):
        total += decoded[p].rank.size()
    count, members = np.empty((pieces, CLASSES), np.uint32), np.empty((pieces, CLASSES), np.uint32)
    rank, distance = np.empty(total, np.uint32), np.empty(total, np.uint64)
    cdef uint32_t[:, ::1] counts = count, coded_members = members
    cdef uint32_t[::1] ranks = rank
    cdef uint64_t[::1] distances = distance
    total = 0
    for p in range(pieces):
        memcpy(&counts[p, 0], decoded[p].count, sizeof(decoded[p].count))
        memcpy(&coded_members[p, 0], decoded[p].members, sizeof(decoded[p].members))
        if decoded[p].rank.size():
            memcpy(&ranks[total], decoded[p].rank.data(), 4 * decoded[p].rank.size())
            memcpy(&distances[total], decoded[p].distance.data(), 8 * decoded[p].rank.size())
        total += decoded[p].rank.size()
    return count, members, rank, distance


cdef bytes as_bytes(const vector[uint8_t]& data):
    return PyBytes_FromStringAndSize(<const char*> data.data(), data.size())


def use_simd(name):
    """Use an instruction set from now on: portable, avx2 or avx512. Return whether the processor supports it."""
    return c_use_simd(name.encode())
