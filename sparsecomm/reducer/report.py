"""What `Reducer.report` says beside the counters: what was chosen and why, and the traffic with each peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sparsecomm.quantities import bytes_text, number_text, rate_text, time_text
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.transport import Transport

__all__ = ["choice_lines", "peer_lines"]

_MAX_PEERS = 16  # that are listed; of more, the slowest


def choice_lines(buckets: Iterable[Bucket]) -> list[str]:
    """Return which algorithms and wire formats the latest calls of buckets were made with, and by which costs."""
    plans = [bucket.latest for bucket in buckets if bucket.latest is not None]
    if not plans:
        return []
    taken = Counter(f"{plan.choice.algorithm.name} with {plan.choice.wire.name}" for plan in plans)
    named = ", ".join(f"{name} ({count} buckets)" if count > 1 else name for name, count in taken.items())
    sources = dict.fromkeys(plan.costs.source for plan in plans if plan.costs is not None)
    predicted = sum(plan.choice.seconds for plan in plans if plan.costs is not None)
    lines = [f"{'takes':<20} {named}"]
    if sources:
        lines.append(f"{'by costs':<20} {'; '.join(sources)}")
        lines.append(f"{'predicted':<20} {time_text(predicted)}")
    return lines


def peer_lines(transport: Transport) -> list[str]:
    """Return a table of the traffic with each peer since the communicator was first used; nothing if none is known."""
    peers = transport.peers()
    if not peers:
        return []
    title, shown = "since the communicator was first used, set-up included", peers
    if len(peers) > _MAX_PEERS:
        shown = sorted(sorted(peers, key=lambda peer: peer.rate)[:_MAX_PEERS], key=lambda peer: peer.rank)
        title = f"the slowest {_MAX_PEERS} of {len(peers)} peers, {title}"
    rows = [("peer", "sent", "received", "rate", "round trip", "sent again")]
    for peer in shown:
        rate = rate_text(8 * peer.rate) if peer.rate else "-"
        trip = time_text(peer.round_trip) if peer.round_trip else "-"
        again = number_text(peer.retransmits) if peer.connections else "-"
        amounts = bytes_text(peer.bytes_sent), bytes_text(peer.bytes_received)
        rows.append((f"rank {peer.rank}", *amounts, rate, trip, again))
    return [title, *(f"{name:<20} " + " ".join(f"{text:>11}" for text in texts) for name, *texts in rows)]
