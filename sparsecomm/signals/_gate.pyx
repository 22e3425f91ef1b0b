"""A gate for signals: within it, Python's signal handlers wait until the code polls for signals, or leaves the gate.

Python runs signal handlers in the main thread, between any two instructions. What a handler raises, such as
KeyboardInterrupt, could then come between an effect and the record of it, and a gradient would be lost or count twice.
`deferred` closes the gate around a function: each handler is replaced by one that notes the signal. Loops that wait
call `poll`, which runs the handlers of noted signals and lets their exceptions through. Other threads run no handlers.
"""

import _signal
import os
import sys
import threading
from functools import wraps
from types import FunctionType

from cpython.exc cimport PyErr_CheckSignals

cdef extern from "Python.h":
    int PyErr_SetInterruptEx(int number)
cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef tuple SIGNALS = tuple(sorted(int(number) for number in _signal.valid_signals()))
cdef object get_handler = _signal.getsignal
cdef object set_handler = _signal.signal
cdef dict handlers = {}  # signal -> the handler that a gate has replaced last

# The gate of the main thread; of the rank that runs, if ranks are simulated.
cdef int depth = 0  # of nested gates
cdef list replaced = []  # signals whose handlers this gate has replaced
cdef list noted = []  # signals that have come since
cdef long long openings = 0  # how often noted signals could be handled so far


cdef bint in_main_thread():
    return PyThread_get_thread_ident() == <unsigned long>threading.main_thread().ident


def note(number, frame):
    """Note a signal within a gate; elsewhere, call the handler that was there before."""
    if depth > 0 and in_main_thread():
        if number not in noted:  # as Python does, which runs a handler once for signals that came before it could
            noted.append(number)
        return None
    return handlers[number](number, frame)


cdef int replace_handlers() except -1:
    for number in SIGNALS:
        handler = get_handler(number)
        if handler is not None and type(handler) is not int and handler is not note and callable(handler):
            handlers[number] = handler
            set_handler(number, note)  # which first runs the handlers of signals that are pending
            replaced.append(number)
    return 0


cdef int restore_handlers() except -1:
    global replaced
    numbers, replaced = replaced, []
    error = None
    for number in numbers:
        if get_handler(number) is not note:
            continue  # the program has set another one meanwhile
        try:
            set_handler(number, handlers[number])
        except BaseException as raised:  # by the handler of a pending signal; the next attempt has none
            error = error or raised
            set_handler(number, handlers[number])
    if error is not None:
        raise error
    return 0


cdef int handle_noted() except -1:
    global openings
    openings += 1
    while noted:
        number = noted.pop(0)
        handlers[number](number, sys._getframe())
    return 0


cdef int enter() except -1:
    global depth
    depth += 1
    if depth == 1:
        try:
            replace_handlers()
        except BaseException:
            leave()
            raise
    return 0


cdef int leave() except -1:
    global depth
    if depth > 0:  # it is 0 in a process that was forked within a gate
        depth -= 1
    if depth == 0:
        try:
            restore_handlers()
        finally:
            try:
                handle_noted()
            finally:
                while noted:  # the handlers of other signals run soon, if one has raised
                    PyErr_SetInterruptEx(noted.pop(0))
    return 0


def open_in_child():
    """Open the gate in a process that was forked within it: it handles its own signals."""
    global depth
    depth = 0
    noted.clear()
    restore_handlers()


os.register_at_fork(after_in_child=open_in_child)


def poll():
    """Run the handlers of signals that have come; they may raise. Loops that wait call this many times a second."""
    PyErr_CheckSignals()
    if depth > 0 and in_main_thread():
        handle_noted()


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
    """Exchange the gate for another one, or for an open one; return the former. For simulated ranks."""
    global depth, replaced, noted
    former = depth, replaced, noted
    depth, replaced, noted = (0, [], []) if gate is None else gate
    if depth > 0:
        replace_handlers()  # another rank may have restored them
    return former


def state():
    """Return whether the gate is closed, and how often noted signals could be handled so far. For tests."""
    return depth > 0, openings


cdef class Opened:
    """A context within a gate in which handlers run at once: for a user's code, and for files."""

    cdef int depth

    def __enter__(self):
        global depth
        self.depth = depth if in_main_thread() else 0
        if self.depth > 0:
            depth = 1
            try:
                leave()
            except BaseException:
                self.close()
                raise

    def __exit__(self, *error):
        if self.depth > 0:
            self.close()

    cdef int close(self) except -1:
        """Close the gate again, also if the handler of a pending signal raises meanwhile."""
        global depth
        depth = self.depth
        try:
            replace_handlers()
        except BaseException:
            replace_handlers()
            raise
        return 0


cdef class PollingLock:
    """A lock that its thread may take again. To wait for it polls for signals."""

    cdef object lock

    def __cinit__(self):
        self.lock = threading.RLock()

    def __enter__(self):
        return acquire(self.lock)

    def __exit__(self, *error):
        self.lock.release()


cdef object gated(function):
    @wraps(function)
    def within_gate(*args, **kwargs):
        if not in_main_thread():
            return function(*args, **kwargs)
        enter()
        try:
            return function(*args, **kwargs)
        finally:
            leave()

    return within_gate


def deferred(what):
    """Return a function that closes the gate around ``what``; of a class, change its public methods to such functions."""
    if not isinstance(what, type):
        return gated(what)
    for name, value in list(vars(what).items()):
        if isinstance(value, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(what, name, gated(value))
    return what
