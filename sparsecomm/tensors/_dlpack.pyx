"""`Tensor`, and reading the memory of DLPack capsules and plain arrays, which `interop` then checks.

The structs are copied from DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html), to avoid a dependency. The ABI
is stable within a major version.
"""

cimport numpy as cnp
from cpython.exc cimport PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

cnp.import_array()

cdef struct Device:
    int32_t type
    int32_t id

cdef struct DataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    Device device
    int32_t ndim
    DataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct Managed:
    DLTensor tensor
    void* context
    void (*deleter)(Managed*) noexcept

cdef struct Versioned:
    uint32_t major
    uint32_t minor
    void* context
    void (*deleter)(Versioned*) noexcept
    uint64_t flags
    DLTensor tensor

cdef struct Exchange:  # the beginning of DLPackExchangeAPI
    uint32_t major
    uint32_t minor
    void* previous
    void* allocator
    int (*from_object)(void*, Versioned**) noexcept
    void* unused[2]
    int (*current_stream)(int32_t, int32_t, void**) noexcept

cdef uint64_t READ_ONLY = 1, IS_COPIED = 2
cdef int64_t MAX_SIZE = 2**60 - 1  # elements: their bytes must fit in an int64


cdef class Import:
    """The tensor of a consumed capsule. Deleting this object releases the exporter's memory."""

    cdef Managed* managed
    cdef Versioned* versioned
    cdef readonly uintptr_t pointer  # 0: none
    cdef readonly int64_t size
    cdef readonly tuple shape
    cdef readonly int code, bits, lanes, device_type, device_id
    cdef readonly bint contiguous, readonly, copied

    def __cinit__(self, capsule):
        """``capsule``: a fresh DLPack capsule, or None to use memory from a library's C functions."""
        cdef Versioned* versioned
        if capsule is None:
            return
        if PyCapsule_IsValid(capsule, "dltensor_versioned"):
            versioned = <Versioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
            if versioned.major > 1:  # the layout may differ; the capsule is not consumed and frees itself
                raise BufferError(f"DLPack version {versioned.major}.{versioned.minor} is not supported; expected 1.x")
            PyCapsule_SetName(capsule, "used_dltensor_versioned")
            self.versioned = versioned
            self.describe(&versioned.tensor, versioned.flags)
        elif PyCapsule_IsValid(capsule, "dltensor"):
            self.managed = <Managed*>PyCapsule_GetPointer(capsule, "dltensor")
            PyCapsule_SetName(capsule, "used_dltensor")
            self.describe(&self.managed.tensor, 0)
        else:
            raise BufferError(f"__dlpack__ returned {capsule!r}, which is not a fresh DLPack capsule")

    cdef int describe(self, DLTensor* t, uint64_t flags) except -1:
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
        if not possible:
            raise BufferError(f"shape {self.shape} is invalid")
        self.pointer = 0 if t.data == NULL else <uintptr_t>t.data + t.byte_offset
        self.size = size
        self.contiguous = contiguous
        self.code, self.bits, self.lanes = t.dtype.code, t.dtype.bits, t.dtype.lanes
        self.device_type, self.device_id = t.device.type, t.device.id
        self.readonly = flags & READ_ONLY != 0
        self.copied = flags & IS_COPIED != 0
        return 0

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.managed != NULL and self.managed.deleter != NULL:
            self.managed.deleter(self.managed)


cdef class Tensor:
    """Contiguous memory of another library's array.

    Attributes:
        pointer: address of the first element.
        owner: keeps the memory alive.
        stream: for a CUDA tensor, the stream on which its memory is ready, as numbered by DLPack.
    """

    def __init__(self, pointer, size, shape, dtype, device, readonly, owner, stream=None):
        self.pointer, self.size, self.shape, self.dtype, self.device = pointer, size, shape, dtype, device
        self.readonly, self.owner, self.stream, self.code = readonly, owner, stream, dtype.code

    @property
    def nbytes(self):
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    def part(self, begin, end):
        """Return elements ``begin`` to ``end`` as a flat tensor. Shares memory."""
        pointer = self.pointer + begin * self.dtype.itemsize
        size = end - begin
        return Tensor(pointer, size, (size,), self.dtype, self.device, self.readonly, self.owner, self.stream)


def overlap(Tensor a not None, Tensor b not None):
    """Return whether two tensors share memory. CUDA has one address space for the host and all GPUs."""
    cdef uintptr_t a_end = a.pointer + a.size * ITEMSIZES[a.code], b_end = b.pointer + b.size * ITEMSIZES[b.code]
    return a.size > 0 and b.size > 0 and a.pointer < b_end and b.pointer < a_end


cdef Py_ssize_t[4] ITEMSIZES = [2, 2, 4, 8]  # by code of the dtype
cdef list DTYPES = [FLOAT16, BFLOAT16, FLOAT32, FLOAT64]  # by code
cdef dict exchanges = {}  # type of an object -> capsule of its C functions
cdef dict gpus = {}  # by number


cdef Tensor host_tensor(uintptr_t pointer, Py_ssize_t size, tuple shape, int code, device, bint readonly, owner):
    cdef Tensor t = Tensor.__new__(Tensor)
    t.pointer, t.size, t.shape, t.dtype, t.device, t.readonly, t.owner = pointer, size, shape, DTYPES[code], device, readonly, owner
    t.code = code
    return t


def plain(obj, bint writable, cpu, stream=None):
    """Return the tensor of a common kind of array, quickly; None if `interop` must check the array.

    Common kinds are NumPy arrays and types with DLPack's C functions, such as PyTorch tensors. ``cpu``: the device.
    ``stream``: as in `interop.tensor`.
    """
    if type(obj) is cnp.ndarray:
        return plain_array(obj, writable, cpu)
    cls = type(obj)
    capsule = exchanges.get(cls)
    if capsule is None:
        capsule = cls.__dict__.get("__dlpack_c_exchange_api__")  # of this type, because a subclass may differ
        if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
            return None
        exchanges[cls] = capsule
    cdef Exchange* exchange = <Exchange*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    is_negated = getattr(obj, "is_neg", None)
    if exchange.major != 1 or getattr(obj, "requires_grad", False) or is_negated is not None and is_negated():
        return None
    cdef Versioned* exported = NULL
    if exchange.from_object(<void*>obj, &exported):
        PyErr_Clear()  # `__dlpack__` raises the same error later
        return None
    cdef Import memory = Import.__new__(Import, None)
    memory.versioned = exported
    if exported.major > 1:
        return None
    try:
        memory.describe(&exported.tensor, exported.flags)
    except BufferError:
        return None
    cdef int code = (2 if memory.bits == 32 else 3 if memory.bits == 64 else 0) if memory.code == 2 else 1
    cdef bint known = memory.code == 2 and memory.bits in (16, 32, 64) or memory.code == 4 and memory.bits == 16
    if (not known or memory.pointer == 0 and memory.size > 0 or memory.lanes != 1 or not memory.contiguous
            or memory.pointer % <uintptr_t>(memory.bits // 8) or writable and (memory.readonly or memory.copied)):
        return None
    cdef Tensor t = host_tensor(memory.pointer, memory.size, memory.shape, code, cpu, memory.readonly, memory)
    if memory.device_type != 1:
        return on_device(t, memory, exchange, type(cpu), stream)
    return t


cdef Tensor on_device(Tensor t, Import memory, Exchange* exchange, device, stream):
    """Return ``t`` as a tensor of a CUDA device; None if ``stream`` would have to wait for the library's stream."""
    cdef void* current = NULL
    if memory.device_type != 2 or exchange.current_stream == NULL:
        return None
    if exchange.current_stream(memory.device_type, memory.device_id, &current):
        PyErr_Clear()
        return None
    t.stream = <uintptr_t>current or 1
    if stream is not None and stream != t.stream:
        return None
    if memory.device_id not in gpus:
        gpus[memory.device_id] = device("cuda", memory.device_id)
    t.device = gpus[memory.device_id]
    return t


cdef plain_array(cnp.ndarray array, bint writable, cpu):
    cdef int number = cnp.PyArray_TYPE(array)
    cdef int code = 2 if number == cnp.NPY_FLOAT32 else 3 if number == cnp.NPY_FLOAT64 else 0 if number == cnp.NPY_FLOAT16 else -1
    cdef bint readonly = not cnp.PyArray_ISWRITEABLE(array)
    if (code < 0 or not cnp.PyArray_IS_C_CONTIGUOUS(array) or not cnp.PyArray_ISALIGNED(array) or writable and readonly
            or not cnp.PyArray_ISNOTSWAPPED(array)):
        return None
    shape = (<object>array).shape
    return host_tensor(<uintptr_t>cnp.PyArray_DATA(array), cnp.PyArray_SIZE(array), shape, code, cpu, readonly, array)


def address(cnp.ndarray array not None):
    """Return the address of a NumPy array's elements, ten times faster than ``array.ctypes.data``."""
    return <uintptr_t>cnp.PyArray_DATA(array)


def view(uintptr_t pointer, cnp.npy_intp size, cnp.dtype dtype not None, bint readonly, owner):
    """Return a flat NumPy array of foreign memory that keeps ``owner`` alive."""
    cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(1, &size, dtype.num, <void*>pointer)
    cnp.set_array_base(array, owner)
    if readonly:
        cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
    return array
