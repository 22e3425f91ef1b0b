"""The counters of a `Reducer`: calls, bytes, entries and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from sparsecomm.quantities import bytes_text, number_text, percent_text, time_text

__all__ = ["Counters"]


@dataclass
class Counters:
    """Numbers of what a reducer has done since the beginning, or since the last `reset`.

    Attributes:
        steps, calls: how many.
        elements: of all gradients.
        selected: entries that this rank selected.
        applied: entries of the results.
        bytes_sent, bytes_received, messages_sent: of this rank.
        bytes_dense: what this rank would have sent in sums of whole gradients along a ring, in the type of the sums.
        accumulate: seconds in which gradients were added to residuals, and momentum applied.
        exchange: seconds of the calls: selection, messages, merging. A thread of their own makes them where it can.
        write: seconds in which results were written.
        waited: seconds in which the program waited for calls; what overlap does not hide.
        skipped: steps that were not usable, since a gradient was not finite.
        setup_sent, setup_received: bytes of this rank outside of sums, to measure links and to agree on buckets and
            weights. They are those of the whole communicator, and not part of ``bytes_sent`` and ``bytes_received``.
        ranks_lost, elements_lost: as `Reducer.rebuild` found them, added up.
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
        """The part of all elements that are entries of the results."""
        return self.applied / self.elements if self.elements else 0.0

    def reset(self) -> None:
        """Set all to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def since(self, before: Counters) -> dict[str, float]:
        """Return what has been added since ``before`` and the density reached, by name, for a logger."""
        now, then = asdict(self), asdict(before)
        added = {name: now[name] - then[name] for name in now if name != "steps"}
        added["density"] = added["applied"] / added["elements"] if added["elements"] else 0.0
        return {f"sparsecomm/{name}": value for name, value in added.items()}

    def copy(self) -> Counters:
        """Return a copy."""
        return Counters(**asdict(self))

    def added_to(self, other: Counters) -> Counters:
        """Return the sums with other counters on the communicator; of steps and set-up, the larger number."""
        mine, theirs = asdict(self), asdict(other)
        common = "steps", "setup_sent", "setup_received"
        return Counters(**{name: (max if name in common else sum)((mine[name], theirs[name])) for name in mine})

    def __str__(self) -> str:
        """Return a small table of this rank's means per step."""
        return self.table("step")

    def table(self, unit: str) -> str:
        """Return a small table of this rank's means per ``unit``, which is what ``steps`` counts."""
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
            ("accumulate", time_text(self.accumulate / steps)),
            ("exchange", time_text(self.exchange / steps)),
            ("write", time_text(self.write / steps)),
            ("waited", time_text(self.waited / steps)),
        ]
        if self.setup_sent or self.setup_received:
            sent, received = bytes_text(self.setup_sent), bytes_text(self.setup_received)
            rows.append(("set-up", f"{sent} sent, {received} received, in all: link measurement, agreement"))
        if self.ranks_lost:
            rows.append(("lost", f"{self.ranks_lost} ranks, {self.elements_lost:,} elements of residuals"))
        return "\n".join(f"{name:<20} {text}" for name, text in rows)
