"""`Call`: one collective call, with its states. `Task`: the interface of a call for the queue."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from enum import Enum
from typing import Protocol

import numpy as np

from sparsecomm.backends import AT_ONCE, default_float_mode
from sparsecomm.calls.label import Label, Pairs, difference, pack
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, TransportError
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

NO_ENTRIES = SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))  # for calls without a sum


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
