"""`Handle`: a call in flight. A thread of the queue makes it, or else `Handle.wait`."""

from __future__ import annotations

import _thread
import logging
import math
from threading import Lock
from typing import Any, Protocol

from sparsecomm.checks import quote, to_float
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, TimeoutError, text_of
from sparsecomm.signals import acquire, deferred
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["Handle", "Task"]

_log = logging.getLogger("sparsecomm")


class Task(Protocol):
    """A collective call that is ready to be made or left, once."""

    def run(self) -> SparseVector:
        """Make the call, and return its result. The call has ended even if this raises."""

    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and send the reason to the other ranks."""


@deferred
class Handle:
    """A call in flight, returned by `sparsecomm.isparse_allreduce`.

    Do not change x, residual and out, or rely on their contents, before the call is done.
    """

    def __init__(self, queue: Any, task: Task) -> None:
        self._queue = queue  # a `CallQueue`, whose module imports this one
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
            timeout: maximum number of seconds to wait. ``None`` waits until the call ends, at the latest by
                ``SPARSECOMM_TIMEOUT``.

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
            self._queue.use_measured(None)
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
            said = text_of(outcome[1])
            _log.error("rank %s: a call failed, and no wait() raised its error: %s", self._queue.rank, said)

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
