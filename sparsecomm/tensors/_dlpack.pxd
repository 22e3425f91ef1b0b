from libc.stdint cimport uintptr_t


cdef class Tensor:
    cdef readonly uintptr_t pointer
    cdef readonly Py_ssize_t size
    cdef readonly tuple shape
    cdef readonly object dtype, device, owner, stream
    cdef readonly bint readonly
    cdef int code  # of dtype
