"""`Launcher`: starts kernels by the driver's ``cuLaunchKernel``, whose address is only known at run time."""

cimport numpy as cnp
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from numpy import generic

cnp.import_array()

ctypedef unsigned int uint
ctypedef int (*CuLaunchKernel)(void*, uint, uint, uint, uint, uint, uint, uint, void*, void**, void**) noexcept nogil

cdef struct Kernel:
    void* function
    uint blocks, threads
    void** arguments

cdef struct Address:  # in a block of memory
    uint64_t* slot
    Py_ssize_t block
    uint64_t offset


cdef class Launcher:
    """Kernels that are started one after another, with arguments that are converted once.

    Use it from one thread at a time.
    """

    cdef CuLaunchKernel launch
    cdef int num_kernels, num_addresses
    cdef Kernel* kernels
    cdef Address* moved
    cdef uint64_t* slots  # one per argument
    cdef void** pointers  # to the slots

    def __cinit__(self, uintptr_t launch, list kernels):
        """``launch``: address of ``cuLaunchKernel``. ``kernels``: tuples of handle, blocks, threads and arguments.

        Ints become 64-bit words, NumPy scalars keep their type, and a tuple is a `Moved` address.
        """
        cdef Py_ssize_t count = sum([len(arguments) for _, _, _, arguments in kernels])
        self.launch = <CuLaunchKernel>launch
        self.kernels = <Kernel*>calloc(len(kernels), sizeof(Kernel))
        self.moved = <Address*>calloc(count + 1, sizeof(Address))
        self.slots = <uint64_t*>calloc(count + 1, sizeof(uint64_t))
        self.pointers = <void**>calloc(count + 1, sizeof(void*))
        if NULL in (<void*>self.kernels, <void*>self.moved, <void*>self.slots, <void*>self.pointers):
            raise MemoryError()
        cdef Py_ssize_t i = 0
        cdef uintptr_t handle
        for handle, blocks, threads, arguments in kernels:
            self.kernels[self.num_kernels] = Kernel(<void*>handle, blocks, threads, self.pointers + i)
            self.num_kernels += 1
            for argument in arguments:
                self.pointers[i] = self.slots + i
                if isinstance(argument, int):
                    self.slots[i] = argument
                elif isinstance(argument, tuple):
                    self.moved[self.num_addresses] = Address(self.slots + i, argument[0], argument[1])
                    self.num_addresses += 1
                elif isinstance(argument, generic):
                    cnp.PyArray_ScalarAsCtype(argument, self.slots + i)
                else:
                    raise TypeError(f"a kernel's argument: got {argument!r}")
                i += 1

    def __dealloc__(self):
        free(self.kernels)
        free(self.moved)
        free(self.slots)
        free(self.pointers)

    def start(self, uintptr_t stream, tuple addresses):
        """Start the kernels. Return the driver's first error, or 0.

        ``addresses``: of the blocks of memory in which `Moved` arguments lie.
        """
        cdef int i, error = 0
        cdef Address* address
        for i in range(self.num_addresses):
            address = self.moved + i
            address.slot[0] = <uint64_t>addresses[address.block] + address.offset
        with nogil:
            for i in range(self.num_kernels):
                kernel = self.kernels[i]
                error = self.launch(kernel.function, kernel.blocks, 1, 1, kernel.threads, 1, 1, 0, <void*>stream,
                                    kernel.arguments, NULL)
                if error:
                    break
        return error
