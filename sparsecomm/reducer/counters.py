"""The counters and the report of a `Reducer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from sparsecomm.calls.plan import Plan
from sparsecomm.quantities import bytes_text, number_text, percent_text, rate_text, time_text
from sparsecomm.transport import Transport

_MAX_PEERS = 16  # in a table; if there are more, the slowest are listed


@dataclass
class Counters:
    """What a reducer has done since the beginning, or since the last `reset`. Seconds and bytes are of this rank.

    Attributes:
        steps, calls, skipped: numbers of steps, calls, and steps that were not usable.
        elements, selected, applied: elements of all gradients, entries that this rank selected, entries of the results.
        bytes_sent, bytes_received, messages_sent: traffic in sums. Bytes inside a node are not included.
        bytes_inside: bytes sent to ranks of the same node, if it counts as one rank; without NCCL's.
        bytes_dense: bytes that a ring allreduce of dense gradients, in the dtype of the sums, would have sent; with
            nodes, this rank's share of the bytes between nodes.
        accumulate: seconds spent adding gradients to residuals and applying momentum.
        exchange: seconds of the calls (selection, messages, merging), which another thread makes if possible.
        write, waited: seconds spent writing results, and seconds in which the program waited for calls.
        setup_sent, setup_received: bytes outside sums, for link measurement and agreement on buckets and weights, of
            the whole communicator. ``bytes_sent`` and ``bytes_received`` do not include them.
        ranks_lost, elements_lost: sums of what `Reducer.rebuild` returned.
    """

    steps: int = 0
    calls: int = 0
    elements: int = 0
    selected: int = 0
    applied: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_dense: int = 0
    messages_sent: int = 0
    bytes_inside: int = 0
    accumulate: float = 0.0
    exchange: float = 0.0
    write: float = 0.0
    waited: float = 0.0
    skipped: int = 0
    setup_sent: int = 0
    setup_received: int = 0
    ranks_lost: int = 0
    elements_lost: int = 0

    @property
    def density(self) -> float:
        """The share of all elements that are entries of the results."""
        return self.applied / self.elements if self.elements else 0.0

    def reset(self) -> None:
        """Set all counters to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def since(self, before: Counters) -> dict[str, float]:
        """Return the difference to earlier counters, and the density reached in between, by name, for a logger."""
        now, then = asdict(self), asdict(before)
        added = {name: now[name] - then[name] for name in now if name != "steps"}
        added["density"] = added["applied"] / added["elements"] if added["elements"] else 0.0
        return {f"sparsecomm/{name}": value for name, value in added.items()}

    def added_to(self, other: Counters) -> Counters:
        """Return the sums with another reducer's counters; for steps and set-up, which both share, the maxima."""
        own, others = asdict(self), asdict(other)
        common = "steps", "setup_sent", "setup_received"
        return Counters(**{name: (max if name in common else sum)((own[name], others[name])) for name in own})

    def __str__(self) -> str:
        """Return a table of this rank's means per step."""
        return self.table("step")

    def table(self, unit: str) -> str:
        """Return a table of this rank's means per ``unit``; ``steps`` counts these units."""
        steps = max(1, self.steps)
        dense = bytes_text(self.bytes_dense / steps)
        if self.bytes_dense:
            dense += f"; sparse is {percent_text(self.bytes_sent / self.bytes_dense)} of that"
        applied = f"{self.applied / steps:,.0f} ({percent_text(self.density)})"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        rows = [
            (f"this rank, per {unit}", f"mean of {self.steps} {unit}s{skipped}"),
            ("calls", number_text(self.calls / steps)),
            ("elements", f"{self.elements / steps:,.0f}"),
            ("selected, applied", f"{self.selected / steps:,.0f}, {applied}"),
            ("sent, received", f"{bytes_text(self.bytes_sent / steps)}, {bytes_text(self.bytes_received / steps)}"),
            ("dense would send", dense),
        ]
        if self.bytes_inside:
            rows.append(("sent inside node", bytes_text(self.bytes_inside / steps)))
        times = "accumulate", "exchange", "write", "waited"
        rows += [(name, time_text(getattr(self, name) / steps)) for name in times]
        if self.setup_sent or self.setup_received:
            sent, received = bytes_text(self.setup_sent), bytes_text(self.setup_received)
            rows.append(("set-up", f"{sent} sent, {received} received in total, to measure links and to agree"))
        if self.ranks_lost:
            rows.append(("lost", f"{self.ranks_lost} ranks, {self.elements_lost:,} elements of residuals"))
        return "\n".join(f"{name:<20} {text}" for name, text in rows)


def plan_lines(plans: Iterable[Plan | None]) -> list[str]:
    """Return lines with the algorithms and wire formats of plans, and the costs by which they were chosen."""
    latest = [plan for plan in plans if plan is not None]
    if not latest:
        return []
    counts = Counter(f"{plan.choice.algorithm.name} with {plan.choice.wire.name}" for plan in latest)
    taken = ", ".join(f"{name} ({count} buckets)" if count > 1 else name for name, count in counts.items())
    lines = [f"{'algorithm':<20} {taken}"]
    chosen = [(plan.choice.seconds, plan.costs.source) for plan in latest if plan.costs is not None]
    if chosen:
        lines.append(f"{'by costs':<20} {'; '.join(dict.fromkeys(source for _, source in chosen))}")
        lines.append(f"{'predicted':<20} {time_text(sum(seconds for seconds, _ in chosen))}")
    return lines


def peer_lines(transport: Transport | None) -> list[str]:
    """Return a table of the traffic with each peer, if the transport counts it."""
    peers = [] if transport is None else transport.peers()
    if not peers:
        return []
    title, listed = "since the communicator was first used, set-up included", peers
    if len(peers) > _MAX_PEERS:
        listed = sorted(sorted(peers, key=lambda peer: peer.rate)[:_MAX_PEERS], key=lambda peer: peer.rank)
        title = f"the slowest {_MAX_PEERS} of {len(peers)} peers, {title}"
    rows = [("peer", "sent", "received", "rate", "round trip", "sent again")]
    for peer in listed:
        rate = rate_text(8 * peer.rate) if peer.rate else "-"
        trip = time_text(peer.round_trip) if peer.round_trip else "-"
        retransmits = number_text(peer.retransmits) if peer.connections else "-"
        amounts = bytes_text(peer.bytes_sent), bytes_text(peer.bytes_received)
        rows.append((f"rank {peer.rank}", *amounts, rate, trip, retransmits))
    return [title, *(f"{name:<20} " + " ".join(f"{text:>11}" for text in texts) for name, *texts in rows)]
