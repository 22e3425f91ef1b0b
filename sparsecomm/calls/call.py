"""`Call`: one collective call, its states, and how it is left after an error. `SumCall`: a sum of contributions.

    PLANNED ----> RUNNING ----> DECIDED ----> DONE
        |             |
        +-------------+-------> FAILED

PLANNED: the transport has not given it a number. RUNNING: anything may fail on any rank. DECIDED: the algorithm has
returned, and the ranks have voted if they do; now the residual is committed and the result is written, whatever
happens. FAILED: the other ranks have been told, and the gradient is rolled back into the residual.

A call runs within the gate of `sparsecomm.signals`: a signal handler can raise only where a wait polls for signals.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from enum import Enum

from sparsecomm.backends import AT_ONCE, default_float_mode
from sparsecomm.calls.plan import Plan
from sparsecomm.contribution import Contribution
from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["Call", "State", "SumCall"]


class State(Enum):
    """The state of a call."""

    PLANNED = 0
    RUNNING = 1
    DECIDED = 2
    DONE = 3
    FAILED = 4


class Call:
    """A collective call. `run` makes it or `leave` leaves it, once: a `sparsecomm.calls.queue.Task`.

    Attributes:
        transport: the transport that it is made on.
        state: its state.
    """

    def __init__(
        self, transport: Transport, within: AbstractContextManager[object] | None = None, *, keeps: bool = False
    ) -> None:
        """Plan a call.

        Args:
            transport: the transport.
            within: a context in which it is made or left.
            keeps: roll the gradient back even if the call fails before it begins, as for a setting that cannot be used.
        """
        self.transport, self.state = transport, State.PLANNED
        self._within, self._keeps = AT_ONCE if within is None else within, keeps

    @default_float_mode
    def run(self) -> SparseVector:
        """Make the call, and return its result.

        Raises:
            CollectiveMismatchError, TransportError: as `sparsecomm.sparse_allreduce`. The call has failed.
            BaseException: any other error. See `state`.
        """
        with self._within:
            return self._run()

    @default_float_mode
    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and send the reason to the other ranks. Ignored after `run`."""
        if self.state is State.PLANNED:
            self._keeps = True
            with self._within:
                self._fail(error, self.transport.number)

    @property
    def succeeded(self) -> bool:
        """Whether the call has been decided, even if an exception was raised afterwards."""
        return self.state is State.DECIDED or self.state is State.DONE

    def describe(self) -> str:
        """Return the properties that the ranks must agree on, in words."""
        return self._communicator().description

    def _run(self) -> SparseVector:
        transport, last = self.transport, self.transport.number
        if self.state is not State.PLANNED:
            raise TransportError(f"rank {transport.rank}: this call was made before")
        result: SparseVector | None = None
        raised: BaseException | None = None
        try:
            self._begin()
            self.state = State.RUNNING
            result = self._exchange()
            transport.conclude()
        except BaseException as error:
            if result is None or not transport.concluded:
                self._fail(error, last)
                raise
            raised = error  # while votes were counted
        self.state = State.DECIDED
        assert result is not None
        for _ in range(2):  # the first attempt may run out of memory
            try:
                transport.end()
                self._finish(result)
                break
            except BaseException as error:
                raised = raised or error
        else:
            self._keep()
        self.state = State.DONE
        if raised is not None:
            raise raised
        return result

    def _fail(self, error: BaseException, last: int) -> None:
        """Leave the call. If it has not begun, begin it first, so that the other ranks learn of the error.

        Args:
            error: the reason.
            last: number of the call before it.
        """
        self.state = State.FAILED
        transport = self.transport
        if isinstance(error, KeyboardInterrupt) and not error.args and transport.number != last:
            where = f"rank {transport.rank} of {transport.size} was interrupted in call {transport.number}"
            error.args = (f"{where}, {self.describe()}",)
        try:
            if transport.number == last and not isinstance(error, InvalidInputError):
                self._begin()
        except BaseException:
            pass  # the first error is the one to raise
        if transport.number == last:
            transport.skipped = type(error).__name__
        with suppress(BaseException):
            transport.abort(error)
        if self._keeps or transport.number != last or isinstance(error, TransportError):
            self._keep()

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _communicator(self) -> Communicator:
        """Return the communicator that it is made on."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Begin it on the transport."""
        raise NotImplementedError

    def _exchange(self) -> SparseVector:
        """Exchange messages with the other ranks, and return the result. May fail on any rank."""
        raise NotImplementedError

    def _finish(self, result: SparseVector) -> None:
        """Apply the result. If this raises, it is called again and must continue where it stopped."""

    def _keep(self) -> None:
        """Roll back: keep on this rank the gradient that it would have contributed."""


class SumCall(Call):
    """The sum of the contributions of all ranks.

    Attributes:
        plan: its plan.
        contribution: this rank's contribution.
    """

    def __init__(
        self,
        plan: Plan,
        contribution: Contribution,
        label: int = 0,
        write: Callable[[SparseVector], None] | None = None,
        within: AbstractContextManager[object] | None = None,
        *,
        deferred: bool = False,
        keeps: bool = False,
    ) -> None:
        """Plan a sum.

        Args:
            plan: its plan. No other call of it may be in flight when this call is made.
            contribution: this rank's contribution.
            label: a checksum that the ranks' calls must share; 0 for none.
            write: called with the result when the call is decided. Must be idempotent.
            within, keeps: as in `Call`.
            deferred: leave it to `settle` to commit the contribution.
        """
        super().__init__(plan.transport, within, keeps=keeps)
        self.plan, self.contribution = plan, contribution
        self._label, self._write, self._deferred = label, write, deferred
        self._total: SparseVector | None = None  # the sum, before it is divided for a mean

    @default_float_mode
    def settle(self, *, usable: bool) -> None:
        """Commit the contribution of a deferred call, or roll it back if the result is not usable on all ranks.

        Does nothing after a failed call, and nothing the second time.
        """
        if self._deferred and self.succeeded:
            if usable:
                self._commit()
            else:
                self.contribution.rollback()
            self._deferred = False

    def _run(self) -> SparseVector:
        counters = self.transport.counters
        counters.begin_sum()
        try:
            return super()._run()
        finally:
            counters.end_sum()

    def _communicator(self) -> Communicator:
        return self.plan.comm

    def _begin(self) -> None:
        self.plan.comm.begin(self._label)

    def _exchange(self) -> SparseVector:
        plan, contribution, size = self.plan, self.contribution, self.transport.size
        self._total = total = plan.algorithm.run(plan.comm, contribution, plan.k)
        return contribution.backend.divide(total, size) if plan.mean and size > 1 else total

    def _finish(self, result: SparseVector) -> None:
        if not self._deferred:
            self._commit()
        if self._write is not None:
            self._write(result)

    def _commit(self) -> None:
        assert self._total is not None
        self.contribution.commit(self._total, rejects=self.plan.algorithm.rejects)

    def _keep(self) -> None:
        self.contribution.rollback()
