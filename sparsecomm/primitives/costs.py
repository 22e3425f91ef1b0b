"""The cost model: `Costs` of messages and of work, and a `Problem`, whose time algorithms predict from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from sparsecomm.wire import HEADER_BYTES


@dataclass(frozen=True)
class Link:
    """A network between ranks: a message of B bytes takes ``alpha + beta * B`` seconds.

    Messages sent at once share the delay: m messages of B bytes in all, to or from m ranks, take
    ``alpha + (m - 1) * gap + beta * B`` (LogGP: Alexandrov et al., SPAA 1995).
    """

    alpha: float  # seconds until an empty message has arrived
    beta: float  # seconds per byte
    gap: float = 0.0  # seconds added by each message after the first

    def trip(self, messages: int, nbytes: float) -> float:
        """Return the seconds of ``messages`` messages at once, of ``nbytes`` in all; 0 if there are none."""
        return self.alpha + (messages - 1) * self.gap + nbytes * self.beta if messages else 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of messages and of work."""

    link: Link  # between nodes; the ranks of a node share it
    node: Link | None = None  # between ranks of one node; None: as `link`
    select: float = 0.0  # seconds per element of the top-k of residual + x
    merge: float = 0.0  # seconds per input entry of a merge
    codec: float = 0.0  # seconds per entry for packing and unpacking
    add: float = 0.0  # seconds per element of a dense sum of two vectors
    call: float = 0.0  # fixed seconds of each of these operations

    @property
    def latency_entries(self) -> float:
        """The number of entries whose bytes, 12 each with their keys, take as long as the latency."""
        return self.link.alpha / (12 * self.link.beta) if self.link.beta else inf if self.link.alpha else 0.0

    def shared_by(self, per_node: int) -> Costs:
        """Return the costs of a call if ``per_node`` ranks of each node make such calls at once, over one link."""
        return self if per_node == 1 else replace(self, link=replace(self.link, beta=per_node * self.link.beta))

    def direct_is_faster(self, P: int, num_nodes: int) -> bool:
        """Return whether P ranks should send to all others at once rather than forward messages in log2 P steps.

        Sending at once costs P - 2 gaps; forwarding costs log2(P) - 1 more latencies. The bytes differ only in headers.
        """
        link = self.link if num_nodes > 1 or self.node is None else self.node
        header = HEADER_BYTES * link.beta
        return (P - 2) * (link.gap + header) <= (log2_ceil(P) - 1) * (link.alpha + header)


@dataclass(frozen=True)
class Problem:
    """The parameters of a call that determine its cost."""

    P: int  # ranks
    n: int  # elements
    k: int  # entries that each rank selects
    entry_bytes: float = 8  # mean bytes of an entry in a message
    element_bytes: int = 4  # bytes of a dense element
    num_nodes: int | None = None  # nodes, which have equally many ranks; None: one per rank
    needs_codec: bool = False  # whether the time of packing and unpacking counts
    exact_sums: bool = True  # in messages, which then show which sums are the largest; rounded sums and means do not

    @property
    def per_node(self) -> int:
        return 1 if self.num_nodes is None else -(-self.P // self.num_nodes)

    def link(self, costs: Costs, distance: int | None = None, sharing: int | None = None) -> Link:
        """Return the link to the rank at ``distance``; by default, to all ranks at once.

        ``sharing`` ranks of a node use its link at the same time; by default, all of them. ``alpha`` and ``gap``
        include the header and the fixed costs of merging, packing and unpacking a message.
        """
        m, node = self.per_node, costs.node or costs.link
        if m >= self.P or (distance is not None and distance < m):
            link = node
        else:
            fraction = 1.0 if distance or sharing else (self.P - m) / (self.P - 1)  # of messages that leave the node
            gap = fraction * costs.link.gap + (1 - fraction) * node.gap
            link = Link(costs.link.alpha, fraction * costs.link.beta * (sharing or m) + (1 - fraction) * node.beta, gap)
        per_message = HEADER_BYTES * link.beta + costs.call * (3 if self.needs_codec else 1)
        return Link(link.alpha + per_message, link.beta, link.gap + per_message)

    def codec(self, costs: Costs) -> float:
        """Return the seconds for packing and unpacking an entry; 0 if entries are not packed."""
        return costs.codec if self.needs_codec else 0.0


def log2_ceil(P: int) -> int:
    """Return log2(P), rounded up."""
    return (P - 1).bit_length()
