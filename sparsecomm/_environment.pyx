"""The settings' variables, read anew in each call: what `os.environ` takes a microsecond for, the C library has at once."""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdlib cimport getenv
from libc.string cimport strcmp

cdef tuple NAMES = (
    b"SPARSECOMM_TIMEOUT", b"SPARSECOMM_THREADS", b"SPARSECOMM_SIMD", b"SPARSECOMM_PROFILE", b"XDG_CACHE_HOME",
)
cdef tuple last = ()


cdef bint unchanged():
    cdef const char *text
    cdef bytes name
    cdef Py_ssize_t i = 0
    if len(last) != len(NAMES):
        return False
    for name in NAMES:
        text = getenv(PyBytes_AS_STRING(name))
        if text == NULL:
            if last[i] is not None:
                return False
        elif last[i] is None or strcmp(text, PyBytes_AS_STRING(last[i])) != 0:
            return False
        i += 1
    return True


def texts():
    """Return what the variables hold, bytes or None: the same tuple as before if nothing has changed."""
    global last
    cdef const char *text
    cdef bytes name
    cdef list found
    if not unchanged():
        found = []
        for name in NAMES:
            text = getenv(PyBytes_AS_STRING(name))
            found.append(None if text == NULL else <bytes> text)
        last = tuple(found)
    return last
