"""What became of the call that this rank has begun last: what an exception cannot say that may come at any time."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecomm import transport
from sparsecomm.calls.arguments import Comm

__all__ = ["LastCall", "last_call"]


@dataclass(frozen=True)
class LastCall:
    """The call that this rank has begun last on a communicator.

    Attributes:
        number: of the call, from 1 on; 0: there was none.
        counts: the call went well: its result was written, and the residual holds what the result does not. False: it
            failed, and the residual is ``residual + x``; or it is under way.
    """

    number: int
    counts: bool


def last_call(comm: Comm = None) -> LastCall:
    """Return what became of the call that this rank has begun last. Nothing is sent, and nobody is waited for.

    An exception of a signal handler, such as `KeyboardInterrupt`, may come before a call has begun, within it, or when
    it is done. Compare the number from before the call with that from afterwards: if they are equal, the call has not
    begun, and nothing has changed.

        before = sc.last_call(comm).number
        try:
            sc.sparse_allreduce(x, k, comm=comm, residual=residual)
        except KeyboardInterrupt:
            last = sc.last_call(comm)
            x_is_kept = last.number > before and not last.counts

    Calls of all kinds are counted: those in the background when they are made, and those of a `Reducer`.

    Args:
        comm: as in `sparse_allreduce`.

    Raises:
        InvalidInputError: not a communicator, or one that cannot be used.
    """
    ranks = transport.existing(comm)
    return LastCall(0, False) if ranks is None else LastCall(ranks.number, ranks.counted == ranks.number)
