"""Many ranks in one process, in virtual time.

Every rank is a greenlet that runs until it waits for a message, so the shipped algorithms themselves run at any
number of ranks, without MPI, and tell what they would cost on a given network.

A message of B bytes comes ``alpha + beta * B`` seconds after it has begun to leave (Culler et al., "LogP", PPoPP 1993;
Alexandrov et al., "LogGP", SPAA 1995). The delay alpha is the network's: messages to several ranks, or from several,
are under way at once. Each end carries one message at a time, and ``gap + beta * B`` seconds lie between the beginnings
of two:

- the sender begins with a message that long after its last one, and may reuse the bytes that long after;
- the receiver takes it in from alpha later on, or when the message that it received before is in and ``gap`` is over,
  and has it ``beta * B`` later.

A receiver takes its messages in in the order in which it asks for them. So with ``alpha=1``, and nothing else, the
seconds of a call are its one-way trips.

Ranks of one node (equal numbers in ``node_of_rank``) send each other messages at costs of their own, ``node_alpha``,
``node_beta`` and ``node_gap``. Messages between nodes go over the node's links, one out and one in, which all its ranks
share: a message has the link out of the sender's node, and alpha later the link into the receiver's, to itself for
``beta * B`` seconds, and both ends wait until it does.

A link is granted in the order of virtual time in which ranks ask for it, of equal times to the lowest rank that can
run: the link out is asked for when a send starts, the link in when the message begins to leave the sender and
the receiver wants it. What is granted is the earliest time from which the link is free for long enough; that may lie
before the asking, if the message was under way by then. To ask in that order, the rank whose clock is lowest runs.
Thus all times follow from the programs alone, and every run gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sparsecomm.errors import InvalidInputError
from sparsecomm.transport.base import TrafficCounters
from sparsecomm.transport.memory import Bytes
from sparsecomm.transport.simulated.network import MessageCost, Network
from sparsecomm.transport.simulated.rank import SimulatedTransport, World
from sparsecomm.transport.simulated.scheduler import Scheduler

__all__ = ["Result", "SimulatedTransport", "run"]

T = TypeVar("T")


@dataclass(frozen=True)
class Result(Generic[T]):
    """The outcome of one rank."""

    value: T | None  # what the program returned
    error: Exception | None  # what it raised
    seconds: float  # the virtual time at which it finished
    counters: TrafficCounters


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
    weigh: Callable[[Bytes], int] | None = None,
    catch: bool = False,
) -> list[Result[T]]:
    """Run ``program(transport)`` on ``size`` ranks; return what became of each, by rank.

    Args:
        alpha: seconds of delay between nodes.
        beta: seconds per byte between nodes.
        gap: seconds between nodes from one of a rank's messages to the next, beside its bytes.
        node_of_rank: for each rank, the number of its node; ``None``: each has its own.
        node_alpha, node_beta, node_gap: inside a node; ``None``: as between nodes.
        delays: for each rank, the seconds by which it begins late; ``None``: all begin at 0.
        weigh: the bytes that a message stands for, in times and counters; ``None``: its own.
        catch: put errors into the results; otherwise the error of the lowest rank that failed is raised.

    Raises:
        InvalidInputError: an argument cannot be used.
        TransportError: greenlet is not installed.
    """
    between = MessageCost(alpha, beta, gap)
    given = zip((node_alpha, node_beta, node_gap), between, strict=True)
    inside = MessageCost(*(outside if own is None else own for own, outside in given))
    if size < 1 or min(*between, *inside) < 0:
        raise InvalidInputError(f"{size} ranks, {between}, {inside}: expected one rank at least and costs >= 0")
    for name, each in (("node_of_rank", node_of_rank), ("delays", delays)):
        if each is not None and len(each) != size:
            raise InvalidInputError(f"{name} has {len(each)} items: expected {size}, one for every rank")
    if delays is not None and min(delays) < 0:
        raise InvalidInputError(f"a delay of {min(delays)} seconds: expected at least 0")
    network = Network(range(size) if node_of_rank is None else node_of_rank, between, inside)
    scheduler, starts = Scheduler(), delays or [0.0] * size
    results: dict[int, Result[T]] = {}
    world = World(network, scheduler, weigh or len)

    def task(rank: int) -> None:
        transport, value, error = world.ranks[rank], None, None
        transport.seconds = starts[rank]
        try:
            value = program(transport)
        except Exception as raised:
            error = raised
        results[rank] = Result(value, error, transport.seconds, transport.counters)

    scheduler.run(task, starts, world.break_deadlock)
    by_rank = [results[rank] for rank in range(size)]
    errors = [result.error for result in by_rank if result.error is not None]
    if errors and not catch:
        raise errors[0]
    return by_rank
