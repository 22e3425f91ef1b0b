"""Predicts the utilisation of training over a network: compute time / wall time.

The cost model (`sparsecomm.primitives.costs`) gives the seconds of work and of messages. This module adds:

- Buckets. A step makes one call per bucket, one after another. A call begins when its bucket is full and the previous
  call has ended. With ``overlap``, buckets fill during the backward pass, and calls after its end delay the step.
- Slow start. A new TCP connection sends 10 segments in the first round trip, and twice as many in each further one (RFC
  6928, RFC 5681). While the connection is idle, the window halves once per retransmission timeout (RFC 7661).
- Full queues. Connections that begin together send their first windows together. If these do not fit into the queue of
  the link, some connections lose their whole window and begin again after a retransmission timeout (RFC 6298).
- Loss. With packet loss p, a stream sends 1.22 / sqrt(p) packets per round trip in the long run (Mathis, Semke, Mahdavi
  and Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm", CCR 1997). The model follows the mean
  window from round trip to round trip.
- Recovery. A lost packet delays its message by one round trip.
- Gloo's ring. Segments of at most 1 MiB go around, two at a time. A receiver requests each segment, so every two take
  one round trip (gloo/allreduce.cc, gloo/transport/tcp/pair.cc).
- Nodes. The m ranks of a node sum their gradients densely, and each gets the sums of a slice. Then m sparse calls share
  the node's link: each is among the ranks that hold the same slice. At the end, the ranks of a node gather the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from sparsecomm.algorithms import Comparison
from sparsecomm.primitives.costs import Costs, Link, log2_ceil
from sparsecomm.tuning.choice import CostQuery, bucket_bytes, decide
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.wire import format_of_updates

GLOO = "gloo"  # dense sums by gloo's all_reduce, over one connection: the baseline without this library

SEGMENT, PACKET = 1448, 1500  # bytes of a packet's payload, and of the packet, on Ethernet
_FIRST_WINDOW = 10.0  # packets
_BACKOFF = 0.7  # factor on the window after a loss (CUBIC, RFC 9438)
_GROWTH = 1.22**2 * (1 - _BACKOFF)  # packets per round trip; yields the long-run window of Mathis et al.
_MIN_TIMEOUT = 0.2  # seconds that Linux adds to the round trip for a retransmission timeout, at least
# Connections of a process group to a peer: one if the round trip is below `_LOCAL`, else one per `_STREAM_EACH`.
_LOCAL, _STREAM_EACH, _MAX_STREAMS = 1e-3, 1.5e-3, 48
_SMALL_CHANGE = 1e-3  # relative change of a cost, for derivatives

_GLOO_SEGMENT, _GLOO_THREADS = 1 << 20, 2  # bytes; all_reduce calls that a process group of gloo runs at once
_DDP_BUCKET = 25 << 20  # bytes
_BACKWARD = 2 / 3  # of a step: the backward pass takes twice as long as the forward pass
_SMALL = 4096  # elements of small tensors, such as norms and biases, which a Reducer sums in one dense call at the end

# Work of a rank, in passes over the parameters: multiples of `Costs.add`, measured on a core of 2024.
_FOREGROUND_PASSES, _BACKGROUND_PASSES = 5, 1  # a round of local steps: in the training's thread, and beside it
_DENSE_PASSES = 3  # a dense round: subtract, step and write
_STEP_PASSES = 1  # a step with a sparse sum: write the dense result
# SparseAdamW with its selection, on one rank, and fused AdamW, which it replaces: 56.0 and 18.3 ms for 25.6M weights
# (bench/results/training-adamw-work.txt). On P ranks, owners divide a part of the work: times are proportional to the
# bytes read, 43 per weight on one rank, and 20.1 + 32.2/P on P ranks (docs/reports/adamw.md). With nodes, a rank
# adds quotients and selects (13 of the 20.1) only in its slice.
_ADAMW_PASSES, _FUSED_PASSES = 5.5, 1.8
_ON_ALL, _ON_SLICE, _AT_OWNERS = 7.1 / 43, 13 / 43, 32.2 / 43
# Passes per cache line of 16 elements with a selected entry: 40 ns for gradient, residual and sum. Fitted to `double`
# on 4 simulated ranks with 8M weights: 1.6 and 3.0 ns of CPU time per weight at density 0.018 and 0.1.
_LINE_PASSES, _LINE = 100.0, 16


@dataclass(frozen=True)
class Network:
    """The network between nodes with equal links. A node is a machine, or a site of several machines."""

    rate: float  # bits per second of a node's link, each way
    rtt: float = 0.0  # seconds of a round trip between nodes
    loss: float = 0.0  # of packets, from 0 to 1
    ranks_per_node: int = 1  # which share its link
    connections: int | None = None  # of TCP, from a rank to each other rank; None: the default of a process group
    congestion: str = "cubic"  # or "bbr", which does not slow down after a loss, paces packets and keeps its window
    queue: float = 0.1  # seconds that a packet may wait in the queue of a link before it is dropped
    inside: Link | None = None  # for dense sums inside a node, such as PCIe between GPUs; None: as `Costs.node`

    @property
    def streams(self) -> int:
        """The number of connections to each other rank."""
        if self.connections is not None:
            return self.connections
        return 1 if self.rtt < _LOCAL else min(_MAX_STREAMS, int(1 + self.rtt / _STREAM_EACH))


@dataclass(frozen=True)
class Training:
    """A training run."""

    ranks: int
    parameters: int  # in float32
    step_seconds: float  # compute time of a step, without any exchange
    cores_per_rank: float = 1.0  # for the work of exchanges; values above 1 count as 1


@dataclass(frozen=True)
class Exchange:
    """The exchanges of a training."""

    algorithm: str | Comparison = GLOO  # or one of `sparse_allreduce`
    wire: str = "auto"
    density: float = 1.0  # share of the elements that a rank selects
    sync_every: int | None = None  # local steps per round; None: gradients are summed in every step
    delay: int = 0  # `fragment_sync_delay` of `LocalSteps`
    overlap: bool = False  # whether the calls of a step begin during the backward pass, as in DistributedDataParallel
    adamw: bool = False  # whether the owners of `SparseAdamW` make its step with the sums
    nodes: bool = False  # whether ranks of a node sum densely and share the sparse exchange, if `nodes_count_as_one`


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a training."""

    algorithm: str  # the choice of "auto", or the name in the `Exchange`
    wire: str
    seconds: float  # of the exchange of a round, including its work
    nbytes: float  # that the link of a node sends in a round
    round_seconds: float  # wall time of a round
    utilisation: float  # compute time / wall time
    work: float  # CPU seconds of a rank within `seconds`
    participants: int  # in an exchange: ranks, or nodes if their ranks sum before it


class _Call(NamedTuple):
    """A sum over all ranks. ``nbytes``: sent by a node's link; ``work``: CPU seconds of a rank."""

    algorithm: str
    wire: str
    seconds: float
    nbytes: float
    work: float


def nodes_count_as_one(training: Training, network: Network) -> bool:
    """Return whether ``nodes="auto"`` sums inside nodes: there are several, with equally many ranks above 1."""
    P, m = training.ranks, network.ranks_per_node
    return 1 < m < P and P % m == 0


def predict(training: Training, network: Network, exchange: Exchange, costs: Costs = DEFAULT) -> Prediction:
    """Predict the time and the utilisation of a training. ``costs`` gives the work, and the messages inside a node.

    Raise `InvalidInputError` if the algorithm does not exist, or does not support such a call.
    """
    slower = max(1.0, 1 / training.cores_per_rank)
    scaled = {name: slower * getattr(costs, name) for name in ("select", "merge", "codec", "add", "call")}
    costs, n = replace(costs, **scaled), training.parameters
    dense, background = exchange.algorithm == GLOO, 0.0
    exchange = replace(exchange, nodes=exchange.nodes and not dense and nodes_count_as_one(training, network))
    H, m = exchange.sync_every or 1, network.ranks_per_node if exchange.nodes else 1
    computed = H * training.step_seconds
    calls = _calls(training, network, exchange, costs) if training.ranks > 1 else []
    if exchange.sync_every is not None:
        on_slice = 0 if dense else _FOREGROUND_PASSES - _DENSE_PASSES
        foreground = (_DENSE_PASSES + on_slice / m) * costs.add * n
        background = 0.0 if dense else _BACKGROUND_PASSES / m * costs.add * n
    elif exchange.adamw:
        passes = _ADAMW_PASSES * (_ON_ALL + _ON_SLICE / m + _AT_OWNERS / training.ranks) - _FUSED_PASSES
        foreground = max(0.0, passes * costs.add - costs.select / m) * n
    else:
        touched = 0.0 if dense else _LINE_PASSES * (1 - (1 - exchange.density) ** _LINE) / _LINE
        foreground = 0.0 if dense else (_STEP_PASSES + touched / m) * costs.add * n
    backward = _BACKWARD * training.step_seconds if exchange.overlap else 0.0
    ready = (computed - backward * (1 - i / len(calls)) for i in range(1, len(calls) + 1))
    end = 0.0
    for begin, call in zip(ready, calls, strict=True):
        end = max(end, begin) + call.seconds
    end = max(computed, end)
    waited = max(0.0, end + background - computed - exchange.delay * training.step_seconds)
    algorithm, wire = calls[0][:2] if calls else (str(exchange.algorithm), exchange.wire)
    total, work = computed + foreground + waited, foreground + background + sum(call.work for call in calls)
    seconds, nbytes = sum(call.seconds for call in calls) + background + foreground, sum(call.nbytes for call in calls)
    utilisation, participants = computed / total, training.ranks // m
    return Prediction(algorithm, wire, seconds, nbytes, total, utilisation, work / slower, participants)


def _calls(training: Training, network: Network, exchange: Exchange, costs: Costs) -> list[_Call]:
    """Return the calls of a round, in order. Connections were idle before the first one."""
    P, n = training.ranks, training.parameters
    idle = (exchange.sync_every or 1) * training.step_seconds
    exchange, num_nodes = replace(exchange, delay=0), -(-P // network.ranks_per_node)
    if exchange.algorithm == GLOO:
        count = -(-4 * n // _DDP_BUCKET) if exchange.overlap else 1
        threads = min(_GLOO_THREADS, count)
        first, other = (_ring(P, n / count, network, pause, costs, threads) for pause in (idle, 0.0))
        return [first] + [other] * (count - 1)
    count = 1
    if exchange.sync_every is None:
        m = network.ranks_per_node if exchange.nodes else 1  # slices of a bucket
        with_link = replace(costs, link=_link(network), node=costs.node or costs.link).shared_by(m)
        options = exchange.density, with_link, exchange.algorithm, exchange.wire
        count = -(-4 * n // (m * bucket_bytes(P // m, num_nodes, *options)))
    first, other = (_sparse(P, -(-n // count), network, exchange, pause, costs) for pause in (idle, 0.0))
    small = _sparse(P, min(n, _SMALL), network, Exchange("dense", "plain", nodes=exchange.nodes), 0.0, costs)
    return [first] + [other] * (count - 1) + [small] * (not exchange.adamw)


@lru_cache(maxsize=4096)
def _sparse(P: int, n: int, network: Network, exchange: Exchange, idle: float, costs: Costs) -> _Call:
    """Return a call for n elements over connections that were idle for ``idle`` seconds."""
    num_nodes, m = -(-P // network.ranks_per_node), network.ranks_per_node if exchange.nodes else 1
    P, n, per_node = P // m, -(-n // m), network.ranks_per_node // m  # of each of m calls, which share the link
    network = replace(network, rate=network.rate / m, ranks_per_node=per_node)
    costs = replace(costs, link=_link(network), node=costs.node or costs.link)
    rounds = exchange.sync_every is not None
    k = max(1, round(exchange.density * n))
    query = CostQuery(
        P, num_nodes, n, k, 4, exchange.algorithm, exchange.wire, contributors=rounds and exchange.algorithm == "auto"
    )
    best = decide(query, costs)
    problem, link = query.problem(best.wire), costs.link
    if exchange.adamw:
        updates = query.problem(format_of_updates(best.wire)).entry_bytes
        problem = replace(problem, entry_bytes=(problem.entry_bytes + updates) / 2)
    name, without = best.algorithm.name, best.algorithm.predicted_time(problem, costs)
    work = best.algorithm.predicted_time(problem, replace(costs, link=Link(0.0, 0.0), node=Link(0.0, 0.0)))
    if num_nodes == 1:
        return _Call(name, best.wire.name, without, 0.0, work)

    def count(cost: str) -> float:
        """Return how often a node pays ``cost``, a field of its link: the derivative of the predicted time."""
        now = float(getattr(link, cost))
        dearer = replace(costs, link=replace(link, **{cost: (1 + _SMALL_CHANGE) * now}))
        return (best.algorithm.predicted_time(problem, dearer) - without) / (_SMALL_CHANGE * now)

    nbytes, trips = count("beta"), count("alpha")
    # A rank sends to several peers at once in every trip, or to one peer, a different one in each trip.
    peers = 1 + count("gap") / trips
    phases = trips if peers < 1 + _SMALL_CHANGE else 1.0
    connections = peers * network.streams
    burst = nbytes / trips / connections  # bytes that a connection sends at once
    stalled = phases * _stalled(nbytes / phases / connections, connections, network, idle, burst)
    lost = _recovery(m * nbytes * num_nodes / trips, trips, m * connections * num_nodes, network)
    agreement = 0.0  # before the sums of a round, ranks compare their arguments
    if rounds:
        agreement = link.alpha * (1 if costs.direct_is_faster(P, num_nodes) else log2_ceil(P))
    inside, entries = network.inside or costs.node or costs.link, k if best.algorithm.bounded_result else num_nodes * k
    sizes = 4 * n, min(4 * n, 8 * entries)  # bytes of a slice of the gradient, and of the slice's result
    added, moved = (m - 1) * costs.add * n, sum(inside.trip(m - 1, (m - 1) * size) for size in sizes)
    seconds = without + stalled + lost + agreement + added + moved
    return _Call(name, best.wire.name, seconds, m * nbytes, work + added)


def _ring(P: int, n: float, network: Network, idle: float, costs: Costs, at_once: int) -> _Call:
    """Return a call of gloo's ring; ``at_once`` calls share the link and its round trips."""
    num_nodes, work = -(-P // network.ranks_per_node), 2 * costs.add * n
    trips = (P - 1) * max(-(-4 * n // _GLOO_SEGMENT // P), 2.0)  # round trips, each with two segments
    link = _link(network) if num_nodes > 1 else costs.node or costs.link
    nbytes = 8 * n * (P - 1) / P
    seconds = work + nbytes * link.beta + trips * 2 * link.alpha / at_once
    if num_nodes == 1:
        return _Call(GLOO, "plain", seconds, 0.0, work)
    seconds += _stalled(nbytes, 1.0, network, idle, nbytes, 2 * _GLOO_SEGMENT) / at_once
    lost = _recovery(nbytes * num_nodes / (2 * P - 2), 2 * P - 2, num_nodes, network) / at_once
    return _Call(GLOO, "plain", seconds + lost, nbytes, work)


def _link(network: Network) -> Link:
    """Return the cost of a message between nodes, on connections with open windows."""
    alpha, beta = DEFAULT.link.alpha + network.rtt / 2, 8 * PACKET / SEGMENT / network.rate
    return replace(DEFAULT.link, alpha=alpha, beta=beta)


# -- TCP --------------------------------------------------------------------------------------------------------------


def stream_rate(network: Network) -> float:
    """Return the bits of payload per second that one connection carries in the long run."""
    full = network.rate * SEGMENT / PACKET
    if not network.rtt or not network.loss or network.congestion == "bbr":
        return full
    return min(full, 8 * SEGMENT * 1.22 / math.sqrt(network.loss) / network.rtt)


def _stalled(
    nbytes: float, streams: float, network: Network, idle: float, burst: float, limit: float = math.inf
) -> float:
    """Return the seconds for which small windows leave a link idle, while ``streams`` send ``nbytes`` each.

    Each stream sent the same number of bytes before, and was then idle for ``idle`` seconds. A sender passes ``burst``
    bytes to TCP at once, and has at most ``limit`` bytes in flight.
    """
    rtt, packets = network.rtt, nbytes / SEGMENT
    if not rtt or not packets:
        return 0.0
    on_link = network.rate / (8 * PACKET)  # packets per second
    full = max(_FIRST_WINDOW, min(on_link * rtt / streams, limit / SEGMENT))  # packets under way when the link is full
    slows, several = network.congestion != "bbr", streams > 1
    shrunk, loss = (2.0 ** -(idle / (rtt + _MIN_TIMEOUT)), network.loss) if slows else (1.0, 0.0)
    window, stalled = _FIRST_WINDOW, 0.0
    for _ in range(4):  # each exchange begins with the last window of the one before, shrunk by the idle time
        fits = on_link * network.queue / (streams * min(burst / SEGMENT, window))  # fraction that fits into the queue
        overflows = slows and several and fits < 1
        stalled, after = _stream_stall(packets, 1.0 if overflows else window, full, loss, several)
        stalled *= rtt
        if overflows:  # wait for the timeout, during which the other connections send
            stalled += max(0.0, _MIN_TIMEOUT + rtt - fits * packets * streams / on_link)
        window = max(_FIRST_WINDOW, shrunk * after)
    return stalled


def _stream_stall(packets: float, window: float, full: float, loss: float, several: bool) -> tuple[float, float]:
    """Return the round trips that a stream waits, and its final window; ``full`` packets fill a round trip.

    With losses, slow start ends at the window that the last loss left: 1 / sqrt(loss) on average. With ``several``
    streams, the result is for the slowest one, which had one more loss.
    """
    stalled, sent, window = 0.0, 0.0, min(window, full)
    if packets <= window:
        return 0.0, window
    slow_start_end = (_BACKOFF if several else 1) / math.sqrt(loss) if loss else math.inf
    while True:
        left = packets - sent
        if left <= window:  # the last window; on average over message lengths, half a round trip less
            return max(0.0, stalled + (left / window - 0.5) * (1 - window / full)), window
        if window < slow_start_end:
            grown = min(2 * window, slow_start_end)
        else:
            grown = max(1.0, window + _GROWTH - (1 - _BACKOFF) * window * (1 - (1 - loss) ** window))
        grown = min(full, grown)
        rounds = 1.0 if abs(grown - window) > 1e-4 * window else left / window  # else the window is constant
        stalled += rounds * (1 - window / full)
        sent += rounds * window
        if sent >= packets:
            return stalled, window
        window = grown


def _recovery(nbytes: float, trips: float, streams: float, network: Network) -> float:
    """Return the seconds that losses add to a number of trips, when all nodes together send ``nbytes`` per trip."""
    packets = max(nbytes / SEGMENT, 1.0)
    # Only a timeout detects the loss of a connection's last packets, unless the library has several connections to a
    # peer: then it sends a short frame after each message.
    last = min(packets, 3.0 * streams) if network.streams == 1 else 0.0
    again, late = 1 - (1 - network.loss) ** packets, 1 - (1 - network.loss) ** last
    return float(trips * network.rtt * (again + late))
