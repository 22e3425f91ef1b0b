"""The ways to train that a plan compares, each with its prediction."""

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
OPTIMIZERS = {"adamw": SGD, "sgd": ADAMW}  # the method that does not suit the optimizer
_SIMPLER = 1.05
_GOOD = 0.9  # utilisation
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
    """One way to train.

    Attributes:
        method: of `METHODS`.
        exchange: algorithm, wire format and schedule.
        predicted: the prediction.
        loss: nats above dense sums in every step, measured with this setting; ``None`` if unknown.
        seconds: to make as much progress as one step with dense sums; infinite if the loss is unknown.
        arguments: of the method, besides its defaults.
    """

    method: str
    exchange: Exchange
    predicted: Prediction
    loss: float | None
    seconds: float
    arguments: str = ""

    @property
    def H(self) -> int:  # noqa: N802 - the papers' name
        """Local steps per round."""
        return self.exchange.sync_every or 1

    @property
    def step_seconds(self) -> float:
        """Wall time per step."""
        return self.predicted.round_seconds / self.H

    def as_row(self) -> dict[str, Any]:
        """Return the row of the JSON file."""
        return {
            "method": self.method,
            "arguments": self.arguments,
            "sync_every": self.exchange.sync_every,
            "fragment_sync_delay": self.exchange.delay,
            "density": self.exchange.density,
            "algorithm": self.predicted.algorithm,
            "wire": self.predicted.wire,
            "exchange_seconds": self.predicted.seconds,
            "bytes_per_round": self.predicted.nbytes,
            "round_seconds": self.predicted.round_seconds,
            "step_seconds": self.step_seconds,
            "utilisation": self.predicted.utilisation,
            "nats_above_dense": self.loss,
            "seconds_at_equal_loss": self.seconds if self.loss is not None else None,
        }


def ways(training: Training, network: Network, every: Sequence[int], costs: Costs) -> Iterator[Way]:
    """Yield all ways to train; ``every`` lists the numbers of local steps per round."""
    dense = nats("dense", 1)

    def way(method: str, exchange: Exchange, loss: float | None, arguments: str = "") -> Way:
        predicted = predict(training, network, exchange, costs)
        steps = math.inf if loss is None else relative_steps(dense + loss)
        seconds = predicted.round_seconds / (exchange.sync_every or 1) * steps
        return Way(method, exchange, predicted, loss, seconds, arguments)

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
        max_delay = math.ceil(max(local(name, H).predicted.seconds for name in sparse) / training.step_seconds)
        delays = range(1, min(H - 1, max_delay) + 1)
        if delays:
            yield min((local(name, H, delay) for name in sparse for delay in delays), key=_seconds)


def best(table: Sequence[Way], optimizer: str = "adamw") -> Way:
    """Return the way that reaches the same loss in the least time, or a simpler one that takes hardly longer.

    Dense sums in every step are good enough if ranks compute most of the time.

    Args:
        table: all ways.
        optimizer: of `OPTIMIZERS`; ways that do not suit it are ignored.
    """
    table = [way for way in table if way.method != OPTIMIZERS[optimizer]]
    dense = [way for way in table if way.method == DENSE and way.predicted.utilisation >= _GOOD]
    if dense:
        return dense[0]
    limit = _SIMPLER * min(map(_seconds, table))
    simplest = next(m for m in METHODS if any(way.method == m and way.seconds <= limit for way in table))
    return min((way for way in table if way.method == simplest), key=_seconds)


def _seconds(way: Way) -> float:
    return way.seconds
