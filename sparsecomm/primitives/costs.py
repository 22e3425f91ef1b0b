"""The cost model: what messages and work cost, and the sizes of a call that decide it."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecomm.wire import HEADER_BYTES

__all__ = ["Costs", "Link", "Problem", "log2_ceil"]


@dataclass(frozen=True)
class Link:
    """A network between ranks: a message of B bytes takes ``alpha + beta * B`` seconds.

    Messages that leave at once share the delay: m of them, of B bytes in all, to or from m ranks, take
    ``alpha + (m - 1) * gap + beta * B`` (LogGP: Alexandrov et al., SPAA 1995).

    Attributes:
        alpha: seconds until a message without bytes has come: a trip.
        beta: seconds per byte.
        gap: seconds from one of several messages at once to the next, which sender and receiver need for it.
    """

    alpha: float
    beta: float
    gap: float = 0.0

    def trip(self, messages: int, nbytes: float) -> float:
        """Return the seconds of so many messages at once, of so many bytes in all; 0 of none."""
        return self.alpha + (messages - 1) * self.gap + nbytes * self.beta if messages else 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of messages and of work.

    Attributes:
        link: between nodes; ranks of one node share it.
        node: between ranks of one machine; ``None``: as ``link``.
        select: seconds per element for the top-k of residual + x.
        merge: seconds per entry that goes into a merge.
        codec: seconds per entry for packing it and unpacking it again.
        add: seconds per element for a dense sum of two vectors.
        call: seconds for any of these on hardly any entries.
    """

    link: Link
    node: Link | None = None
    select: float = 0.0
    merge: float = 0.0
    codec: float = 0.0
    add: float = 0.0
    call: float = 0.0

    def at_once(self, P: int, num_nodes: int) -> bool:
        """Return whether P ranks had better send what they have to all others at once.

        Otherwise each hands on what it has heard, in log2 P steps. The bytes are as many either way, but for headers:
        P - 2 gaps are weighed against all trips but the first.
        """
        link = self.link if num_nodes > 1 or self.node is None else self.node
        header = HEADER_BYTES * link.beta
        return (P - 2) * (link.gap + header) <= (log2_ceil(P) - 1) * (link.alpha + header)


@dataclass(frozen=True)
class Problem:
    """The sizes that decide a cost.

    Attributes:
        P: ranks.
        n, k: elements, and entries that each rank selects.
        entry_bytes: of an entry on the way, on average.
        element_bytes: of a dense element.
        num_nodes: machines, over which the ranks are spread evenly; ``None``: one for every rank.
        packed: whether entries are packed and unpacked.
        hidden: whether the values that travel do not show whose sums are the largest: they are rounded, or means.
    """

    P: int
    n: int
    k: int
    entry_bytes: float = 8
    element_bytes: int = 4
    num_nodes: int | None = None
    packed: bool = False
    hidden: bool = False

    @property
    def per_node(self) -> int:
        return 1 if self.num_nodes is None else -(-self.P // self.num_nodes)

    def link(self, costs: Costs, distance: int | None = None, sharing: int | None = None) -> Link:
        """Return the link to the rank ``distance`` away, ``sharing`` messages at once; without either, to all at once.

        The ranks of a machine share its link, all of them unless ``sharing`` says how many. In ``alpha`` and ``gap``
        are the header, and what it takes to begin to work on a message: to merge it, and to pack and unpack it.
        """
        m, node = self.per_node, costs.node or costs.link
        if m >= self.P or (distance is not None and distance < m):
            link = node
        else:
            fraction = 1.0 if distance or sharing else (self.P - m) / (self.P - 1)  # of messages that leave the machine
            gap = fraction * costs.link.gap + (1 - fraction) * node.gap
            link = Link(costs.link.alpha, fraction * costs.link.beta * (sharing or m) + (1 - fraction) * node.beta, gap)
        begins = HEADER_BYTES * link.beta + costs.call * (3 if self.packed else 1)
        return Link(link.alpha + begins, link.beta, link.gap + begins)

    def codec(self, costs: Costs) -> float:
        """Return the seconds for packing and unpacking an entry."""
        return costs.codec if self.packed else 0.0


def log2_ceil(P: int) -> int:
    """Return the steps in which P ranks can hear of each other, two by two."""
    return (P - 1).bit_length()
