# cython: language_level=3
"""The MPI that this installation was compiled for.

Reads macros of ``mpi.h`` and calls no MPI function, so that it loads beside any MPI, and without one. The module
that does call MPI can then be refused with a clear error instead of a crash.
"""

cdef extern from *:
    """
    #include <mpi.h>
    #define SC_TEXT_(x) #x
    #define SC_TEXT(x) SC_TEXT_(x)
    #if defined(OPEN_MPI)
    #  define SC_ABI "openmpi"
    #  define SC_BUILT_FOR "Open MPI " SC_TEXT(OMPI_MAJOR_VERSION) "." SC_TEXT(OMPI_MINOR_VERSION) \
                           "." SC_TEXT(OMPI_RELEASE_VERSION)
    #elif defined(MPI_ABI_VERSION)
    #  define SC_ABI "mpiabi"
    #  define SC_BUILT_FOR "the standard MPI ABI, version " SC_TEXT(MPI_ABI_VERSION)
    #elif defined(MPICH_VERSION)  /* and those made from it: Intel MPI, MVAPICH, Cray MPICH */
    #  define SC_ABI "mpich"
    #  define SC_BUILT_FOR "MPICH " MPICH_VERSION
    #else
    #  define SC_ABI "unknown"
    #  define SC_BUILT_FOR "an unknown MPI of standard " SC_TEXT(MPI_VERSION) "." SC_TEXT(MPI_SUBVERSION)
    #endif
    """
    const char *SC_ABI
    const char *SC_BUILT_FOR

abi = SC_ABI.decode()
built_for = SC_BUILT_FOR.decode()
