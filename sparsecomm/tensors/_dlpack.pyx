"""Reads DLPack capsules, and makes NumPy views of what they describe. Policy and messages are in `interop`.

The structures are those of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html), written out here: they are
an ABI, stable within a major version, and the one header that would be needed is not worth a dependency.
"""

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

cnp.import_array()

cdef extern from *:
    """
    #include <stdint.h>
    typedef struct { int32_t type, id; } sc_DLDevice;
    typedef struct { uint8_t code, bits; uint16_t lanes; } sc_DLDataType;
    typedef struct {
        void* data; sc_DLDevice device; int32_t ndim; sc_DLDataType dtype; int64_t *shape, *strides;
        uint64_t byte_offset;
    } sc_DLTensor;
    typedef struct sc_DLManaged { sc_DLTensor tensor; void* context; void (*deleter)(struct sc_DLManaged*); } sc_DLManaged;
    typedef struct sc_DLVersioned {
        uint32_t major, minor; void* context; void (*deleter)(struct sc_DLVersioned*); uint64_t flags; sc_DLTensor tensor;
    } sc_DLVersioned;
    """
    ctypedef struct Device "sc_DLDevice":
        int32_t type
        int32_t id
    ctypedef struct DataType "sc_DLDataType":
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct DLTensor "sc_DLTensor":
        void* data
        Device device
        int32_t ndim
        DataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct Managed "sc_DLManaged":
        DLTensor tensor
        void (*deleter)(Managed*)
    ctypedef struct Versioned "sc_DLVersioned":
        uint32_t major
        uint32_t minor
        void (*deleter)(Versioned*)
        uint64_t flags
        DLTensor tensor

cdef uint64_t READ_ONLY = 1, IS_COPIED = 2
cdef int64_t MAX_SIZE = 2**60 - 1  # elements: the bytes of as many of the widest type can still be counted


cdef class Import:
    """The tensor of a consumed capsule. The exporter's memory is released when this object dies."""

    cdef Managed* managed
    cdef Versioned* versioned
    cdef readonly object pointer, size, shape
    cdef readonly int code, bits, lanes, device_type, device_id
    cdef readonly bint contiguous, readonly, copied

    def __cinit__(self, capsule):
        cdef DLTensor* t
        cdef Versioned* versioned
        cdef uint64_t flags = 0
        if PyCapsule_IsValid(capsule, "dltensor_versioned"):
            versioned = <Versioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
            if versioned.major > 1:  # the rest may be laid out differently; the capsule, not consumed, frees itself
                raise BufferError(f"DLPack version {versioned.major}.{versioned.minor}, and only 1.x is understood")
            PyCapsule_SetName(capsule, "used_dltensor_versioned")
            self.versioned = versioned
            flags = versioned.flags
            t = &versioned.tensor
        elif PyCapsule_IsValid(capsule, "dltensor"):
            self.managed = <Managed*>PyCapsule_GetPointer(capsule, "dltensor")
            PyCapsule_SetName(capsule, "used_dltensor")
            t = &self.managed.tensor
        else:
            raise BufferError(f"__dlpack__ returned {capsule!r}, which is not a fresh DLPack capsule")

        if t.ndim < 0 or (t.ndim > 0 and t.shape == NULL):
            raise BufferError(f"{t.ndim} dimensions without a shape")
        cdef int64_t size = 1, run = 1, extent
        cdef int i
        cdef bint contiguous = True, empty = False, possible = True
        for i in range(t.ndim - 1, -1, -1):
            extent = t.shape[i]
            if extent <= 0:
                empty = True
                possible = possible and extent == 0
            elif size <= MAX_SIZE // extent:
                size *= extent
            else:
                possible = False
            if t.strides != NULL and extent != 1:
                contiguous = contiguous and t.strides[i] == run
                run = size
        if empty:
            size, contiguous = 0, True
        self.shape = tuple([t.shape[i] for i in range(t.ndim)])
        if not possible or (t.data == NULL and size > 0):
            raise BufferError(f"a tensor of shape {self.shape} at {<uintptr_t>t.data:#x}, which cannot be")
        self.pointer = <uintptr_t>t.data + t.byte_offset
        self.size = size
        self.contiguous = contiguous
        self.code, self.bits, self.lanes = t.dtype.code, t.dtype.bits, t.dtype.lanes
        self.device_type, self.device_id = t.device.type, t.device.id
        self.readonly = flags & READ_ONLY != 0
        self.copied = flags & IS_COPIED != 0

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.managed != NULL and self.managed.deleter != NULL:
            self.managed.deleter(self.managed)


def address(cnp.ndarray array not None):
    """Where the elements of a NumPy array begin, ten times faster than ``array.ctypes.data``."""
    return <uintptr_t>cnp.PyArray_DATA(array)


def view(uintptr_t pointer, cnp.npy_intp size, cnp.dtype dtype not None, bint readonly, owner):
    """A flat NumPy array over foreign memory. It keeps ``owner`` alive."""
    cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(1, &size, dtype.num, <void*>pointer)
    cnp.set_array_base(array, owner)
    if readonly:
        cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
    return array
