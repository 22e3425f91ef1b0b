"""`run` runs a program on many ranks in one process, in virtual time. No MPI is needed.

A message of B bytes arrives ``alpha + beta * B`` seconds after it begins to leave (Culler et al., "LogP", PPoPP 1993;
Alexandrov et al., "LogGP", SPAA 1995). A rank sends one message at a time and receives one at a time, in the order
of its calls. Each takes ``gap + beta * B`` seconds; then the sent bytes may be reused, and the next message begins.
With ``alpha=1`` and no other costs, the seconds of a call are the number of its trips.

Ranks of one node (equal numbers in ``node_of_rank``) send each other messages at the costs ``node_alpha``,
``node_beta`` and ``node_gap``. Messages between nodes use the node's two links, one out and one in, which all its ranks
share: a message occupies the link out of the sender's node for ``beta * B`` seconds, and ``alpha`` later the link into
the receiver's node.

Requests for a link are granted in the order of their virtual times; at equal times, the lowest rank that can run is
first. A send requests the link out when it starts. The link in is requested when the message has begun to leave and the
receiver waits for it. A message occupies the link in the first free interval that is long enough, beginning when the
message reaches the link or later. This interval may begin before the request. Times depend only on the programs, so
they are the same in every run.

With ``loss``, a message between nodes arrives 0.2 s later if one of its packets is lost and TCP sends it again.
Ranks that die are simulated, too: see `SimulatedTransport.kill`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sparsecomm.errors import InvalidInputError
from sparsecomm.transport.base import Bytes, TrafficCounters
from sparsecomm.transport.simulated.rank import (
    Greenlets,
    Killed,
    MessageCost,
    Network,
    SimulatedTransport,
    Threads,
    World,
)

__all__ = ["Result", "SimulatedTransport", "run"]

T = TypeVar("T")


@dataclass(frozen=True)
class Result(Generic[T]):
    """The outcome of one rank."""

    value: T | None  # returned by the program
    error: Exception | None  # raised by the program
    seconds: float  # virtual time at the end
    counters: TrafficCounters
    killed: bool = False  # by `SimulatedTransport.kill`


def run(
    size: int,
    program: Callable[[SimulatedTransport], T],
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    gap: float = 0.0,
    node_of_rank: Sequence[int] | None = None,
    node_alpha: float | None = None,
    node_beta: float | None = None,
    node_gap: float | None = None,
    delays: Sequence[float] | None = None,
    loss: float = 0.0,
    seed: int = 0,
    weigh: Callable[[Bytes], int] | None = None,
    catch: bool = False,
    threads: bool = False,
) -> list[Result[T]]:
    """Run ``program(transport)`` on ``size`` ranks; return their outcomes, ordered by rank.

    Args:
        alpha: seconds of delay between nodes.
        beta: seconds per byte between nodes.
        gap: seconds between two messages of one rank to other nodes, beside their bytes.
        node_of_rank: node number of each rank; ``None``: each rank has its own node.
        node_alpha, node_beta, node_gap: costs inside a node; default to those between nodes.
        delays: start time of each rank in seconds; ``None``: all start at 0.
        loss: the share of packets between nodes that are lost and sent again, below 1.
        seed: chooses the packets that are lost.
        weigh: ``weigh(data)`` returns the size of a message for times and counters; ``None``: its real size.
        threads: run each rank in a thread, which PyTorch and JAX need; false: in a greenlet, which is faster.
        catch: return errors in the outcomes instead of raising the error of the lowest rank that failed.

    Raises:
        InvalidInputError: an argument is invalid.
        TransportError: greenlet is not installed (without ``threads``).
    """
    between = MessageCost(alpha, beta, gap)
    pairs = zip((node_alpha, node_beta, node_gap), between, strict=True)
    inside = MessageCost(*(outside if own is None else own for own, outside in pairs))
    if size < 1 or min(*between, *inside) < 0:
        raise InvalidInputError(f"{size} ranks, {between}, {inside}: expected at least one rank and costs >= 0")
    for name, items in (("node_of_rank", node_of_rank), ("delays", delays)):
        if items is not None and len(items) != size:
            raise InvalidInputError(f"{name} has {len(items)} items; expected {size}, one for each rank")
    if delays is not None and min(delays) < 0:
        raise InvalidInputError(f"delays contains {min(delays)}; expected at least 0 seconds")
    if not 0 <= loss < 1:
        raise InvalidInputError(f"loss={loss}: expected at least 0, and less than 1")
    network = Network(range(size) if node_of_rank is None else node_of_rank, between, inside, loss, seed)
    scheduler, starts = Threads() if threads else Greenlets(), delays or [0.0] * size
    results: dict[int, Result[T]] = {}
    world = World(network, scheduler, weigh or len)

    def task(rank: int) -> None:
        transport, value, error, killed = world.ranks[rank], None, None, False
        transport.seconds = starts[rank]
        try:
            value = program(transport)
        except Exception as raised:
            error = raised
        except Killed:
            killed = True
        results[rank] = Result(value, error, transport.seconds, transport.counters, killed)

    scheduler.run(task, starts, world.break_deadlock)
    by_rank = [results[rank] for rank in range(size)]
    errors = [result.error for result in by_rank if result.error is not None]
    if errors and not catch:
        raise errors[0]
    return by_rank
