"""The network between simulated ranks: the cost of a message, and the links that the ranks of a node share."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MessageCost", "Network", "SharedLink"]


class MessageCost(NamedTuple):
    """Seconds of delay, seconds per byte, and seconds between two messages of one rank beside their bytes."""

    alpha: float
    beta: float
    gap: float = 0.0


class SharedLink:
    """A node's link in one direction, with the time intervals in which it is busy."""

    def __init__(self) -> None:
        self._begins: list[float] = []  # of the intervals, ascending
        self._ends: list[float] = []

    def take(self, earliest: float, seconds: float) -> float:
        """Occupy the link for ``seconds``, as early as possible from ``earliest`` on; return the delay."""
        if not seconds:
            return 0.0
        begin, i = earliest, bisect_right(self._ends, earliest)
        while i < len(self._begins) and self._begins[i] < begin + seconds:
            begin = self._ends[i]
            i += 1
        if i and self._ends[i - 1] == begin:
            self._ends[i - 1] = begin + seconds
        else:
            self._begins.insert(i, begin)
            self._ends.insert(i, begin + seconds)
        return begin - earliest


class Network:
    """The nodes and their links."""

    def __init__(self, node_of_rank: Sequence[int], between: MessageCost, inside: MessageCost) -> None:
        """Make the links, all idle.

        Args:
            node_of_rank: node number of each rank.
            between, inside: cost of a message between nodes, and inside a node.
        """
        self.node_of_rank, self.between, self.inside = node_of_rank, between, inside
        shared = [node for node, ranks in Counter(node_of_rank).items() if ranks > 1]  # one rank alone never waits
        self._out = {node: SharedLink() for node in shared}
        self._in = {node: SharedLink() for node in shared}

    def egress(self, sender: int, receiver: int) -> tuple[MessageCost, SharedLink | None]:
        """Return the cost of a message, and the shared link out of the sender's node; None if it needs none."""
        if self.node_of_rank[sender] == self.node_of_rank[receiver]:
            return self.inside, None
        return self.between, self._out.get(self.node_of_rank[sender])

    def ingress(self, sender: int, receiver: int) -> tuple[MessageCost, SharedLink | None]:
        """Return the cost of a message, and the shared link into the receiver's node; None if it needs none."""
        if self.node_of_rank[sender] == self.node_of_rank[receiver]:
            return self.inside, None
        return self.between, self._in.get(self.node_of_rank[receiver])
