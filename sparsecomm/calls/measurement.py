"""The call that measures links, and the costs of messages and work by which calls on a communicator are planned.

Costs come from a profile. Without one that fits, `LinkMeasurement` measures delay and rate, once on each communicator.
Every call between nodes uses them, whatever its algorithm, because they decide whether small messages reach all ranks
in one trip or in log2 P. On one node, only the choice of an algorithm needs them.
"""

from __future__ import annotations

import numpy as np

from sparsecomm.calls.call import Call, State
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import queue_of
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.links import Links, Probe
from sparsecomm.tuning.profile import KnownCosts

__all__ = [
    "LinkMeasurement",
    "costs_for_steps",
    "costs_matter",
    "costs_of",
    "measured_links",
    "measurement_needed",
    "plan_costs",
]

_NOTHING = SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))


def costs_of(transport: Transport, measurement: LinkMeasurement | None = None) -> KnownCosts:
    """Return the costs by which calls are planned, the same on all ranks.

    They are measured if there is no profile for these ranks, and they have not been measured. Then this is a call,
    which all ranks must make; it comes after those in the queue.

    Args:
        ranks: the ranks.
        measurement: what `measurement_needed` has returned, if the caller has asked, to know what becomes of it.

    Raises:
        CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: that call has failed, as any other.
    """
    if measurement is None:
        measurement = measurement_needed(transport)
    if measurement is not None:
        queue_of(transport).call(measurement)
        assert measurement.found is not None
        return measurement.found
    used = _known(transport)
    assert used is not None
    return used


def costs_for_steps(transport: Transport) -> KnownCosts:
    """Like `costs_of`, but where a thread makes calls an interrupt ends only the wait. The next call resumes it."""
    queue = queue_of(transport)
    handle = queue.measuring
    if handle is None:
        measurement = measurement_needed(transport)
        if measurement is None:
            return costs_of(transport)
        queue.measuring = handle = queue.submit(measurement)
    try:
        handle.wait()
    except BaseException:
        if handle.error is not None:
            queue.measuring = None
        raise
    queue.measuring = None
    return costs_of(transport)


def costs_matter(transport: Transport, options: Options) -> bool:
    """Return whether calls with these options need costs that are those of the links."""
    return transport.num_nodes > 1 or options.chooses_algorithm


def plan_costs(transport: Transport, options: Options, measurement: LinkMeasurement | None = None) -> KnownCosts | None:
    """Return the costs by which a plan chooses; ``None``: its options leave nothing to choose, on one node.

    For a wire format alone nothing is measured; without a profile, what has been measured or is assumed will do.

    Args:
        ranks, measurement: as of `costs_of`.
        options: of the plan.

    Raises:
        CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as `costs_of`.
    """
    if costs_matter(transport, options):
        return costs_of(transport, measurement)
    return None if options.decided else _known(transport) or profile.assumed()


def measurement_needed(transport: Transport, options: Options | None = None) -> LinkMeasurement | None:
    """Return the call that `costs_of` will make; ``None``: none, since costs are known.

    Args:
        ranks: the ranks.
        options: of calls, which may not need them; ``None``: they are needed.
    """
    if options is not None and not costs_matter(transport, options):
        return None
    queue = queue_of(transport)
    if queue.measuring is not None and _known(transport) is None:  # a reducer's wait for it was interrupted
        try:
            queue.measuring.wait()
        except Exception:  # the other ranks measure again, too
            pass
        except BaseException:
            if queue.measuring.error is not None:
                queue.measuring = None
            raise
        queue.measuring = None
    return LinkMeasurement(transport) if _known(transport) is None else None


def measured_links(transport: Transport, seconds: float) -> Links:
    """Measure the links between ranks, even if they have been measured before. Collective.

    Args:
        ranks: the ranks.
        seconds: as of `sparsecomm.tuning.links.Probe.measure`.

    Raises:
        CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: the call has failed, as any other.
    """
    measurement = LinkMeasurement(transport, seconds)
    queue_of(transport).call(measurement)
    assert measurement.links is not None
    return measurement.links


def _known(transport: Transport) -> KnownCosts | None:
    return profile.costs_for(transport.library, transport.size, transport.num_nodes) or queue_of(transport).measured


class LinkMeasurement(Call):
    """A call after which the queue knows how long messages take, the same on all ranks.

    Attributes:
        must_keep: whether the caller must keep its gradient: the measurement has begun, even if it then failed, or the
            transport has failed.
        links, found: the links, and the costs with them; ``None``: it has not come so far.
    """

    def __init__(self, transport: Transport, seconds: float = 0.0) -> None:
        """Prepare it; ``seconds``: as of `sparsecomm.tuning.links.Probe.measure`."""
        super().__init__(transport)
        self.links: Links | None = None
        self.found: KnownCosts | None = None
        self._probe, self._queue, self._seconds = Probe(transport), queue_of(transport), seconds
        self._counted = transport.counted
        self.must_keep = False

    def _communicator(self) -> Communicator:
        return self._probe.comm

    def _begin(self) -> None:
        self._probe.comm.begin()
        self.must_keep = True

    def _keep(self) -> None:
        self.must_keep = True  # `_begin` may have failed

    @property
    def failed(self) -> bool:
        """Whether this rank has left it with an error, of which the others know."""
        return self.must_keep and self.state is State.FAILED

    def _exchange(self) -> SparseVector:
        links = self._probe.measure(self._seconds)
        self.links, self.found = links, profile.measured(links.between, links.inside)
        return _NOTHING

    def _finish(self, result: SparseVector) -> None:
        if not self._seconds:  # tools do not change the costs that calls use
            self._queue.measured = self.found
        self.transport.counted = self._counted  # to the program, the sum that comes next is the call that may count
