"""The gate: see the package. It restores all signal handlers and their flags when it opens."""

import _signal
import os
import sys
import threading
from functools import wraps
from types import FunctionType

from cpython.exc cimport PyErr_CheckSignals
from posix.signal cimport sigaction, sigaction_t

cdef extern from "Python.h":
    int PyErr_SetInterruptEx(int number)
    ctypedef object (*CFunction "PyCFunction")(object self, object argument)
    CFunction PyCFunction_GetFunction(object function) except? NULL
    int PyCFunction_GetFlags(object function)
    int METH_O
cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef tuple SIGNALS = tuple(sorted(int(number) for number in _signal.valid_signals()))
cdef object get_handler = _signal.getsignal
cdef object set_handler = _signal.signal
cdef sigaction_t of_python  # the C handler with which Python notes signals, and its flags; NULL until they are known

# The gate of the main thread, or of the simulated rank that runs.
cdef int depth = 0  # of nested gates
cdef list replaced = []  # a `NotingHandler` for each handler that this gate has replaced
cdef dict noted = {}  # the handlers of signals that have arrived since, by signal
cdef long long openings = 0  # number of times that the handlers of noted signals had a chance to run


cdef unsigned long main_thread = threading.main_thread().ident


cdef bint in_main_thread():
    return PyThread_get_thread_ident() == main_thread


cdef class NotingHandler:
    """A signal handler that notes its signal while the gate is closed.

    At other times, for example if the program has kept it, it calls the handler that it replaced.
    """

    cdef int number
    cdef readonly object handler
    cdef sigaction_t before

    def __call__(self, number, frame):
        if depth > 0 and in_main_thread():
            noted[number] = self.handler
            return None
        return self.handler(number, frame)

    cdef int replace(self) except -1:
        """Replace the handler, unless C code has installed one of its own."""
        sigaction(self.number, NULL, &self.before)
        if of_python.sa_handler != NULL and self.before.sa_handler != of_python.sa_handler:
            return 0
        try:
            former = set_handler(self.number, self)  # which first runs the handlers of signals that are pending
        except ValueError:  # this is a subinterpreter, which cannot set handlers
            return 0
        if of_python.sa_handler == NULL:
            sigaction(self.number, NULL, &of_python)
        self.handler = former
        replaced.append(self)
        if not callable(former) or self.before.sa_handler != of_python.sa_handler:
            replaced.pop()
            self.restore()
        return 0

    cdef int restore(self) except -1:
        """Restore the former handler, unless the program has set another one meanwhile."""
        error = None
        while get_handler(self.number) is self:
            try:
                set_handler(self.number, self.handler)
                if self.before.sa_flags != of_python.sa_flags or self.before.sa_handler != of_python.sa_handler:
                    sigaction(self.number, &self.before, NULL)
            except BaseException as raised:  # by the handler of a pending signal
                error = error or raised
        if error is not None:
            raise error
        return 0


cdef int replace_handlers() except -1:
    cdef NotingHandler noting
    cdef CFunction get = PyCFunction_GetFunction(get_handler)  # saves a quarter of the gate's time
    cdef bint direct = PyCFunction_GetFlags(get_handler) == METH_O
    for number in SIGNALS:
        handler = get(_signal, number) if direct else get_handler(number)
        if handler is None or type(handler) is int or type(handler) is NotingHandler:
            continue
        if callable(handler):
            noting = NotingHandler.__new__(NotingHandler)
            noting.number, noting.handler = number, handler
            noting.replace()
    return 0


cdef int close_gate(int nested) except -1:
    """Close the gate, even if the handler of a pending signal raises."""
    global depth
    depth = nested
    try:
        replace_handlers()
    except BaseException:
        replace_handlers()
        raise
    return 0


cdef int open_gate() except -1:
    """Open the gate: restore the handlers, and run those of the noted signals."""
    global depth, replaced, openings
    cdef NotingHandler noting
    depth = 0
    openings += 1
    notings, replaced = replaced, []
    error = None
    for noting in notings:
        try:
            noting.restore()
        except BaseException as raised:
            error = error or raised
    while noted and error is None:
        number = next(iter(noted))
        handler = noted.pop(number)
        try:
            handler(number, sys._getframe())
        except BaseException as raised:
            error = raised
    while noted:  # the handlers of other signals run soon
        PyErr_SetInterruptEx(noted.popitem()[0])
    if error is not None:
        raise error
    return 0


cdef int enter() except -1:
    global depth
    if depth > 0:
        depth += 1
        return 0
    try:
        close_gate(1)
    except BaseException:
        open_gate()
        raise
    return 0


cdef int leave() except -1:
    global depth
    if depth > 1:
        depth -= 1
    elif depth == 1:  # it is 0 in a process that was forked within a gate
        open_gate()
    return 0


def open_in_child():
    """Open the gate in a process that was forked within it: it handles its own signals."""
    global main_thread
    main_thread = threading.main_thread().ident
    noted.clear()
    open_gate()


os.register_at_fork(after_in_child=open_in_child)


def poll():
    """Run the handlers of signals that have arrived; they may raise. Waiting loops call this many times a second."""
    global openings
    PyErr_CheckSignals()
    if depth > 0 and in_main_thread():
        openings += 1
        if noted:
            with Opened():
                pass


def acquire(lock, double timeout=-1.0):
    """Acquire a lock within ``timeout`` seconds (negative: no limit) while polling; return whether it was acquired."""
    cdef double remaining = timeout, piece
    if lock.acquire(False):
        return True
    while timeout < 0 or remaining > 0:
        piece = 0.05 if timeout < 0 or remaining > 0.05 else remaining
        if lock.acquire(True, piece):
            return True
        poll()
        remaining -= piece
    return False


def swap(gate=None):
    """Replace the gate by ``gate``, or by an open one, and return the former gate. For simulated ranks."""
    global depth, replaced, noted
    former = depth, replaced, noted
    nested, replaced, noted = (0, [], {}) if gate is None else gate
    depth = nested
    if nested > 0:
        close_gate(nested)  # another rank may have restored the handlers
    return former


def state():
    """Return whether the gate is closed, and how often noted handlers had a chance to run. For tests."""
    return depth > 0, openings


cdef class Opened:
    """A context that opens a closed gate, so that handlers run at once: for the user's code, and to read files."""

    cdef int depth

    def __enter__(self):
        self.depth = depth if in_main_thread() else 0
        if self.depth > 0:
            try:
                open_gate()
            except BaseException:
                close_gate(self.depth)
                raise

    def __exit__(self, *error):
        if self.depth > 0:
            close_gate(self.depth)


cdef class PollingLock:
    """A reentrant lock. Waiting for it polls for signals."""

    cdef object lock

    def __cinit__(self):
        self.lock = threading.RLock()

    def __enter__(self):
        return acquire(self.lock)

    def __exit__(self, *error):
        self.lock.release()


cdef object uncompiled(object function, tuple args, dict kwargs):
    """Call a function while `torch.compile`, which may be running in this thread, compiles no frames."""
    eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
    if eval_frame is None:
        return function(*args, **kwargs)
    compiler = eval_frame.set_eval_frame(None)
    try:
        return function(*args, **kwargs)
    finally:
        if compiler is not None:
            eval_frame.set_eval_frame(compiler)


cdef object gated(function):
    @wraps(function)
    def within_gate(*args, **kwargs):
        if not in_main_thread():
            return uncompiled(function, args, kwargs)
        enter()
        try:
            return function(*args, **kwargs) if depth > 1 else uncompiled(function, args, kwargs)
        finally:
            leave()

    within_gate._torchdynamo_disable = True  # graphs of `torch.compile` end before a call, without a warning
    return within_gate


def deferred(what):
    """Decorate a function, or ``__init__`` and the public methods of a class, to run within the gate, uncompiled."""
    if not isinstance(what, type):
        return gated(what)
    for name, value in list(vars(what).items()):
        if isinstance(value, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(what, name, gated(value))
    return what
