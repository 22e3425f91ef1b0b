"""`run`: a program on several ranks in one process, over a network that may be slow and lose packets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from sparsecomm.checks import quote, to_float, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import simulated
from sparsecomm.transport.simulated import Result, SimulatedTransport

_T = TypeVar("_T")


def run(
    size: int,
    program: Callable[[SimulatedTransport], _T],
    *,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    loss: float = 0.0,
    seed: int = 0,
    ranks_per_node: int = 1,
    catch: bool = False,
) -> list[Result[_T]]:
    """Run ``program(comm)`` on ``size`` ranks, and return their results, ordered by rank.

        def train(comm):
            model = new_model()
            optimizer = SparseAdamW(model.named_parameters(), comm=comm)
            ...
            return model.state_dict()

        results = testing.run(4, train, latency=0.04, bandwidth=100e6)

    Each rank has a thread, and one rank runs at a time. Time is virtual: waiting takes none, and the results are the
    same in every run. ``comm`` replaces the communicator or process group, and knows ``comm.rank`` and ``comm.size``.
    ``comm.compute(seconds)`` makes this rank late, and ``comm.kill()`` lets it die.

    Args:
        latency: seconds from node to node.
        bandwidth: of a node's link in each direction, in bits per second.
        loss: the share of packets that are lost, which TCP sends again after 0.2 s.
        seed: chooses the packets that are lost.
        ranks_per_node: number of ranks that share a node and its link. Messages inside a node take no time.
        catch: return errors in the results, instead of raising the error of the lowest rank that failed.

    Raises:
        InvalidInputError: an argument is out of range.
    """
    per_node, delay, rate = to_int(ranks_per_node, 1), to_float(latency), to_float(bandwidth)
    if per_node is None or not (delay >= 0 and rate > 0):
        raise InvalidInputError(
            f"latency={quote(latency)}, bandwidth={quote(bandwidth)}, ranks_per_node={quote(ranks_per_node)}: expected "
            "at least 0 seconds, more than 0 bits per second, and at least 1 rank"
        )
    return simulated.run(
        size,
        program,
        alpha=delay,
        beta=8 / rate,
        node_of_rank=[rank // per_node for rank in range(size)],
        node_alpha=0.0,
        node_beta=0.0,
        loss=loss,
        seed=seed,
        catch=catch,
        threads=True,
    )
