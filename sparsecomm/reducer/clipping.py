"""Clipping to the median of all ranks' norms, which calls wait for on the call queue, and the program does not."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from statistics import median

from sparsecomm.backends import Backend
from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import CallQueue, Handle
from sparsecomm.errors import TransportError
from sparsecomm.transport import Transport

__all__ = ["MedianNorm", "median_norm"]


class MedianNorm:
    """The norms of one step's gradients on all ranks, which a call of their own gathers.

    Attributes:
        handle: of that call; it comes before those of the step's buckets.
    """

    def __init__(self, ranks: Transport, queue: CallQueue, norm: float, label: int) -> None:
        """Prepare the call: ``norm`` is this rank's; ``label`` is as of `WordsGather`."""
        self._ranks, self._norm = ranks, norm
        self._gather = WordsGather(ranks, [int.from_bytes(struct.pack("<d", norm), "little")], label)
        self.handle = Handle(queue, self._gather)

    @property
    def factor(self) -> float | None:
        """What this rank's gradients are multiplied by; ``None`` if the norms were not gathered."""
        words = self._gather.words
        if len(words) != self._ranks.size:  # of several
            return None
        norms = [struct.unpack("<d", word.to_bytes(8, "little"))[0] for word in words]
        bound = median_norm(norms)
        return bound / self._norm if bound < self._norm < math.inf else 1.0

    def known_factor(self) -> float:
        """Return `factor`.

        Raises:
            TransportError: the norms were not gathered.
        """
        if (factor := self.factor) is None:
            raise TransportError(
                f"rank {self._ranks.rank}: the norms of the ranks' gradients, to whose median they are clipped, were "
                "not gathered; the first error of the step says why"
            )
        return factor


def median_norm(norms: Iterable[float]) -> float:
    """Return the median of the norms that are finite and above 0, the mean of the middle two; infinity if none are."""
    counted = [norm for norm in norms if 0 < norm < math.inf]
    return median(counted) if counted else math.inf
