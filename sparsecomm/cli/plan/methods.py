"""The ways to train together that a plan compares, with the prediction for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sparsecomm.primitives.costs import Costs
from sparsecomm.tuning.equal_loss import STEPS_TRAINED, TRAINED, nats, relative_steps
from sparsecomm.tuning.utilisation import Exchange, Network, Prediction, Training, predict

__all__ = ["ADAMW", "DELAYED", "DENSE", "DENSE_LOCAL", "LOCAL", "METHODS", "OPTIMIZERS", "SGD", "Way", "best", "ways"]

# The simplest first: a plan takes a later one only if it is faster by more than `_SIMPLER`.
DENSE, ADAMW, SGD, DENSE_LOCAL, LOCAL, DELAYED = METHODS = (
    "dense (DDP)",
    "SparseAdamW",
    "register",
    "dense local steps",
    "sparse local steps",
    "the same, delayed",
)
OPTIMIZERS = {"adamw": SGD, "sgd": ADAMW}  # what does not suit the optimizer
_SIMPLER = 1.05
_GOOD = 0.9
_CHUNKS = 64 / 4096  # the density of `LocalSteps`
_WIRE = "packed_int2"

# The settings that docs/choosing.md recommends for an exchange in every step: their arguments, and the exchange.
SETTINGS: dict[str, Sequence[tuple[str, Exchange]]] = {
    ADAMW: (
        ("", Exchange("double", _WIRE, 0.09, adamw=True)),
        ('density=0.033, wire="packed_sign"', Exchange("double", "packed_sign", 0.033, adamw=True)),
    ),
    SGD: (
        ("", Exchange("double", _WIRE, 0.1, overlap=True)),
        ("density=0.018, momentum=0.7", Exchange("double", _WIRE, 0.018, overlap=True)),
        ('algorithm="fastest"', Exchange("fastest", "auto", 0.1, overlap=True)),
    ),
}


@dataclass(frozen=True)
class Way:
    """One way to train together.

    Attributes:
        method: of `METHODS`.
        exchange: what is exchanged, and how.
        found: the prediction.
        loss: nats above dense sums in every step, in trainings with this setting; ``None``: not trained.
        seconds: for what one step with dense sums achieves; infinite if it was not trained.
        arguments: of the method, beside its defaults.
    """

    method: str
    exchange: Exchange
    found: Prediction
    loss: float | None
    seconds: float
    arguments: str = ""

    @property
    def H(self) -> int:  # noqa: N802 - the papers' name
        """Local steps of a round."""
        return self.exchange.sync_every or 1

    @property
    def step_seconds(self) -> float:
        """Seconds that pass per step."""
        return self.found.round_seconds / self.H

    def as_row(self) -> dict[str, Any]:
        """Return the row of the JSON file."""
        return {
            "method": self.method,
            "arguments": self.arguments,
            "sync_every": self.exchange.sync_every,
            "fragment_sync_delay": self.exchange.delay,
            "density": self.exchange.density,
            "algorithm": self.found.algorithm,
            "wire": self.found.wire,
            "exchange_seconds": self.found.seconds,
            "bytes_per_round": self.found.nbytes,
            "round_seconds": self.found.round_seconds,
            "step_seconds": self.step_seconds,
            "utilisation": self.found.utilisation,
            "nats_above_dense": self.loss,
            "seconds_at_equal_loss": self.seconds if self.loss is not None else None,
        }


def ways(training: Training, network: Network, every: Sequence[int], costs: Costs) -> Iterator[Way]:
    """Yield all ways, with rounds of ``every`` so many local steps."""
    dense = nats("dense", 1)

    def way(method: str, exchange: Exchange, loss: float | None, arguments: str = "") -> Way:
        found = predict(training, network, exchange, costs)
        steps = math.inf if loss is None else relative_steps(dense + loss)
        return Way(method, exchange, found, loss, found.round_seconds / (exchange.sync_every or 1) * steps, arguments)

    def local(algorithm: str, H: int, delay: int = 0) -> Way:
        exchange = Exchange(algorithm, _WIRE, _CHUNKS, H, delay)
        return way(DELAYED if delay else LOCAL, exchange, nats(algorithm, H, delay) - dense)

    yield way(DENSE, Exchange(overlap=True), 0.0)
    for method, settings in SETTINGS.items():
        for arguments, exchange in settings:
            known = STEPS_TRAINED.get((method == ADAMW, exchange.wire, exchange.density))
            yield way(method, exchange, known, arguments)
    for H in every:
        if H > 1:
            yield way(DENSE_LOCAL, Exchange(sync_every=H), nats("dense", H) - dense)
    sparse = [name for name in TRAINED if name != "dense"]
    for H in every:
        yield min((local(name, H) for name in sparse), key=_seconds)
    for H in every:
        waited = math.ceil(max(local(name, H).found.seconds for name in sparse) / training.step_seconds)
        delays = range(1, min(H - 1, waited) + 1)
        if delays:
            yield min((local(name, H, delay) for name in sparse for delay in delays), key=_seconds)


def best(found: Sequence[Way], optimizer: str = "adamw") -> Way:
    """Return the way that takes the least time to equal loss, or a simpler one that takes hardly more.

    Dense sums in every step are good enough where ranks compute most of the time.

    Args:
        found: all ways.
        optimizer: of `OPTIMIZERS`: ways that do not suit it are left out.
    """
    found = [way for way in found if way.method != OPTIMIZERS[optimizer]]
    dense = [way for way in found if way.method == DENSE and way.found.utilisation >= _GOOD]
    if dense:
        return dense[0]
    limit = _SIMPLER * min(map(_seconds, found))
    simplest = next(m for m in METHODS if any(way.method == m and way.seconds <= limit for way in found))
    return min((way for way in found if way.method == simplest), key=_seconds)


def _seconds(way: Way) -> float:
    return way.seconds
