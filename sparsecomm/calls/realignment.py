"""The call by which ranks meet again whose calls do not pair any more."""

from __future__ import annotations

import numpy as np

from sparsecomm.calls.queue import CallQueue
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["Realignment"]


class Realignment:
    """A call after which all ranks give the next one the same number: a `sparsecomm.calls.queue.Task`.

    Also the next reducer: an interrupt may have come before this rank gave one a number, or afterwards. None that has
    made a call has such a number.
    """

    def __init__(self, ranks: Transport, queue: CallQueue) -> None:
        self._ranks, self._queue = ranks, queue

    def run(self) -> SparseVector:
        """Make it; see `sparsecomm.realign`. Its result is empty."""
        self._ranks.realign()
        self._queue.users = self._ranks.number << 32
        return SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))

    def leave(self, error: BaseException) -> None:
        """Do nothing: it has no number."""
