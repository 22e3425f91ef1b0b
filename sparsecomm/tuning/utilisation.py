"""The utilisation to expect of training over a network: the time of computation / the time that passes.

Work and messages take what the cost model says (`sparsecomm.primitives.costs`). To that comes what TCP loses on a path
with delay:

- Slow start. After a pause a connection sends 10 segments in the first round trip, and twice as many in each further
  one (RFC 6928, RFC 5681). Its window shrinks by half for each retransmission timeout of the pause (RFC 7661).
- Loss. A stream that loses a part p of its packets sends 1.22 / sqrt(p) packets per round trip in the long run (Mathis,
  Semke, Mahdavi and Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm", CCR 1997). The window
  is followed from round trip to round trip, in its mean.
- Recovery. Who waits for a message of which a packet was lost waits for another round trip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from sparsecomm.primitives.costs import Costs, Link, Problem, log2_ceil
from sparsecomm.tuning.choice import CostQuery, decide
from sparsecomm.tuning.profile import DEFAULT

__all__ = ["GLOO", "PACKET", "SEGMENT", "Exchange", "Network", "Prediction", "Training", "predict", "stream_rate"]

GLOO = "gloo"  # the ring of gloo's all_reduce, over one connection: what programs have without this library

SEGMENT, PACKET = 1448, 1500  # bytes of a packet's payload, and of the packet, on Ethernet
_FIRST_WINDOW = 10.0  # packets
_KEPT = 0.7  # of the window after a loss (CUBIC, RFC 9438)
_GROWTH = 1.22**2 * (1 - _KEPT)  # packets per round trip: so that the window is that of Mathis et al. in the long run
# Connections of a process group to a peer: one within `_LOCAL` seconds, else one for every `_STREAM_EACH` of a trip.
_LOCAL, _STREAM_EACH, _MAX_STREAMS = 1e-3, 1.5e-3, 48
_LITTLE = 1e-3  # part of a cost, so that formulas take no other way
_MIN_TIMEOUT = 0.2  # seconds, of a retransmission in Linux, beside the round trip

# Passes over the parameters in the training's own thread that a round of local steps takes: to subtract them from the
# global ones, to fill residuals, to write what comes back. In units of `Costs.add`; measured on a core of 2024.
_OWN_PASSES, _BACKGROUND_PASSES = 5, 1
_DENSE_PASSES = 3  # of a dense round: it subtracts, steps and writes
_STEP_PASSES = 1  # of a step with a sparse sum: its dense result is written


@dataclass(frozen=True)
class Network:
    """The network between sites, all of whose links are alike.

    Attributes:
        rate: bits per second that a site's link carries, each way.
        rtt: seconds of a round trip between sites.
        loss: the part of packets that get lost.
        per_site: ranks at each site, which share its link.
        connections: TCP connections from a rank to each other one; ``None``: as many as a process group has by default.
        congestion: the control of TCP's congestion: "cubic" stands for all that slow down for losses, "bbr" for those
            that do not, and keep their windows through pauses.
    """

    rate: float
    rtt: float = 0.0
    loss: float = 0.0
    per_site: int = 1
    connections: int | None = None
    congestion: str = "cubic"

    @property
    def streams(self) -> int:
        """The connections to each other rank."""
        if self.connections is not None:
            return self.connections
        return 1 if self.rtt < _LOCAL else min(_MAX_STREAMS, int(1 + self.rtt / _STREAM_EACH))


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        ranks: P.
        parameters: of the model, in float32.
        step_seconds: that a rank computes in a step, without any exchange.
    """

    ranks: int
    parameters: int
    step_seconds: float


@dataclass(frozen=True)
class Exchange:
    """One way to train together.

    Attributes:
        algorithm: as in `sparse_allreduce`; or `GLOO`.
        wire: as in `sparse_allreduce`.
        density: the part of the elements that a rank selects.
        sync_every: local steps of a round; ``None``: gradients are summed in every step.
        delay: ``fragment_sync_delay`` of `LocalSteps`.
    """

    algorithm: str = GLOO
    wire: str = "auto"
    density: float = 1.0
    sync_every: int | None = None
    delay: int = 0


@dataclass(frozen=True)
class Prediction:
    """What is to be expected.

    Attributes:
        algorithm, wire: what is taken, where "auto" was asked for.
        seconds: of an exchange, from its beginning to its end.
        nbytes: that the link of a site sends in a round.
        round_seconds: from one round to the next.
        utilisation: the time of computation / the time that passes, from 0 to 1.
    """

    algorithm: str
    wire: str
    seconds: float
    nbytes: float
    round_seconds: float
    utilisation: float


def predict(training: Training, network: Network, exchange: Exchange, costs: Costs = DEFAULT) -> Prediction:
    """Return the time and the utilisation to expect.

    Args:
        training, network, exchange: see there.
        costs: of work, and of messages inside a site.

    Raises:
        InvalidInputError: there is no such algorithm, or it does not support such a call.
    """
    steps = exchange.sync_every or 1
    computed, n = steps * training.step_seconds, training.parameters
    algorithm, wire, seconds, nbytes = _exchange(training, network, replace(exchange, delay=0), costs)
    dense, background = exchange.algorithm == GLOO, 0.0
    if exchange.sync_every is not None:
        own = (_DENSE_PASSES if dense else _OWN_PASSES) * costs.add * n
        background = 0.0 if dense else _BACKGROUND_PASSES * costs.add * n
    else:
        own = 0.0 if dense else _STEP_PASSES * costs.add * n
    waited = max(0.0, seconds + background - exchange.delay * training.step_seconds)
    total = computed + own + waited
    return Prediction(algorithm, wire, seconds + background + own, nbytes, total, computed / total)


@lru_cache(maxsize=4096)
def _exchange(training: Training, network: Network, exchange: Exchange, costs: Costs) -> tuple[str, str, float, float]:
    """Return the algorithm and the wire format that are taken, the seconds of a call, and the bytes that it sends."""
    P, n = training.ranks, training.parameters
    if P == 1:
        return exchange.algorithm, exchange.wire, 0.0, 0.0
    dense = exchange.algorithm == GLOO
    sites = -(-P // network.per_site)
    costs = replace(costs, link=_link(network), node=costs.node or costs.link)
    query = CostQuery(
        P,
        sites,
        n,
        max(1, round(exchange.density * n)),
        4,
        "dense" if dense else exchange.algorithm,
        exchange.wire,
        contributors=exchange.sync_every is not None and exchange.algorithm == "auto",
    )
    best = decide(query, costs)
    problem = query.problem(best.wire)

    def seconds(costs: Costs) -> float:
        return _ring_seconds(problem, costs) if dense else best.algorithm.predicted_time(problem, costs)

    name, link, without = GLOO if dense else best.algorithm.name, costs.link, seconds(costs)
    if sites == 1:
        return name, best.wire.name, without, 0.0

    def count(cost: str) -> float:
        """Return how often a site pays a cost of its link. Formulas are sums of products: a small difference tells."""
        now = float(getattr(link, cost))
        more = seconds(replace(costs, link=replace(link, **{cost: (1 + _LITTLE) * now}))) - without
        return more / (_LITTLE * now)

    nbytes, trips = count("beta"), count("alpha")
    # Who sends to several at once sends to all, in every trip; else to another one in each, but for dense rings.
    peers = 1 + count("gap") / trips
    phases = trips if peers < 1 + _LITTLE and best.algorithm.name != "dense" else 1.0
    connections = peers * (1 if dense else network.streams)
    idle = (exchange.sync_every or 1) * training.step_seconds
    stalled = phases * _stalled(nbytes / phases / connections, connections, network, idle)
    lost = _recovery(nbytes * sites / trips, trips, connections * sites, network)
    compared = 0.0  # before a round's sums, ranks compare what they are about to do
    if not dense and exchange.sync_every is not None:
        compared = link.alpha * (1 if costs.at_once(P, sites) else log2_ceil(P))
    return name, best.wire.name, without + stalled + lost + compared, nbytes


def _ring_seconds(problem: Problem, costs: Costs) -> float:
    """Return the seconds of gloo's ring, on connections whose windows are open."""
    P, nbytes = problem.P, problem.n / problem.P * problem.element_bytes
    return 2 * costs.add * problem.n + 2 * (P - 1) * problem.link(costs, sharing=1).trip(1, nbytes)


def _link(network: Network) -> Link:
    """Return what a message costs between sites, on connections whose windows are open."""
    alpha, beta = DEFAULT.link.alpha + network.rtt / 2, 8 * PACKET / SEGMENT / network.rate
    return replace(DEFAULT.link, alpha=alpha, beta=beta)


# -- TCP --------------------------------------------------------------------------------------------------------------


def stream_rate(network: Network) -> float:
    """Return the bits of payload per second that one connection carries in the long run."""
    full = network.rate * SEGMENT / PACKET
    if not network.rtt or not network.loss or network.congestion == "bbr":
        return full
    return min(full, 8 * SEGMENT * 1.22 / math.sqrt(network.loss) / network.rtt)


def _stalled(nbytes: float, streams: float, network: Network, idle: float) -> float:
    """Return the seconds for which a link waits for windows to open, while ``streams`` send ``nbytes`` each.

    Each has sent as many before, and then nothing for ``idle`` seconds.
    """
    rtt, packets = network.rtt, nbytes / SEGMENT
    if not rtt or not packets:
        return 0.0
    full = max(_FIRST_WINDOW, network.rate * rtt / (8 * PACKET * streams))  # packets under way when the link is full
    slows = network.congestion != "bbr"
    shrunk, loss = (2.0 ** -(idle / (rtt + _MIN_TIMEOUT)), network.loss) if slows else (1.0, 0.0)
    window, stalled = _FIRST_WINDOW, 0.0
    for _ in range(4):  # until the window with which it begins is that with which it ends, shrunk
        stalled, window = _burst(packets, window, full, loss, streams > 1)
        window = max(_FIRST_WINDOW, shrunk * window)
    return stalled * rtt


def _burst(packets: float, window: float, full: float, loss: float, several: bool) -> tuple[float, float]:
    """Return the round trips for which a stream waits, of which ``full`` packets fill one, and its window after.

    A connection that has had losses opens its window fast only up to that after a loss, in the mean 1 / sqrt(loss). Of
    ``several`` streams the slowest counts: one that has had a loss more.
    """
    stalled, sent, window = 0.0, 0.0, min(window, full)
    slow = (_KEPT if several else 1) / math.sqrt(loss) if loss else math.inf
    while True:
        left = packets - sent
        if left <= window:  # the last ones: half a round trip less, in the mean over lengths
            return max(0.0, stalled + (left / window - 0.5) * (1 - window / full)), window
        if window < slow:
            grown = min(2 * window, slow)
        else:
            grown = max(1.0, window + _GROWTH - (1 - _KEPT) * window * (1 - (1 - loss) ** window))
        grown = min(full, grown)
        rounds = 1.0 if abs(grown - window) > 1e-4 * window else left / window  # from here on it goes on so
        stalled += rounds * (1 - window / full)
        sent += rounds * window
        if sent >= packets:
            return stalled, window
        window = grown


def _recovery(nbytes: float, trips: float, streams: float, network: Network) -> float:
    """Return the seconds that losses add to ``trips``, in each of which all sites together send ``nbytes``."""
    packets = max(nbytes / SEGMENT, 1.0)
    last = min(packets, 3.0 * streams)  # nothing comes after them that would tell of their loss before a timeout
    again, late = 1 - (1 - network.loss) ** packets, 1 - (1 - network.loss) ** last
    return float(trips * network.rtt * (again + late))
