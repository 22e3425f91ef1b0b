"""The call queue of a communicator, and the handles of calls that go on while the program does other things.

Calls on one transport are made one after another, in the order in which the program made them, whichever thread made
them and whether or not they block. Those that do not block are made by a thread of the queue. Where the transport
may not be used by another thread, they are made when the program waits for them.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import threading
from collections import deque
from concurrent.futures import Future
from itertools import count
from typing import Protocol
from weakref import WeakSet

from sparsecomm.backends import Backends
from sparsecomm.errors import InvalidInputError, RankFailedError, TimeoutError, TransportError
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.transport.scheduling import be_prompt

__all__ = ["CallQueue", "Handle", "Task", "queue_of"]

_log = logging.getLogger("sparsecomm")


class Task(Protocol):
    """A collective call that is ready to be made."""

    def run(self) -> SparseVector:
        """Make the call, and return its result."""

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why."""


class Handle:
    """A call in flight, as `sparsecomm.isparse_allreduce` returns it.

    Until it is done, x, residual and out belong to the call: do not change them, nor rely on what they hold.
    """

    def __init__(self, queue: CallQueue, task: Task) -> None:
        self._queue = queue
        self._task: Task | None = task
        self._future: Future[SparseVector] = Future()
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
        self._told = True
        return self._future.result()

    def test(self) -> bool:
        """Return whether the call is done, with a result or an error. Where no thread makes it, this makes it."""
        return self._future.done() or self._queue.run_or_wait(self, 0.0)

    @property
    def result(self) -> SparseVector:
        """The result of the call.

        Raises:
            InvalidInputError: the call is not done yet.
            SparseCommError: what the call raised.
        """
        if not self._future.done():
            raise InvalidInputError(f"rank {self._queue.rank}: the call is not done yet; call wait() first")
        return self.wait()

    @property
    def error(self) -> BaseException | None:
        """The error that the call raised; ``None``: none, or it is not done yet."""
        return self._future.exception() if self._future.done() else None

    def __repr__(self) -> str:
        if not self._future.done():
            return "Handle(in flight)"
        return "Handle(done)" if self.error is None else f"Handle(failed: {self.error})"

    def _run(self, failed: BaseException | None) -> None:
        """Make the call; or leave it, if the one before it has ``failed``."""
        task, self._task = self._task, None
        assert task is not None
        try:
            if failed is None:
                self._future.set_result(task.run())
            else:
                try:
                    task.leave(failed)
                finally:
                    self._future.set_exception(failed)
        except BaseException as error:
            if failed is None:
                self._future.set_exception(error)
        finally:
            del self  # the error holds this frame

    def _wait(self, timeout: float | None) -> bool:
        """Return whether the call is done within so many seconds."""
        try:
            self._future.exception(timeout)
        except concurrent.futures.TimeoutError:
            return self._future.done()
        return True

    def __del__(self) -> None:
        future = getattr(self, "_future", None)
        if future is not None and future.done() and future.exception() is not None and not self._told:
            _log.error("rank %s: a call failed, and nobody waited for it: %s", self._queue.rank, future.exception())


class CallQueue:
    """The call queue of one transport. All methods may be called from any thread."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.backends = Backends()  # of the calls, which are made one at a time
        self._threaded = transport.threaded
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._busy = False  # a call is being made
        self._runner = 0  # the thread that makes it
        self._thread: threading.Thread | None = None
        self._ending = False
        self._serial = next(_serials)
        self.users = 0  # how many have numbers in this queue, see `Reducer`
        _queues.add(self)

    def call(self, task: Task) -> SparseVector:
        """Make a call after those in the queue, and return its result."""
        self._check()
        with self._changed:
            free = not self._busy and not self._waiting
            if free:
                self._busy, self._runner = True, threading.get_ident()
        if not free:
            return self.submit(task).wait()
        try:
            return task.run()
        except TransportError as error:
            self._give_up(error)
            raise
        finally:
            self._free()

    def submit(self, task: Task) -> Handle:
        """Have a call made after those in the queue, and return its handle."""
        self._check()
        handle = Handle(self, task)
        with self._changed:
            self._waiting.append(handle)
            self._changed.notify_all()
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"sparsecomm-{self.rank}", daemon=True)
                self._thread.start()
        return handle

    def run_or_wait(self, handle: Handle, timeout: float | None) -> bool:
        """Wait until a call is done; make it here if no thread does. Return whether it is done."""
        if self._threaded and not self._ending:
            return handle._wait(timeout)
        while not handle._future.done() and self._run_next():
            pass
        return handle._wait(timeout)

    def _serve(self) -> None:
        be_prompt()
        while not self._ending:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
            self._run_next()

    def _run_next(self) -> bool:
        """Make the first call of the queue; return false if there is none."""
        with self._changed:
            while self._busy:
                self._changed.wait()
            if not self._waiting:
                return False
            handle = self._waiting.popleft()
            self._busy, self._runner = True, threading.get_ident()
        try:
            handle._run(None)
            if isinstance(handle.error, TransportError):
                self._give_up(handle.error)
        finally:
            self._free()
            del handle  # an error of it holds this frame
        return True

    def _give_up(self, error: TransportError) -> None:
        """Leave all calls in the queue: the job is in pieces, and no call should wait for it again."""
        with self._changed:
            left, self._waiting = self._waiting, deque()
        for handle in left:
            text = f"rank {self.rank} did not make this call, since one before it failed: {error}"
            dead = error.ranks if isinstance(error, RankFailedError) else None
            why = TransportError(text) if dead is None else RankFailedError(text, dead)
            why.__cause__ = error
            handle._run(why)

    def _free(self) -> None:
        with self._changed:
            self._busy, self._runner = False, 0
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
        if os.getpid() != self._process or self._runner == threading.get_ident():
            return
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        while self._run_next():
            pass
        if self._thread is not None:
            self._thread.join()


_queues: WeakSet[CallQueue] = WeakSet()
_serials = count()
_creating = threading.Lock()


@atexit.register
def _finish() -> None:
    """Finish all queues, in an order that is the same on all ranks, before MPI is finalised under their threads."""
    for queue in sorted(_queues, key=lambda queue: queue._serial):
        queue.finish()


def queue_of(transport: Transport) -> CallQueue:
    """Return the call queue of a transport."""
    found = transport.queue
    if isinstance(found, CallQueue):
        return found
    with _creating:
        if transport.queue is None:
            transport.queue = CallQueue(transport)
        made = transport.queue
    assert isinstance(made, CallQueue)
    return made
