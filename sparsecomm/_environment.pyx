"""The settings' variables, read anew in each call: what `os.environ` takes a microsecond for, its own dict has at once."""

import os

cdef tuple NAMES = (
    b"SPARSECOMM_TIMEOUT", b"SPARSECOMM_THREADS", b"SPARSECOMM_SIMD", b"SPARSECOMM_PROFILE", b"XDG_CACHE_HOME",
)
# Of bytes. Not getenv(): another thread may change a variable meanwhile, which the C library does not allow for.
cdef object find = os.environ._data.get
last = ()  # for all threads, so it is no variable of C


def texts():
    """Return what the variables hold, bytes or None: the same tuple as before if nothing has changed."""
    global last
    cdef tuple found = tuple([find(name) for name in NAMES])
    before = last
    if found == before:
        return before
    last = found
    return found
