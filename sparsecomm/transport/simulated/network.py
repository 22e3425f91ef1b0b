"""The network between simulated ranks: what a message costs, and the links that ranks share."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Costs", "Link", "Network"]


class Costs(NamedTuple):
    """Seconds per message and per byte."""

    alpha: float
    beta: float


class Link:
    """A machine's link in one direction, and when it is taken."""

    def __init__(self) -> None:
        self._begins: list[float] = []  # of the times when it is, which rise
        self._ends: list[float] = []

    def take(self, earliest: float, seconds: float) -> float:
        """Take it for so long, as early as it is free; return by how much that is later than ``earliest``."""
        if not seconds:
            return 0.0
        begin, place = earliest, bisect_right(self._ends, earliest)
        while place < len(self._begins) and self._begins[place] < begin + seconds:
            begin = self._ends[place]
            place += 1
        if place and self._ends[place - 1] == begin:
            self._ends[place - 1] = begin + seconds
        else:
            self._begins.insert(place, begin)
            self._ends.insert(place, begin + seconds)
        return begin - earliest


class Network:
    """The machines' links."""

    def __init__(self, nodes: Sequence[int], between: Costs, inside: Costs) -> None:
        """``nodes``: for each rank, the number of its machine; what a message costs ``between`` and ``inside`` them."""
        self.node_of_rank, self.between, self.inside = nodes, between, inside
        shared = [node for node, ranks in Counter(nodes).items() if ranks > 1]  # a rank alone never waits for its link
        self._out = {node: Link() for node in shared}
        self._in = {node: Link() for node in shared}

    def way_out(self, sender: int, receiver: int) -> tuple[Costs, Link | None]:
        """What a message costs, and the link that its sender has to ask for, if there is one."""
        if self.node_of_rank[sender] == self.node_of_rank[receiver]:
            return self.inside, None
        return self.between, self._out.get(self.node_of_rank[sender])

    def way_in(self, sender: int, receiver: int) -> tuple[Costs, Link | None]:
        """What a message costs, and the link that its receiver has to ask for, if there is one."""
        if self.node_of_rank[sender] == self.node_of_rank[receiver]:
            return self.inside, None
        return self.between, self._in.get(self.node_of_rank[receiver])
