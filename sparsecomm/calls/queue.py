"""The call queue of a communicator, and the handles of calls that go on while the program does other things.

Calls on one transport are made one after another, in the order in which the program made them, whichever thread made
them and whether or not they block. Those that do not block are made by a thread of the queue. Where the transport
may not be used by another thread, they are made when the program waits for them.

One lock stands for the right to make calls. This module is compiled, so that an exception of a signal handler comes
where a lock is waited for, or within a call, and nowhere else. An error keeps no variables of compiled functions alive.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from threading import Lock, get_ident
from typing import Protocol
from weakref import ref

from sparsecomm import config
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.backends import Backends
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.tracing import observers_of
from sparsecomm.checks import FAULTS, quote, to_float
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    TimeoutError,
    TransportError,
    text_of,
)
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.tracing.observers import ObservedBackends, Observer, observe
from sparsecomm.transport import Transport
from sparsecomm.transport.scheduling import be_prompt
from sparsecomm.tuning.profile import KnownCosts

__all__ = ["CallQueue", "Handle", "Plans", "Task", "queue_of"]

_log = logging.getLogger("sparsecomm")
_MAX_PLANS = 1024  # of one communicator: more than a model has tensors; each takes some KB


class Task(Protocol):
    """A collective call that is ready to be made: once, by `run` or by `leave`."""

    def run(self) -> SparseVector:
        """Make the call, and return its result. If it raises, the call is over."""

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why."""


class Handle:
    """A call in flight, as `sparsecomm.isparse_allreduce` returns it.

    Until it is done, x, residual and out belong to the call: do not change them, nor rely on what they hold.
    """

    def __init__(self, queue: CallQueue, task: Task) -> None:
        self._queue = queue
        self._task: Task | None = task
        self._refused: BaseException | None = None  # why the call is to be left instead of made
        self._outcome: tuple[SparseVector | None, BaseException | None] | None = None
        self._undone = Lock()  # held until there is an outcome
        self._undone.acquire()
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
        if timeout is not None and math.isnan(to_float(timeout)):
            raise InvalidInputError(f"timeout={quote(timeout)}: expected a number of seconds, or None")
        try:
            done = self._queue.run_or_wait(self, timeout)
        except KeyboardInterrupt as interrupt:
            describe = getattr(self._task, "describe", None)
            if not interrupt.args and describe is not None:
                interrupt.args = (f"rank {self._queue.rank} was interrupted while it waited for a call, {describe()}",)
            raise
        if not done:
            raise TimeoutError(
                f"rank {self._queue.rank}: the call was not done within {timeout:g} s; it goes on: wait again"
            )
        assert self._outcome is not None
        result, error = self._outcome
        if isinstance(error, CollectiveMismatchError) and not self._told:
            self._queue.forget_measured()
        self._told = True
        if error is not None:
            raise error
        assert result is not None
        return result

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

    def __del__(self) -> None:
        outcome = getattr(self, "_outcome", None)
        if outcome is not None and outcome[1] is not None and not self._told:
            _log.error("rank %s: a call failed, and nobody waited for it: %s", self._queue.rank, text_of(outcome[1]))

    def _run(self) -> None:
        """Make the call, or leave it, and wake those who wait."""
        task, refused = self._task, self._refused
        assert task is not None
        try:
            if refused is None:
                self._outcome = task.run(), None
            else:
                task.leave(refused)
                self._outcome = None, refused
        except BaseException as error:
            self._outcome = None, refused or error
        self._task = None
        self._undone.release()

    def _wait(self, timeout: float | None) -> bool:
        """Return whether the call is done within so many seconds."""
        if self._outcome is None:
            bound = -1.0 if timeout is None else min(max(timeout, 0.0), _thread.TIMEOUT_MAX)
            if self._undone.acquire(timeout=bound):
                self._undone.release()
        return self._outcome is not None


class Plans:
    """The plans of a communicator: the latest that were made, until a setting or the registry of algorithms changes.

    A key that cannot be hashed or compared has none: its arguments are refused, or checked in every call.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._settings, self._algorithms = config.texts(), len(ALGORITHMS)  # for which they hold

    def find(self, key: Hashable) -> Plan | None:
        """Return the plan that was kept by that key; ``None`` if there is none, or it holds no more."""
        settings, algorithms = config.texts(), len(ALGORITHMS)
        if self._settings is not settings or self._algorithms != algorithms:
            self._plans.clear()
            self._settings, self._algorithms = settings, algorithms
        try:
            return self._plans.get(key)
        except FAULTS:
            return None

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def keep(self, key: Hashable, plan: Plan) -> None:
        """Keep a plan that was not found, in place of the oldest one if there are too many."""
        if len(self._plans) >= _MAX_PLANS:
            self._plans.pop(next(iter(list(self._plans)), None), None)
        try:  # noqa: SIM105 - what leaves `suppress` is bytecode
            self._plans[key] = plan
        except FAULTS:
            pass


class CallQueue:
    """The call queue of one transport. All methods may be called from any thread.

    Attributes:
        rank: of the transport.
        plans: of its calls.
        backends: of its calls, which are made one at a time.
        observers: of its calls.
        users: how many have numbers in this queue, see `Reducer`.
        measured: the costs that the ranks have measured, see `sparsecomm.calls.measurement`; None: not yet.
        measuring: the call that does so, while a reducer waits for it, or is to wait again.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank, self.plans, self.backends, self.users = transport.rank, Plans(), Backends(), 0
        self.observers: list[Observer] = []
        self.measured: KnownCosts | None = None
        self.measuring: Handle | None = None
        self._threaded = transport.threaded
        self._process = os.getpid()
        self._making = Lock()  # whoever holds it makes calls
        self._maker = 0  # the thread that does
        self._waiting: deque[Handle] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()  # of the thread, where there is one
        self._start = Lock()  # acquired once and never released, by the caller that starts the thread
        self._started = self._ending = False
        self._thread = 0  # which it is
        self._ended = Lock()  # the thread holds it
        self._postponed: list[Callable[[], object]] = []  # until the end of the call that is being made
        for observer in observers_of(transport):
            self.observe(transport, observer)
        _queues[:] = [known for known in _queues if known() is not None] + [ref(self)]

    def observe(self, transport: Transport, observer: Observer) -> None:
        """Have somebody observe the calls from now on, of which none is under way."""
        observe(transport, observer)
        self.backends = ObservedBackends(self.backends, observer)
        self.observers.append(observer)
        self.plans.clear()

    def call(self, task: Task) -> SparseVector:
        """Make a call after those in the queue, and return its result.

        Raises:
            InvalidInputError: this was called within a call of the same thread.
        """
        self._check()
        if self._waiting or not self._making.acquire(blocking=False):
            return self._call_in_turn(task)
        self._maker = get_ident()
        try:
            return task.run()
        except TransportError as error:
            self._refuse_waiting(error)
            raise
        except CollectiveMismatchError:
            self.forget_measured()
            raise
        finally:
            self._leave_refused()
            self._maker = 0
            self._making.release()
            self._after_call()

    def submit(self, task: Task) -> Handle:
        """Have a call made after those in the queue, and return its handle."""
        handle = Handle(self, task)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> None:
        """Have the call of a handle of this queue made."""
        self._check()
        self._waiting.append(handle)
        if self._threaded:
            if not self._started and self._start.acquire(blocking=False):
                try:
                    _thread.start_new_thread(self._serve, ())
                    self._started = True
                finally:
                    if not self._started:
                        self._start.release()
            self._wake.put(None)

    def run_or_wait(self, handle: Handle, timeout: float | None) -> bool:
        """Wait until a call is done; make it here if no thread does. Return whether it is done."""
        while not (self._threaded and not self._ending) and handle._outcome is None:
            made = self._run_next()
            if made is None:
                break
            if made is not handle and made.error is not None and not isinstance(made.error, Exception):
                made._told = True
                raise made.error  # Ctrl-C came while an earlier call was made
        return handle._wait(timeout)

    def forget_measured(self) -> None:
        """Have costs measured again, where they were. Called on all ranks when a call has told that they do not match.

        For it may be that some ranks have measured, and others have left that call with an error when these were done.
        """
        if self.measured is not None:
            self.use_measured(None)

    def use_measured(self, costs: KnownCosts | None) -> None:
        """Have calls choose by costs that ranks have measured, the same on all; ``None``: they are to be measured."""
        self.measured = costs
        self.plans.clear()

    def refuse_within_call(self) -> None:
        """Raise if this thread is making a call.

        Raises:
            InvalidInputError: it is.
        """
        if self._maker == get_ident():
            raise InvalidInputError(
                f"rank {self.rank}: this call was made while the same thread makes another one on this communicator, "
                "by a signal handler or by a finaliser (`__del__`); make it when that one has returned, or on another "
                "communicator"
            )

    def finish(self, then: Callable[[], object] | None = None) -> None:
        if os.getpid() != self._process:
            return
        if self._maker == get_ident():
            if then is not None:
                self._postponed.append(then)
            return
        self._ending = True
        while self._run_next() is not None:
            pass
        if self._started and self._thread != get_ident():
            self._wake.put(None)
            self._ended.acquire()
            self._ended.release()
        if then is not None:
            then()

    def _call_in_turn(self, task: Task) -> SparseVector:
        """Make a call after others, which are waiting or being made by another thread."""
        self.refuse_within_call()
        handle = Handle(self, task)
        try:
            self.enqueue(handle)
            return handle.wait()
        except BaseException as error:
            if handle._outcome is None:  # it is left, if it has not begun; only then x and others are the caller's
                handle._refused = error
                self.run_or_wait(handle, None)
            handle._told = True
            raise

    def _serve(self) -> None:
        with self._ended:
            self._thread = get_ident()
            be_prompt()
            while not self._ending:
                if self._run_next() is None:
                    self._wake.get()

    def _run_next(self) -> Handle | None:
        """Make the first call of the queue, or leave it; return it, or None if there was none."""
        if not self._waiting:
            return None
        self.refuse_within_call()
        handle: Handle | None = None
        with self._making:
            self._maker = get_ident()
            try:
                if self._waiting:
                    handle = self._waiting.popleft()
                    handle._run()
                    if isinstance(handle.error, TransportError) and handle._refused is None:
                        self._refuse_waiting(handle.error)
                    self._leave_refused()
            finally:
                self._maker = 0
        self._after_call()
        return handle

    def _leave_refused(self) -> None:
        while self._waiting and self._waiting[0]._refused is not None:
            self._waiting.popleft()._run()

    def _refuse_waiting(self, error: TransportError) -> None:
        """Have the calls that are waiting left: the job is in pieces, and no call should wait for it again."""
        for i in range(len(self._waiting)):  # other threads may add to it meanwhile, and only this one takes from it
            handle = self._waiting[i]
            text = f"rank {self.rank} did not make this call, since one before it failed: {text_of(error)}"
            dead = error.ranks if isinstance(error, RankFailedError) else None
            why = TransportError(text) if dead is None else RankFailedError(text, dead)
            why.__cause__ = error
            handle._refused = why

    def _after_call(self) -> None:
        while self._postponed:
            try:
                then = self._postponed.pop()
            except IndexError:  # another thread has it
                return
            self.finish(then)

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"this communicator belongs to process {self._process}, of which this one, {os.getpid()}, is a fork; "
                "its connections and threads do not survive that: make the call in the process that started, or start "
                "this one by spawning, with a communicator of its own"
            )


_queues: list[ref[CallQueue]] = []  # in the order in which they were made
_creating = Lock()


@atexit.register
def _finish() -> None:
    """Finish all queues, in an order that is the same on all ranks, before MPI is finalised under their threads."""
    for known in tuple(_queues):
        queue = known()
        if queue is not None:
            queue.finish()


def queue_of(transport: Transport) -> CallQueue:
    """Return the call queue of a transport."""
    found = transport.queue
    if not isinstance(found, CallQueue):
        with _creating:
            if transport.queue is None:
                transport.queue = CallQueue(transport)
            found = transport.queue
        assert isinstance(found, CallQueue)
    return found
