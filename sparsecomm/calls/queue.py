"""The call queue of a communicator, and the handles of calls that go on while the program does other things.

Calls on one transport are made one after another, in the order in which the program made them, whichever thread made
them and whether or not they block. Those that do not block are made by a thread of the queue. Where the transport
may not be used by another thread, they are made when the program waits for them.

Signal handlers may raise between any two instructions of the main thread, and `threading`'s conditions, events and
threads are Python code, which would keep their locks then. So nothing here is locked: one call of `dict.setdefault`
claims the queue, one of `deque.append` submits a call, and a thread that missed a wake looks again soon.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock, get_ident
from typing import Protocol
from weakref import WeakSet

from sparsecomm.backends import Backends
from sparsecomm.checks import number, shown
from sparsecomm.errors import InvalidInputError, RankFailedError, TimeoutError, TransportError, text_of
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.transport.scheduling import be_prompt

__all__ = ["CallQueue", "Handle", "Task", "queue_of"]

_log = logging.getLogger("sparsecomm")

_OWNER = "owner"
_POLL = 0.05  # seconds after which a thread that waits for a call, or for its turn, looks again
_IDLE = 0.5  # the same of a thread that waits for calls to make
_ATTEMPTS = 10  # to leave a call


class Task(Protocol):
    """A collective call that is ready to be made."""

    def run(self) -> SparseVector:
        """Make the call, and return its result. If an exception of a signal handler divides the two, call it again."""

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why.

        If it has an attribute ``over``, this says whether `run` or `leave` has come so far that nothing is left to do.
        """


class Handle:
    """A call in flight, as `sparsecomm.isparse_allreduce` returns it.

    Until it is done, x, residual and out belong to the call: do not change them, nor rely on what they hold.
    """

    def __init__(self, queue: CallQueue, task: Task) -> None:
        self._queue = queue
        self._task: Task | None = task
        self._failed: BaseException | None = None  # why the call is to be left instead of made
        self._outcome: tuple[SparseVector | None, BaseException | None] | None = None
        self._done = Lock()  # released when there is an outcome
        self._done.acquire()
        self._told = False  # somebody has seen the error

    def wait(self, timeout: float | None = None) -> SparseVector:
        """Wait until the call is done, and return its result. May be called again, and then does the same again.

        An interrupt (Ctrl-C) ends the wait, not the call. Only where no thread makes calls, and this one is being made
        here, it ends the call as it ends `sparse_allreduce`.

        Args:
            timeout: seconds to wait; ``None``: as long as it takes, which ``SPARSECOMM_TIMEOUT`` bounds.

        Raises:
            TimeoutError: the call is not done yet. It goes on: wait again.
            SparseCommError: what the call raised, as `sparse_allreduce` does.
        """
        if timeout is not None and math.isnan(number(timeout)):
            raise InvalidInputError(f"timeout={shown(timeout)}: expected a number of seconds, or None")
        if not self._queue.run_or_wait(self, timeout):
            raise TimeoutError(
                f"rank {self._queue.rank}: the call was not done within {timeout:g} s; it goes on: wait again"
            )
        self._told = True
        assert self._outcome is not None
        result, error = self._outcome
        try:
            if error is not None:
                raise error
            assert result is not None
            return result
        finally:
            del error, self  # the error holds this frame

    def test(self) -> bool:
        """Return whether the call is done, with a result or an error. Where no thread makes it, this makes it."""
        return self._outcome is not None or self._queue.run_or_wait(self, 0.0)

    @property
    def result(self) -> SparseVector:
        """The result of the call.

        Raises:
            InvalidInputError: the call is not done yet.
            SparseCommError: what the call raised.
        """
        if self._outcome is None:
            raise InvalidInputError(f"rank {self._queue.rank}: the call is not done yet; call wait() first")
        return self.wait()

    @property
    def error(self) -> BaseException | None:
        """The error that the call raised; ``None``: none, or it is not done yet."""
        return None if self._outcome is None else self._outcome[1]

    def __repr__(self) -> str:
        if self._outcome is None:
            return "Handle(in flight)"
        return "Handle(done)" if self.error is None else f"Handle(failed: {text_of(self.error)})"

    def _run(self) -> None:
        """Make the call, or leave it. If an exception comes out of this, there may be no outcome yet: call it again."""
        task = self._task
        try:
            if self._outcome is None and self._failed is None and task is not None:
                self._outcome = task.run(), None
        except BaseException as error:
            if self._outcome is None and getattr(task, "over", True):
                self._outcome = None, error
            elif self._outcome is None:
                self._failed = error  # it was interrupted before it began: others wait for it
        attempts = 0
        while self._outcome is None and task is not None:
            try:
                attempts += 1
                task.leave(self._failed or RuntimeError())
            except BaseException:
                pass
            if attempts == _ATTEMPTS or getattr(task, "over", True):
                self._outcome = None, self._failed
        self._task = None
        del self, task  # the error holds this frame

    def _wake_waiters(self) -> None:
        """Wake those who wait."""
        if self._outcome is not None and self._done.locked():
            with contextlib.suppress(RuntimeError):  # somebody else was quicker
                self._done.release()

    def _wait(self, timeout: float | None) -> bool:
        """Return whether the call is done within so many seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
            if left <= 0:
                return False
            if self._done.acquire(timeout=left):
                self._done.release()
        return True

    def __del__(self) -> None:
        outcome = getattr(self, "_outcome", None)
        if outcome is not None and outcome[1] is not None and not self._told:
            _log.error("rank %s: a call failed, and nobody waited for it: %s", self._queue.rank, text_of(outcome[1]))


class _Claim:
    """What makes its owner the one who makes calls: a local variable named ``claim`` of a method of `CallQueue`."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = get_ident()

    def held(self) -> bool:
        """Return whether the method whose claim this is still runs."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            if frame.f_code in _CLAIMING and frame.f_locals.get("claim") is self:
                return True
            frame = frame.f_back
        return False


class CallQueue:
    """The call queue of one transport. All methods may be called from any thread."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.backends = Backends()  # of the calls, which are made one at a time
        self._threaded = transport.threaded
        self._process = os.getpid()
        self._claims: dict[str, _Claim] = {}  # whoever has put one there makes calls
        self._taking_over = Lock()
        self._waiting: deque[Handle] = deque()  # the first one may be under way
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._started = False  # there is a thread
        self._thread = 0  # which it is
        self._ended = Lock()  # the thread holds it
        self._ending = False
        self._postponed: list[Callable[[], object]] = []  # until the end of the call that is being made
        self._serial = next(_serials)
        self.users = 0  # how many have numbers in this queue, see `Reducer`
        _queues.add(self)

    def call(self, task: Task) -> SparseVector:
        """Make a call after those in the queue, and return its result.

        Raises:
            InvalidInputError: this was called within a call of the same thread.
        """
        self._check()
        claim = _Claim()
        try:
            if not self._waiting and self._claims.setdefault(_OWNER, claim) is claim:
                return task.run()
        except TransportError as error:
            self._fail_waiting(error, list(self._waiting))
            raise
        finally:
            if _OWNER in self._claims and self._claims[_OWNER] is claim:
                del self._claims[_OWNER]  # no signal comes between these three
                self._after_call()
                if self._waiting and not self._threaded:
                    self._run_next(leave=True)
        return self._call_in_turn(task)

    def _call_in_turn(self, task: Task) -> SparseVector:
        self._refuse_within_call()
        handle = Handle(self, task)
        try:
            self.enqueue(handle)
            return handle.wait()
        except BaseException as error:
            if handle in self._waiting:  # it is left, if it has not begun; only then x and others are the caller's
                handle._failed = error
                self.run_or_wait(handle, None)
            handle._told = True
            raise
        finally:
            del handle  # the error holds this frame

    def submit(self, task: Task) -> Handle:
        """Have a call made after those in the queue, and return its handle."""
        handle = Handle(self, task)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> None:
        """Have the call of a handle of this queue made, once. Call it again if an exception has interrupted it."""
        self._check()
        there = handle in self._waiting or handle._outcome is not None
        if not there:
            self._waiting.append(handle)
        if self._threaded and not self._started:
            _thread.start_new_thread(self._serve, ())  # a second one, after a signal, waits until the first one ends
            self._started = True
        if not there:
            self._wake.put(None)

    def run_or_wait(self, handle: Handle, timeout: float | None) -> bool:
        """Wait until a call is done; make it here if no thread does. Return whether it is done."""
        if self._threaded and not self._ending:
            return handle._wait(timeout)
        while handle._outcome is None and (made := self._run_next()) is not None:
            if made is not handle and made.error is not None and not isinstance(made.error, Exception):
                made._told = True
                raise made.error  # Ctrl-C came while an earlier call was made
        return handle._wait(timeout)

    def _serve(self) -> None:
        with self._ended:
            self._thread = get_ident()
            be_prompt()
            while not self._ending:
                if self._run_next() is None:
                    self._sleep(_IDLE)

    def _run_next(self, *, leave: bool = False) -> Handle | None:
        """Make the first call of the queue and leave those that fail with it; return it, or None if there was none.

        Args:
            leave: only if the first call is one to be left.
        """
        if not self._waiting:
            return None
        claim, made = _Claim(), list[Handle]()
        try:
            while self._claims.setdefault(_OWNER, claim) is not claim:
                self._refuse_within_call()
                self._sleep(_POLL)
            while self._waiting and (self._waiting[0]._failed is not None or not (made or leave)):
                made.append(self._waiting[0])
                made[-1]._run()
                error = made[-1].error
                if isinstance(error, TransportError) and made[-1]._failed is None:
                    self._fail_waiting(error, list(self._waiting)[1:])
                self._waiting.popleft()
            return made[0] if made else None
        finally:
            if _OWNER in self._claims and self._claims[_OWNER] is claim:
                del self._claims[_OWNER]  # no signal comes between these three
                self._after_call()
            for handle in made:
                handle._wake_waiters()
            error = handle = made = None  # type: ignore[assignment] # an error of one holds this frame

    def _fail_waiting(self, error: TransportError, handles: list[Handle]) -> None:
        """Have these calls left: the job is in pieces, and no call should wait for it again."""
        for handle in handles:
            text = f"rank {self.rank} did not make this call, since one before it failed: {text_of(error)}"
            dead = error.ranks if isinstance(error, RankFailedError) else None
            why = TransportError(text) if dead is None else RankFailedError(text, dead)
            why.__cause__ = error
            handle._failed = why

    def _after_call(self) -> None:
        """Go on with what waited for the end of a call."""
        if self._waiting:
            self._wake.put(None)
        while self._postponed:
            self.finish(self._postponed.pop())

    def _refuse_within_call(self) -> None:
        """Raise if this thread is making a call; give back a claim whose owner is gone."""
        owner = self._claims.get(_OWNER)
        if owner is None:
            return
        if not owner.held():
            with self._taking_over:
                if self._claims.get(_OWNER) is owner:
                    del self._claims[_OWNER]
        elif owner.thread == get_ident():
            raise InvalidInputError(
                f"rank {self.rank}: this call was made while the same thread makes another one on this communicator, "
                "by a signal handler or by a finaliser (`__del__`); make it when that one has returned, or on another "
                "communicator"
            )

    def _sleep(self, seconds: float) -> None:
        """Wait until something has changed, or so many seconds."""
        with contextlib.suppress(Empty):
            self._wake.get(timeout=seconds)

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"this communicator belongs to process {self._process}, of which this one, {os.getpid()}, is a fork; "
                "its connections and threads do not survive that: make the call in the process that started, or start "
                "this one by spawning, with a communicator of its own"
            )

    def finish(self, then: Callable[[], object] | None = None) -> None:
        if os.getpid() != self._process:
            return
        owner = self._claims.get(_OWNER)
        if owner is not None and owner.thread == get_ident() and owner.held():
            if then is not None:
                self._postponed.append(then)
            return
        self._ending = True
        while self._run_next() is not None:
            pass
        while self._thread not in (0, get_ident()):
            self._wake.put(None)
            if self._ended.acquire(timeout=_POLL):
                self._ended.release()
                break
        if then is not None:
            then()


# Those in whose frames a claim is.
_CLAIMING = frozenset((CallQueue.call.__code__, CallQueue._run_next.__code__))
_queues: WeakSet[CallQueue] = WeakSet()
_serials = count()
_creating = Lock()


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
