"""Calls that go on while the program does other things: one line of them per transport, and a handle for each.

Calls on one transport happen one after another, in the order in which the program made them, whichever thread made
them and whether or not they block. Those that do not block are made by a thread of the line. Where the transport
may not be used by another thread, they are made when the program waits for them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from itertools import count
from typing import Protocol
from weakref import WeakSet

from sparsecomm.calls.scheduling import be_prompt
from sparsecomm.errors import InvalidInputError, TimeoutError, TransportError
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["CallQueue", "Handle", "Task", "queue_of"]

_log = logging.getLogger("sparsecomm")


class Task(Protocol):
    """A collective call that is ready to be made."""

    def run(self) -> SparseVector:
        """Make it."""

    def leave(self, error: BaseException) -> None:
        """Do not make it: tell the other ranks, who may."""


class Handle:
    """A call under way, as `isparse_allreduce` returns it.

    Until it is done, x, residual and out belong to the call: do not change them, nor rely on what they hold.
    """

    def __init__(self, queue: CallQueue, work: Task) -> None:
        self._queue = queue
        self._work: Task | None = work
        self._done = threading.Event()
        self._value: SparseVector | None = None
        self._error: BaseException | None = None
        self._told = False  # somebody has seen the error

    def wait(self, timeout: float | None = None) -> SparseVector:
        """Wait until the call is done, and return its result. May be called again, and then does the same again.

        An interrupt (Ctrl-C) ends the wait, not the call.

        Args:
            timeout: seconds to wait; ``None``: as long as it takes, which ``SPARSECOMM_TIMEOUT`` bounds.

        Raises:
            TimeoutError: the call is not done yet. It goes on: wait again.
            SparseCommError: what the call raised, as `sparse_allreduce` does.
        """
        if not self._queue.run_or_wait(self, timeout):
            raise TimeoutError(
                f"rank {self._queue.rank}: the call was not done within {timeout:g} s; it goes on: wait again"
            )
        if self._error is not None:
            self._told = True
            raise self._error
        assert self._value is not None
        return self._value

    def test(self) -> bool:
        """Whether the call is done, with a result or an error. Where no thread makes it, this makes it."""
        return self._done.is_set() or self._queue.run_or_wait(self, 0.0)

    @property
    def result(self) -> SparseVector:
        """What `wait` returned.

        Raises:
            InvalidInputError: the call is not done yet.
            SparseCommError: what the call raised.
        """
        if not self._done.is_set():
            raise InvalidInputError(f"rank {self._queue.rank}: the call is not done yet; call wait() first")
        return self.wait()

    @property
    def error(self) -> BaseException | None:
        """What the call raised; ``None``: nothing, or it is not done yet."""
        return self._error if self._done.is_set() else None

    def __repr__(self) -> str:
        state = "under way" if not self._done.is_set() else "done" if self._error is None else f"failed: {self._error}"
        return f"Handle({state})"

    def _make(self, failed: BaseException | None) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            if failed is None:
                self._value = work.run()
            else:
                self._error = failed
                work.leave(failed)
        except BaseException as error:
            if failed is None:
                self._error = error
        finally:
            self._done.set()
            del self  # the error holds this frame

    def __del__(self) -> None:
        if getattr(self, "_error", None) is not None and not self._told:
            _log.error("rank %s: a call failed, and nobody waited for it: %s", self._queue.rank, self._error)


class CallQueue:
    """The calls on one transport. All methods may be called from any thread."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self._threaded = transport.threaded
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._busy = False  # a call is being made
        self._making = 0  # by this thread
        self._thread: threading.Thread | None = None
        self._ending = False
        self._born = next(_births)
        self.users = 0  # how many have numbers in this line, see `Reducer`
        _queues.add(self)

    def call(self, work: Task) -> SparseVector:
        """Make a call after those that are under way, and return its result."""
        self._check()
        with self._changed:
            free = not self._busy and not self._waiting
            if free:
                self._busy, self._making = True, threading.get_ident()
        if not free:
            return self.submit(work).wait()
        try:
            return work.run()
        except TransportError as error:
            self._give_up(error)
            raise
        finally:
            self._free()

    def submit(self, work: Task) -> Handle:
        """Have a call made after those that are under way."""
        self._check()
        handle = Handle(self, work)
        with self._changed:
            self._waiting.append(handle)
            self._changed.notify_all()
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"sparsecomm-{self.rank}", daemon=True)
                self._thread.start()
        return handle

    def run_or_wait(self, handle: Handle, timeout: float | None) -> bool:
        """Wait until a call is done; make it here if no thread does. Whether it is done."""
        if self._threaded and not self._ending:
            return handle._done.wait(timeout)
        while not handle._done.is_set() and self._make_next():
            pass
        return handle._done.wait(timeout)

    def _serve(self) -> None:
        be_prompt()
        while not self._ending:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
            self._make_next()

    def _make_next(self) -> bool:
        """Make the first call of the queue; false if there is none."""
        with self._changed:
            while self._busy:
                self._changed.wait()
            if not self._waiting:
                return False
            handle = self._waiting.popleft()
            self._busy, self._making = True, threading.get_ident()
        try:
            handle._make(None)
            if isinstance(handle._error, TransportError):
                self._give_up(handle._error)
        finally:
            self._free()
            del handle  # an error of it holds this frame
        return True

    def _give_up(self, error: TransportError) -> None:
        """The job is in pieces: do not wait for it again and again."""
        with self._changed:
            left, self._waiting = self._waiting, deque()
        for handle in left:
            why = TransportError(f"rank {self.rank} did not make this call, since one before it failed: {error}")
            why.__cause__ = error
            handle._make(why)

    def _free(self) -> None:
        with self._changed:
            self._busy, self._making = False, 0
            self._changed.notify_all()

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"this communicator belongs to process {self._process}, of which this one, {os.getpid()}, is a fork; "
                "its connections and threads do not survive that: make the call in the process that started, or start "
                "this one by spawning, with a communicator of its own"
            )

    def finish(self) -> None:
        """Make what was submitted and has not been made: other ranks may be waiting for it.

        Not from within a call, where the garbage collector may ask for it: nobody could then end that call.
        """
        if os.getpid() != self._process or self._making == threading.get_ident():
            return
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        while self._make_next():
            pass
        if self._thread is not None:
            self._thread.join()


_queues: WeakSet[CallQueue] = WeakSet()
_births = count()
_making = threading.Lock()


@atexit.register
def _finish() -> None:
    """A thread that talks while MPI is being finalised would crash. In an order that is the same on all ranks."""
    for queue in sorted(_queues, key=lambda queue: queue._born):
        queue.finish()


def queue_of(transport: Transport) -> CallQueue:
    """The line of a transport."""
    found = transport.queue
    if isinstance(found, CallQueue):
        return found
    with _making:
        if transport.queue is None:
            transport.queue = CallQueue(transport)
        made = transport.queue
    assert isinstance(made, CallQueue)
    return made
