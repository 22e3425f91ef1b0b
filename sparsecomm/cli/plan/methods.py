"""The ways to train together that a plan compares, with what is to be expected of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sparsecomm.primitives.costs import Costs
from sparsecomm.tuning.equal_loss import TRAINED, nats, relative_steps
from sparsecomm.tuning.utilisation import Exchange, Network, Prediction, Training, predict

__all__ = ["DELAYED", "DENSE", "DENSE_LOCAL", "LOCAL", "METHODS", "STEPS", "Way", "best", "ways"]

# The simplest first: a plan takes a later one only if it is faster by more than `_SIMPLER`.
DENSE, DENSE_LOCAL, STEPS, LOCAL, DELAYED = METHODS = (
    "dense, every step",
    "dense local steps",
    "sparse, every step",
    "sparse local steps",
    "the same, delayed",
)
_SIMPLER = 1.05
_GOOD = 0.9

# Of gradients in every step: by density, the nats above dense sums of docs/reports/convergence.md (`split`, P = 8).
_DENSITIES = {0.01: 0.056, 0.001: 0.309}
_CHUNKS = 64 / 4096  # the density of `LocalSteps`
_WIRE = "packed_int2"


@dataclass(frozen=True)
class Way:
    """One way to train together.

    Attributes:
        method: of `METHODS`.
        exchange: what is exchanged, and how.
        found: what is to be expected.
        loss: nats after a training of docs/reports/local-steps.md.
        seconds: that pass for what one step with dense sums achieves.
    """

    method: str
    exchange: Exchange
    found: Prediction
    loss: float
    seconds: float

    @property
    def H(self) -> int:  # noqa: N802 - the papers' name
        """Local steps of a round."""
        return self.exchange.sync_every or 1

    def as_row(self) -> dict[str, Any]:
        """Return the row of the JSON file."""
        return {
            "method": self.method,
            "sync_every": self.exchange.sync_every,
            "fragment_sync_delay": self.exchange.delay,
            "density": self.exchange.density,
            "algorithm": self.found.algorithm,
            "wire": self.found.wire,
            "exchange_seconds": self.found.seconds,
            "bytes_per_round": self.found.nbytes,
            "round_seconds": self.found.round_seconds,
            "utilisation": self.found.utilisation,
            "nats": self.loss,
            "seconds_at_equal_loss": self.seconds,
        }


def ways(training: Training, network: Network, every: Sequence[int], costs: Costs) -> Iterator[Way]:
    """Yield all ways, with rounds of ``every`` so many local steps."""

    def way(method: str, exchange: Exchange, loss: float) -> Way:
        found = predict(training, network, exchange, costs)
        seconds = found.round_seconds / (exchange.sync_every or 1) * relative_steps(loss)
        return Way(method, exchange, found, loss, seconds)

    def local(algorithm: str, H: int, delay: int = 0) -> Way:
        exchange = Exchange(algorithm, _WIRE, _CHUNKS, H, delay)
        return way(DELAYED if delay else LOCAL, exchange, nats(algorithm, H, delay))

    loss = nats("dense", 1)
    yield way(DENSE, Exchange(), loss)
    for H in every:
        if H > 1:
            yield way(DENSE_LOCAL, Exchange(sync_every=H), nats("dense", H))
    for density, above in _DENSITIES.items():
        yield way(STEPS, Exchange("auto", "auto", density), loss + above)
    sparse = [name for name in TRAINED if name != "dense"]
    for H in every:
        yield min((local(name, H) for name in sparse), key=_seconds)
    for H in every:
        waited = math.ceil(max(local(name, H).found.seconds for name in sparse) / training.step_seconds)
        delays = range(1, min(H - 1, waited) + 1)
        if delays:
            yield min((local(name, H, delay) for name in sparse for delay in delays), key=_seconds)


def best(found: Sequence[Way]) -> Way:
    """Return the way that takes the least time to equal loss, or a simpler one that hardly takes more.

    Dense sums in every step are good enough where ranks compute most of the time, even with nothing hidden.
    """
    dense = [way for way in found if way.method == DENSE and way.found.utilisation >= _GOOD]
    if dense:
        return dense[0]
    limit = _SIMPLER * min(map(_seconds, found))
    simplest = next(m for m in METHODS if any(way.method == m and way.seconds <= limit for way in found))
    return min((way for way in found if way.method == simplest), key=_seconds)


def _seconds(way: Way) -> float:
    return way.seconds
