"""The links that `sparsecomm plan --measure` has found, for people and for the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsecomm.calls.measurement import measured_links
from sparsecomm.cli.plan import launch
from sparsecomm.cli.world import World
from sparsecomm.quantities import rate_text
from sparsecomm.transport import Transport
from sparsecomm.tuning import links, streams
from sparsecomm.tuning.streams import STREAMS, Streams
from sparsecomm.tuning.utilisation import PACKET, SEGMENT

__all__ = ["Found", "measure"]


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        links: by messages of the library.
        streams: by TCP connections.
        interfaces, wrong: over which ranks talk, and what is wrong with them; for people.
    """

    links: links.Links
    streams: Streams
    interfaces: Sequence[str] = ()
    wrong: Sequence[str] = ()

    @property
    def rtt(self) -> float:
        """Seconds of the longest round trip."""
        return self.links.round_trip

    @property
    def loss(self) -> float | None:
        """The part of packets that are lost; ``None``: not seen."""
        return self.streams.loss

    @property
    def rate(self) -> float:
        """Bits per second of a link, with what headers take."""
        messages = 8 / self.links.slowest.beta
        return max(messages, self.streams.one or 0.0, self.streams.several or 0.0) * PACKET / SEGMENT

    @property
    def congestion(self) -> str:
        """As in `sparsecomm.tuning.utilisation.Network`."""
        return "bbr" if self.streams.control.startswith("bbr") else "cubic"

    @property
    def rates_text(self) -> str:
        """All rates, for people."""
        texts = [f"{rate_text(8 / self.links.slowest.beta)} in messages of the library"]
        for name, rate in (("one TCP stream", self.streams.one), (f"{STREAMS} TCP streams", self.streams.several)):
            texts += [] if rate is None else [f"{rate_text(rate)} in {name}"]
        return ", ".join(texts)


def measure(transport: Transport, comm: World, members: Sequence[int], seconds: float) -> Found:
    """Return what the links between ``members`` are like, the same on all ranks. Collective over all ranks.

    Args:
        seconds: about how long messages are timed, and each of six groups of streams.
    """
    found = measured_links(transport, seconds)
    addresses, interfaces, wrong = launch.paths(comm, members)
    return Found(found, streams.measure(comm, members, addresses, seconds), interfaces, wrong)
