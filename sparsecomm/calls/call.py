"""A collective call: what it may become, and the one place where it is given up.

    PLANNED ----> RUNNING ----> DECIDED ----> DONE
        |             |
        +-------------+-------> FAILED

A call is PLANNED until it has begun on the transport, under a number that all ranks give it. It is RUNNING while
anything can fail on any rank. When the algorithm has returned, and the ranks have voted where they do, it is DECIDED:
the residual is committed and the result is written, whatever comes, and it is DONE. Otherwise it has FAILED: the other
ranks are told, and the gradient is as after a rollback.

Signals: this module is compiled, and what it calls is, but for algorithms. So an exception of a signal handler comes
while an algorithm runs or where a wait asks for it, as any error does; nothing comes between two statements here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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
    """What has become of a call."""

    PLANNED = 0
    RUNNING = 1
    DECIDED = 2
    DONE = 3
    FAILED = 4


class Call:
    """A collective call, which is made by `run` or left by `leave`, once: a `sparsecomm.calls.queue.Task`.

    Attributes:
        ranks: the transport.
        state: of the call.
    """

    def __init__(
        self, transport: Transport, within: AbstractContextManager[object] | None = None, *, keeps: bool = False
    ) -> None:
        """Plan a call.

        Args:
            ranks: the transport.
            within: entered around it.
            keeps: even if the call cannot be begun, for bad settings, the gradient is kept as after a rollback.
        """
        self.transport, self.state = transport, State.PLANNED
        self._within, self._keeps = AT_ONCE if within is None else within, keeps

    @default_float_mode
    def run(self) -> SparseVector:
        """Make the call, and return its result.

        Raises:
            CollectiveMismatchError, TransportError: see `sparsecomm.sparse_allreduce`. The call has failed.
            BaseException: anything else. `state` says what has become of the call.
        """
        with self._within:
            return self._run()

    @default_float_mode
    def leave(self, error: BaseException) -> None:
        """Leave the call without making it, and tell the other ranks why. A call that is over stays as it is."""
        if self.state is State.PLANNED:
            self._keeps = True
            with self._within:
                self._fail(error, self.transport.number)

    @property
    def succeeded(self) -> bool:
        """Whether the call has been decided, also if an exception was raised when it had."""
        return self.state is State.DECIDED or self.state is State.DONE

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
            raised = error  # while the votes were counted
        self.state = State.DECIDED
        assert result is not None
        for _ in range(2):  # memory may run out, and be there again
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
        """Leave the call. If it has not begun, it is begun only to be left, so that the other ranks know.

        ``last``: the number of the call before.
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
            pass  # the error that was there first is raised
        if transport.number == last:
            transport.skipped = type(error).__name__
        try:  # noqa: SIM105 - what leaves `suppress` is bytecode
            transport.abort(error)
        except BaseException:
            pass
        if self._keeps or transport.number != last or isinstance(error, TransportError):
            self._keep()

    def describe(self) -> str:
        """Return in words what the ranks must agree on."""
        return self._communicator().description

    # -- what a kind of call is ---------------------------------------------------------------------------------------

    def _communicator(self) -> Communicator:
        """Return the communicator on which it is made."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Begin it on the transport."""
        raise NotImplementedError

    def _exchange(self) -> SparseVector:
        """Do what can fail on any rank; return the result."""
        raise NotImplementedError

    def _finish(self, result: SparseVector) -> None:
        """Do what remains when the call is decided. If it raises, it is called again, and goes on."""

    def _keep(self) -> None:
        """Keep here what this rank would have given away."""


class SumCall(Call):
    """The sum of all ranks' contributions.

    Attributes:
        plan: of the call.
        contribution: this rank's.
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
            plan: on whose communicator no other call is under way when it is made.
            contribution: this rank's.
            label: what the ranks' calls must have in common besides; 0: nothing.
            write: called with the result when the call is decided. It must not mind to be called again.
            within, keeps: as of `Call`.
            deferred: the contribution of a call that went well is left as it is, for `settle`.
        """
        super().__init__(plan.transport, within, keeps=keeps)
        self.plan, self.contribution = plan, contribution
        self._label, self._write, self._deferred = label, write, deferred
        self._total: SparseVector | None = None  # the result, before a mean is taken

    @default_float_mode
    def settle(self, *, usable: bool) -> None:
        """Commit the contribution of a call that went well; or roll it back where the result is not usable, on all
        ranks. Only of a deferred call. After a call that failed there is nothing to do, nor the second time.
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
        plan, contribution = self.plan, self.contribution
        total = plan.algorithm.run(plan.comm, contribution, plan.k)
        self._total = total
        return (
            contribution.backend.divide(total, self.transport.size) if plan.mean and self.transport.size > 1 else total
        )

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
