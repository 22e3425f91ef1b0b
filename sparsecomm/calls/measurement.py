"""`costs_of`: the costs for planning calls on a communicator. `LinkMeasurement`: the call that measures them.

If there is no profile for the communicator, the ranks measure latency and bandwidth once (`sparsecomm.tuning.links`).
With several nodes, every algorithm uses these costs: they decide whether a rank sends small messages directly to all
others (one trip) or forwards them in log2 P trips. On one node, the costs are used only to choose an algorithm.
"""

from __future__ import annotations

from sparsecomm.calls.label import Label
from sparsecomm.calls.options import SumSettings
from sparsecomm.calls.queue import NO_ENTRIES, Call, Handle, queue_of
from sparsecomm.signals import deferred
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.tuning import profile
from sparsecomm.tuning.links import Links, Probe
from sparsecomm.tuning.profile import KnownCosts


@deferred
def costs_of(transport: Transport, measurement: LinkMeasurement | None = None) -> KnownCosts:
    """Return the costs for planning calls. They are the same on all ranks.

    If the costs are unknown, this function measures them, after the calls in the queue. It is then collective, and
    raises the errors of a call. ``measurement``: the result of `measurement_needed`. Pass it to check
    ``must_roll_back`` and ``state`` after an error.
    """
    measurement = measurement or measurement_needed(transport)
    if measurement is not None:
        queue_of(transport).call(measurement)
    costs = _known(transport) if measurement is None else measurement.costs
    assert costs is not None
    return costs


@deferred
def costs_for_steps(transport: Transport) -> KnownCosts:
    """Return the result of `costs_of`, for a step of a reducer.

    If the queue has a thread, an interrupt (Ctrl-C) ends only the wait, and the thread continues the measurement. Call
    this function again to wait for it.
    """
    step = transport.attached(_StepMeasurement)
    if step.handle is None and (measurement := measurement_needed(transport)) is not None:
        step.handle = queue_of(transport).submit(measurement)
    step.wait()
    return costs_of(transport)


class _StepMeasurement:
    """The measurement that `costs_for_steps` has submitted on a transport, until a wait sees its end."""

    def __init__(self, _: Transport) -> None:
        self.handle: Handle | None = None

    def wait(self) -> None:
        """Wait for the measurement, if there is one. After an interrupt it continues."""
        handle = self.handle
        if handle is not None:
            try:
                handle.wait()
            finally:
                if handle._outcome is not None:
                    self.handle = None


def costs_matter(transport: Transport, settings: SumSettings) -> bool:
    """Return whether calls with these settings need the costs of the links."""
    return transport.num_nodes > 1 or settings.chooses_algorithm


def plan_costs(
    transport: Transport, settings: SumSettings, measurement: LinkMeasurement | None = None
) -> KnownCosts | None:
    """Return the costs for planning a call with ``settings``.

    On one node, a call with a given algorithm needs no measurement. The result is then ``None`` if the wire format is
    also given, and otherwise the known or assumed costs, which decide the format. For the other arguments and the
    errors, see `costs_of`.
    """
    if costs_matter(transport, settings):
        return costs_of(transport, measurement)
    return None if settings.wire != "auto" else _known(transport) or profile.ASSUMED


def measurement_needed(transport: Transport, settings: SumSettings | None = None) -> LinkMeasurement | None:
    """Return the call that `costs_of` has to make, or None if costs are known or ``settings`` do not need them."""
    if settings is not None and not costs_matter(transport, settings):
        return None
    step = transport.attached(_StepMeasurement)
    if (handle := step.handle) is not None and _known(transport) is None:  # an interrupt ended `costs_for_steps`
        try:
            step.wait()
        except Exception:
            if handle.error is None:
                raise
    return LinkMeasurement(transport) if _known(transport) is None else None


@deferred
def measured_links(transport: Transport, seconds: float) -> Links:
    """Measure the links, even if they have been measured before. Collective; raises what `costs_of` raises.

    ``seconds``: time budget, as in `sparsecomm.tuning.links.Probe.measure`.
    """
    measurement = LinkMeasurement(transport, seconds)
    queue_of(transport).call(measurement)
    assert measurement.links is not None
    return measurement.links


def _known(transport: Transport) -> KnownCosts | None:
    return profile.costs_for(transport.library, transport.size, transport.num_nodes) or queue_of(transport).plans.costs


class LinkMeasurement(Call):
    """Measures the links between ranks, and stores the costs with the plans. They are the same on all ranks."""

    label = Label.of(("call", "measurement of links, before the first sum"))

    def __init__(self, transport: Transport, seconds: float = 0.0) -> None:
        """Prepare it; ``seconds`` is the time budget of `sparsecomm.tuning.links.Probe.measure`."""
        super().__init__(transport)
        self.links: Links | None = None
        self.costs: KnownCosts | None = None  # computed from the links
        self.must_roll_back = False  # after an error, the caller must: the call has begun, or the transport failed
        self._probe, self._seconds, self._last_success = Probe(transport), seconds, transport.last_success
        self.comm = self._probe.comm

    def _begin(self) -> None:
        self.comm.begin()
        self.must_roll_back = True

    def _roll_back(self) -> None:
        self.must_roll_back = True  # also if `_begin` failed

    def _exchange(self) -> SparseVector:
        self.links = links = self._probe.measure(self._seconds)
        self.costs = profile.measured(links.between, links.inside)
        return NO_ENTRIES

    def _finish(self, result: SparseVector) -> None:
        if not self._seconds:  # a measurement by a tool does not change the costs of calls
            queue_of(self.transport).plans.costs = self.costs
        self.transport.last_success = self._last_success  # `last_call` reports sums only
