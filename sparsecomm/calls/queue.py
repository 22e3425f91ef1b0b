"""`CallQueue` makes the `Call`s on a communicator one after another. `Handle`: a call in flight.

Calls are made in the order in which the program submits them, from any thread. A thread of the queue makes the
non-blocking calls. If the transport allows no other thread, `Handle.wait` makes them.

Within the gate of `sparsecomm.signals`, a signal handler raises only while a thread waits for a lock or makes a call.
"""

from __future__ import annotations

import _thread
import atexit
import math
import os
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from enum import Enum
from queue import SimpleQueue
from threading import Lock, get_ident
from typing import Protocol
from weakref import ref

import numpy as np

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.backends import AT_ONCE, Backends, default_float_mode
from sparsecomm.calls.label import Label, Pairs, difference, pack
from sparsecomm.calls.plan import Plan
from sparsecomm.checks import ARGUMENT_ERRORS, quote, to_float
from sparsecomm.config import READ_BY_PLANS, variable
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    TimeoutError,
    TransportError,
    log,
    text_of,
)
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.signals import acquire, deferred
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.tracing.observers import ObservedBackends, Observer, observe
from sparsecomm.tracing.recorder import observers_of
from sparsecomm.transport import Transport
from sparsecomm.transport.scheduling import be_prompt
from sparsecomm.tuning.profile import KnownCosts

NO_ENTRIES = SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))  # for calls without a sum
_MAX_PLANS = 1024  # per communicator: more than a model has tensors; each takes a few KB


class Task(Protocol):
    """A collective call that is ready to be made or left, once."""

    def run(self) -> SparseVector:
        """Make the call, and return its result. The call has ended even if this raises."""

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and send the reason to the other ranks."""


class State(Enum):
    """The state of a call.

        PLANNED ----> RUNNING ----> DECIDED ----> DONE
            |             |
            +-------------+-------> FAILED

    PLANNED: the transport has not numbered it. RUNNING: anything may fail on any rank. DECIDED: the algorithm has
    returned, and the ranks have voted if the transport lets them; from now on the result is applied, whatever happens.
    FAILED: the other ranks know, and the contribution is rolled back.
    """

    PLANNED = 0
    RUNNING = 1
    DECIDED = 2
    DONE = 3
    FAILED = 4


PLANNED, RUNNING, DECIDED, DONE, FAILED = State  # in Python 3.11, `State.PLANNED` takes ten times longer to read


class Call:
    """A `Task`: a collective call on ``transport``. Subclasses set `label` and `comm`, and define `_exchange`.

    After a mismatch, ranks exchange the contents of their calls, and the error begins with the first difference.
    """

    label: Label
    comm: Communicator

    def __init__(
        self, transport: Transport, within: AbstractContextManager[object] | None = None, *, submitted: bool = False
    ) -> None:
        """Plan a call.

        ``within``: a context in which it is made or left. ``submitted``: roll back even if the call fails before it
        begins, since the program has given its gradient away already.
        """
        self.transport, self.state = transport, PLANNED
        self._within, self._submitted = AT_ONCE if within is None else within, submitted

    @default_float_mode
    def run(self) -> SparseVector:
        with self._within:
            return self._run()

    @default_float_mode
    def leave(self, error: BaseException) -> None:
        """Leave the call without making it. Ignored after `run`."""
        if self.state is PLANNED:
            self._submitted = True
            with self._within:
                self._fail(error, self.transport.number)

    @property
    def succeeded(self) -> bool:
        """Whether the call has been decided, even if an exception was raised afterwards."""
        return self.state is DECIDED or self.state is DONE

    def describe(self) -> str:
        """Return the properties that the ranks must agree on, as text."""
        return self.comm.description

    def contents(self) -> Pairs:
        """Return the properties that the ranks must agree on, by name, the most telling ones first."""
        return [*self.label.pairs(), *self.comm.contents]

    def _run(self) -> SparseVector:
        transport, last = self.transport, self.transport.number
        if self.state is not PLANNED:
            raise TransportError(f"rank {transport.rank}: this call was made before")
        result: SparseVector | None = None
        raised: BaseException | None = None
        try:
            transport.contents = self.label.pairs
            self._begin()
            self.state = RUNNING
            result = self._exchange()
            transport.conclude()
        except BaseException as error:
            if result is None or not transport.concluded:
                self._fail(error, last)
                raise
            raised = error  # the ranks have voted already
        self.state = DECIDED
        assert result is not None
        for _ in range(2):  # the first attempt may run out of memory
            try:
                transport.end()
                self._finish(result)
                break
            except BaseException as error:
                raised = raised or error
        else:
            self._roll_back()
        self.state = DONE
        if raised is not None:
            raise raised
        return result

    def _fail(self, error: BaseException, last: int) -> None:
        """Leave the call, after beginning it if necessary, so that the other ranks receive the error.

        ``last``: number of the previous call.
        """
        self.state = FAILED
        transport = self.transport
        if isinstance(error, KeyboardInterrupt) and not error.args and transport.number != last:
            where = f"rank {transport.rank} of {transport.size} was interrupted in call {transport.number}"
            error.args = (f"{where}, {self.describe()}",)
        with suppress(BaseException):  # the first error is the one to raise
            if transport.number == last and not isinstance(error, InvalidInputError):
                self._begin()
        if transport.number == last:
            transport.skip_reason = type(error).__name__
        with suppress(BaseException):
            if isinstance(error, CollectiveMismatchError) and error.peer is not None:
                self._explain(error, error.peer)
        with suppress(BaseException):
            transport.abort(error)
        if self._submitted or transport.number != last or isinstance(error, TransportError):
            self._roll_back()

    def _explain(self, error: CollectiveMismatchError, peer: int) -> None:
        """Let the text of an error be the first difference between the calls of this rank and of ``peer``."""
        contents = pack(self.contents())
        try:
            received = self.transport.exchange_contents(peer, contents)
        except CollectiveMismatchError as left:  # another rank has found the difference
            error.args = left.args
            return
        if received is not None and (text := difference({self.transport.rank: contents, peer: received})):
            error.args = (text,)

    def _begin(self) -> None:
        self.comm.begin(self.label.checksum)

    def _exchange(self) -> SparseVector:
        """Exchange messages with the other ranks, and return the result. May fail on any rank."""
        raise NotImplementedError

    def _finish(self, result: SparseVector) -> None:
        """Apply the result. If this raises, it is called again and must continue where it stopped."""

    def _roll_back(self) -> None:
        """Return this rank's contribution to its residual."""


@deferred
class Handle:
    """A call in flight, returned by `sparsecomm.isparse_allreduce`.

    Do not change x, residual and out, or rely on their contents, before the call is done.
    """

    def __init__(self, queue: CallQueue, task: Task) -> None:
        self._queue = queue
        self._task: Task | None = task
        self._refusal: BaseException | None = None  # if set, the call is left instead of made
        self._outcome: tuple[SparseVector | None, BaseException | None] | None = None
        self._pending = Lock()  # held until there is an outcome
        self._pending.acquire()
        self._error_seen = False

    def wait(self, timeout: float | None = None) -> SparseVector:
        """Wait until the call is done, and return its result. A second wait returns or raises the same again.

        An interrupt (Ctrl-C) ends only the wait, and the call continues. If no thread makes calls, this wait makes the
        call, and an interrupt also ends the call, as in `sparse_allreduce`.

        Args:
            timeout: maximum number of seconds to wait. ``None`` waits until the call ends, at the latest
                with the error of a timeout.

        Raises:
            TimeoutError: the call is not done yet. It continues; wait again.
            SparseCommError: the error that the call raised, as in `sparse_allreduce`.
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
                f"rank {self._queue.rank}: the call was not done within {timeout:g} s; it continues: wait again"
            )
        assert self._outcome is not None
        result, error = self._outcome
        if isinstance(error, CollectiveMismatchError) and not self._error_seen:
            self._queue.plans.use_costs(None)
        self._error_seen = True
        if error is not None:
            raise error
        assert result is not None
        return result

    def test(self) -> bool:
        """Return whether the call is done, with a result or an error. If no thread makes calls, this makes it."""
        return self._outcome is not None or self._queue.run_or_wait(self, 0.0)

    @property
    def result(self) -> SparseVector:
        """The result of the call.

        Raises:
            InvalidInputError: the call is not done yet.
            SparseCommError: the error that the call raised.
        """
        if self._outcome is None:
            raise InvalidInputError(f"rank {self._queue.rank}: the call is not done yet; call wait() first")
        return self.wait()

    @property
    def error(self) -> BaseException | None:
        """The error that the call raised; ``None`` if it raised none, or is not done yet."""
        return None if self._outcome is None else self._outcome[1]

    def __repr__(self) -> str:
        if self._outcome is None:
            return "Handle(in flight)"
        return "Handle(done)" if self.error is None else f"Handle(failed: {text_of(self.error)})"

    def __del__(self) -> None:
        outcome = getattr(self, "_outcome", None)
        if outcome is not None and outcome[1] is not None and not self._error_seen:
            text = text_of(outcome[1])
            log.error("rank %s: a call failed, and no wait() raised its error: %s", self._queue.rank, text)

    def _run(self) -> None:
        """Make or leave the call, and wake the threads that wait for it."""
        task, refusal = self._task, self._refusal
        assert task is not None
        try:
            if refusal is None:
                self._outcome = task.run(), None
            else:
                task.leave(refusal)
                self._outcome = None, refusal
        except BaseException as error:
            self._outcome = None, refusal or error
        self._task = None
        self._pending.release()
        del self  # the traceback of its error would keep it alive

    def _wait(self, timeout: float | None) -> bool:
        """Wait for at most ``timeout`` seconds, and return whether the call is done."""
        if self._outcome is None:
            bound = -1.0 if timeout is None else min(max(timeout, 0.0), _thread.TIMEOUT_MAX)
            if acquire(self._pending, bound):
                self._pending.release()
        return self._outcome is not None


class Plans:
    """The latest plans of a communicator, until a setting or the registry of algorithms changes.

    A plan is a `Plan`, or for calls that gather words a `Communicator`. Keys that cannot be hashed or compared are not
    stored: their arguments are checked again in every call. ``costs``: of the links as the ranks measured them.
    """

    def __init__(self) -> None:
        self.costs: KnownCosts | None = None
        self._plans: dict[Hashable, Plan | Communicator] = {}
        self._valid_for: list[object] = []  # the number of algorithms, and settings
        self.find(None)  # sets it

    def find(self, key: Hashable) -> Plan | Communicator | None:
        if (now := [len(ALGORITHMS), *map(variable, READ_BY_PLANS)]) != self._valid_for:
            self._plans.clear()
            self._valid_for = now
        try:
            return self._plans.get(key)
        except ARGUMENT_ERRORS:
            return None

    def keep(self, key: Hashable, plan: Plan | Communicator) -> None:
        """Store a plan. If there are too many, drop the oldest one."""
        if len(self._plans) >= _MAX_PLANS:
            self._plans.pop(next(iter(list(self._plans)), None), None)
        with suppress(*ARGUMENT_ERRORS):
            self._plans[key] = plan

    def clear(self) -> None:
        self._plans.clear()

    def use_costs(self, costs: KnownCosts | None) -> None:
        """Plan later calls with these measured costs, the same on all ranks; ``None``: measure them again.

        All ranks measure again after a mismatch, since one rank may have measured while another one failed.
        """
        self.costs = costs
        self.clear()


@deferred
class CallQueue:
    """The call queue of one transport. All methods may be called from any thread."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.plans, self.backends = transport.rank, Plans(), Backends()
        self.observers: list[Observer] = []
        self._threaded = transport.threaded
        self._process = os.getpid()
        self._calling = Lock()  # held by the thread that makes calls
        self._caller = 0  # identifier of that thread
        self._handles: deque[Handle] = deque()  # calls that have not begun
        self._wake: SimpleQueue[None] = SimpleQueue()  # wakes the queue's thread
        self._start = Lock()  # acquired once, by the thread that starts the queue's thread
        self._started = self._ending = False
        self._thread = 0  # identifier of the queue's thread
        self._running = Lock()  # held by the queue's thread
        self._postponed: list[Callable[[], object]] = []  # arguments of `finish` within the current call
        transport.close_after_calls = self.finish
        for observer in observers_of(transport):
            self.observe(transport, observer)
        _queues[:] = [reference for reference in _queues if reference() is not None] + [ref(self)]

    def observe(self, transport: Transport, observer: Observer) -> None:
        """Let an observer observe all later calls. No call may be in flight."""
        observe(transport, observer)
        self.backends = ObservedBackends(self.backends, observer)
        self.observers.append(observer)
        self.plans.clear()

    def call(self, task: Task) -> SparseVector:
        """Make a call after the calls in the queue, and return its result. Refused within a call of this thread."""
        self._check_process()
        if self._handles or not self._calling.acquire(False):
            return self._call_in_turn(task)
        self._caller = get_ident()
        try:
            return task.run()
        except TransportError as error:
            self._refuse_handles(error)
            raise
        except CollectiveMismatchError:
            self.plans.use_costs(None)
            raise
        finally:
            if self._handles:
                self._leave_refused()
            self._caller = 0
            self._calling.release()
            if self._postponed:
                self._run_postponed()

    def submit(self, task: Task) -> Handle:
        """Submit a call, and return its handle."""
        handle = Handle(self, task)
        self.enqueue(handle)
        return handle

    def enqueue(self, handle: Handle) -> None:
        """Submit the call of a handle of this queue."""
        self._check_process()
        self._handles.append(handle)
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
        """Wait until a call is done, and make it here if no thread does. Return whether it is done."""
        while not (self._threaded and not self._ending) and handle._outcome is None:
            ran = self._run_next()
            if ran is None:
                break
            if ran is not handle and ran.error is not None and not isinstance(ran.error, Exception):
                ran._error_seen = True
                raise ran.error  # Ctrl-C during an earlier call
        return handle._wait(timeout)

    def refuse_within_call(self) -> None:
        """Raise `InvalidInputError` if this thread is making a call."""
        if self._caller == get_ident():
            raise InvalidInputError(
                f"rank {self.rank}: a signal handler or finaliser (`__del__`) made this call while the same thread "
                "makes another call on this communicator; make it afterwards, or on another communicator"
            )

    def finish(self, action: Callable[[], object] | None = None) -> None:
        """Make the last calls of the queue, since other ranks may wait for them, and run ``action``.

        Within a call, for example if the garbage collector calls this, it returns and does its work after that call.
        """
        if os.getpid() != self._process:
            return
        if self._caller == get_ident():
            if action is not None:
                self._postponed.append(action)
            return
        self._ending = True
        while self._run_next() is not None:
            pass
        if self._started and self._thread != get_ident():
            self._wake.put(None)
            acquire(self._running)
            self._running.release()
        if action is not None:
            action()

    def _call_in_turn(self, task: Task) -> SparseVector:
        """Make a call after calls in the queue or of another thread."""
        self.refuse_within_call()
        handle = Handle(self, task)
        try:
            self.enqueue(handle)
            return handle.wait()
        except BaseException as error:
            if handle._outcome is None:  # leave it, or wait for its end if it has begun: it uses the caller's arrays
                handle._refusal = error
                self.run_or_wait(handle, None)
            handle._error_seen = True
            raise

    def _serve(self) -> None:
        with self._running:
            self._thread = get_ident()
            be_prompt()
            while not self._ending:
                if self._run_next() is None:
                    self._wake.get()

    def _run_next(self) -> Handle | None:
        """Make or leave the first call of the queue, and return its handle; None if the queue is empty."""
        if not self._handles:
            return None
        self.refuse_within_call()
        handle: Handle | None = None
        acquire(self._calling)
        try:
            self._caller = get_ident()
            if self._handles:
                handle = self._handles.popleft()
                handle._run()
                if isinstance(handle.error, TransportError) and handle._refusal is None:
                    self._refuse_handles(handle.error)
                self._leave_refused()
        finally:
            self._caller = 0
            self._calling.release()
        self._run_postponed()
        try:
            return handle
        finally:
            del handle  # the traceback of its error would keep it alive

    def _leave_refused(self) -> None:
        while self._handles and self._handles[0]._refusal is not None:
            self._handles.popleft()._run()

    def _refuse_handles(self, error: TransportError) -> None:
        """Refuse the calls in the queue, so that they do not wait for dead ranks or time out again."""
        for i in range(len(self._handles)):  # other threads may append; only this one removes handles
            text = f"rank {self.rank} did not make this call, since an earlier one failed: {text_of(error)}"
            dead = error.ranks if isinstance(error, RankFailedError) else None
            refusal = TransportError(text) if dead is None else RankFailedError(text, dead)
            refusal.__cause__ = error
            self._handles[i]._refusal = refusal

    def _run_postponed(self) -> None:
        while self._postponed:
            try:
                action = self._postponed.pop()
            except IndexError:  # another thread took it
                return
            self.finish(action)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"this communicator belongs to process {self._process}, and this is its fork {os.getpid()}, in which "
                "connections and threads do not survive. Make the call in the original process, or start this process "
                "by spawning, with its own communicator"
            )


_queues: list[ref[CallQueue]] = []  # in the order in which they were made


@atexit.register
def _finish() -> None:
    """Finish all queues before MPI is finalised, in an order that is the same on all ranks."""
    for reference in tuple(_queues):
        queue = reference()
        if queue is not None:
            queue.finish()


def queue_of(transport: Transport) -> CallQueue:
    """Return the call queue of a transport."""
    return transport.attached(CallQueue)
