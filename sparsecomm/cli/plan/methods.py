"""The ways to train that a plan compares, each with its prediction, and the recommendation in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from textwrap import wrap
from typing import Any

from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import bytes_text, number_text, percent_text, rate_text, time_text
from sparsecomm.tuning.equal_loss import PARTICIPANTS, STEPS_TRAINED, TRAINED, nats, relative_steps
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.tuning.utilisation import (
    Exchange,
    Network,
    Prediction,
    Training,
    nodes_count_as_one,
    predict,
    stream_rate,
)

# The simplest first. A plan recommends a later method only if it is faster by more than the factor `_SIMPLER`.
DENSE, ADAMW, SGD, DENSE_LOCAL, LOCAL, DELAYED = METHODS = (
    "dense (DDP)",
    "SparseAdamW",
    "register",
    "dense local steps",
    "sparse local steps",
    "delayed local steps",
)
OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD}  # for each optimizer, the method that exchanges in every step
# Work on a GPU: the kernels on one NVIDIA H200, at a density of 0.01 (bench/results/gpu.txt).
CUDA = replace(DEFAULT, select=4e-12, merge=0.06e-9, codec=0.85e-9, add=3e-12, call=100e-6)
# Assumed between the GPUs of a node: PCIe 4.0 x16, the slowest common link (32 GB/s less overhead), and 20 us a call.
PCIE = Link(alpha=20e-6, beta=0.04e-9)
_SIMPLER = 1.05
_seconds = attrgetter("seconds")
_GOOD = 0.9  # utilisation
_CHUNKS = 64 / 4096  # the density of `LocalSteps`
_WIRE = "packed_int2"

# The settings that docs/guides/choosing.md recommends for an exchange in every step: their arguments, and the exchange.
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
    """One way to train."""

    method: str  # of `METHODS`
    exchange: Exchange
    predicted: Prediction
    loss: float | None  # nats above dense sums in every step, at least 0; None if this setting was not measured
    seconds: float  # to make the same progress as one step with dense sums; infinite if the loss is unknown
    arguments: str = ""  # of the method, besides its defaults

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
            "nodes": self.exchange.nodes,
            "participants": self.predicted.participants,
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


def ways(
    training: Training, network: Network, every: Sequence[int], costs: Costs, optimizer: str = "adamw"
) -> Iterator[Way]:
    """Yield the ways to train that suit ``optimizer``; ``every`` lists the numbers of local steps per round."""
    dense, per_step, nodes = nats("dense", 1), OPTIMIZERS[optimizer], nodes_count_as_one(training, network)

    def way(method: str, exchange: Exchange, loss: float | None, arguments: str = "") -> Way:
        loss = None if loss is None else max(0.0, loss)  # a small model that trained better promises nothing
        predicted = predict(training, network, exchange, costs)
        steps = math.inf if loss is None else relative_steps(dense + loss)
        seconds = predicted.round_seconds / (exchange.sync_every or 1) * steps
        return Way(method, exchange, predicted, loss, seconds, arguments)

    def local(algorithm: str, H: int, delay: int = 0) -> Way:
        exchange = Exchange(algorithm, _WIRE, _CHUNKS, H, delay, nodes=nodes)
        return way(DELAYED if delay else LOCAL, exchange, nats(algorithm, H, delay) - dense)

    yield way(DENSE, Exchange(overlap=True), 0.0)
    settings = [(arguments, replace(exchange, nodes=nodes)) for arguments, exchange in SETTINGS[per_step]]
    if nodes:  # also the first setting without nodes
        settings[1:1] = [("nodes=False", SETTINGS[per_step][0][1])]
    for arguments, exchange in settings:
        known = STEPS_TRAINED.get((exchange.adamw, exchange.wire, exchange.density))
        yield way(per_step, exchange, known, arguments)
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


def best(table: Sequence[Way]) -> Way:
    """Return the way that reaches the same loss in the least time, or a simpler one that is almost as fast.

    If ranks compute most of the time with dense sums in every step, return these.
    """
    dense = [way for way in table if way.method == DENSE and way.predicted.utilisation >= _GOOD]
    if dense:
        return dense[0]
    limit = _SIMPLER * min(map(_seconds, table))
    simplest = next(m for m in METHODS if any(way.method == m and way.seconds <= limit for way in table))
    return min((way for way in table if way.method == simplest), key=_seconds)


# -- in words ---------------------------------------------------------------------------------------------------------

_DEFAULT_BUFFERS = 4e6  # bytes that Linux allows a connection by default


def described(training: Training, network: Network) -> dict[str, str]:
    """Describe the training and the network in words."""
    links = f"{rate_text(network.rate)} each way, round trips of {time_text(network.rtt) if network.rtt else '0 ms'}, "
    nodes = f", {network.ranks_per_node} on each node" if network.ranks_per_node > 1 else ""
    return {
        "training": f"{number_text(training.parameters)} parameters on {training.ranks} ranks{nodes}; "
        f"{time_text(training.step_seconds)} a step",
        "links": links + (f"{percent_text(network.loss)} of the packets lost" if network.loss else "no loss"),
    }


def memory(training: Training, network: Network) -> str:
    """Return the memory of float32 weights, gradients and AdamW's state on each rank: docs/reports/adamw.md."""
    n, owned = training.parameters, 16 / training.ranks if training.ranks > 1 else 12
    slices = network.ranks_per_node if nodes_count_as_one(training, network) else 1  # of residuals, units
    sparse, dense = bytes_text((8 + 5 / slices + owned) * n), bytes_text(16 * n)
    return f"{sparse} with SparseAdamW, {dense} with AdamW: weights, gradients, state"


def advice(chosen: Way, table: Sequence[Way], training: Training, network: Network) -> list[str]:
    """Return the advice, line by line."""
    dense = next(way for way in table if way.method == DENSE)
    locally = [way for way in table if way.method == DENSE_LOCAL and way.H == chosen.H]
    others = [f"{_utilisation(dense)} with dense sums in every step"] if dense is not chosen else []
    others += [f"{_utilisation(way)} with dense local steps of H = {way.H}" for way in locally if way is not chosen]
    sparse_pays = chosen.method in (ADAMW, SGD, LOCAL, DELAYED)
    instead = f", instead of {' and '.join(others)}" if others else ""
    what = _WHAT[chosen.method].format(H=chosen.H, density=number_text(chosen.exchange.density))
    verdict = "Sparse sums pay off here." if sparse_pays else "Sparse sums do not pay off here."
    recommendation = f"Use {what}: ranks compute {_utilisation(chosen)} of the time{instead}."
    if chosen.H > 1:
        way = min((way for way in table if way.method in (ADAMW, SGD)), key=_seconds)
        what = _WHAT[way.method].format(density=number_text(way.exchange.density))
        recommendation += f" The simplest change: {what}, with which ranks compute {_utilisation(way)} of the time."
    caveats = [
        line for caveat in _caveats(chosen, table, network) for line in wrap(f"- {caveat}", 100, subsequent_indent="  ")
    ]
    return [verdict, *wrap(recommendation, 100), "", *(f"    {line}" for line in _code(chosen)), "", *caveats]


_WHAT = {
    DENSE: "dense sums in every step",
    ADAMW: "SparseAdamW, at a density of {density}",
    SGD: "sparse sums in every step, at a density of {density}",
    DENSE_LOCAL: "dense local steps, H = {H}",
    LOCAL: "sparse local steps, H = {H}",
    DELAYED: "sparse local steps, H = {H}, exchanged in the background",
}


def _utilisation(way: Way) -> str:
    utilisation = way.predicted.utilisation
    return percent_text(utilisation, 2) if utilisation < 0.995 else "all"


def _code(way: Way) -> list[str]:
    """Return the code to paste, line by line."""
    exchange = way.exchange
    if way.method == DENSE:
        return ["model = torch.nn.parallel.DistributedDataParallel(model)  # as it is"]
    if way.method == DENSE_LOCAL:
        return [
            "outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)",
            f"diloco = sparsecomm.torch.DiLoCo(model, inner, outer, 1.0, sync_every={way.H})",
        ]
    more = f", {way.arguments}" if way.arguments else ""
    if way.method == ADAMW:
        return [f"optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=lr{more})  # for torch's AdamW"]
    if way.method == SGD:
        return [f"state = sparsecomm.torch.register(model{more})  # a model in DistributedDataParallel"]
    delay = f", fragment_sync_delay={exchange.delay}" if exchange.delay else ""
    options = f'sync_every={way.H}{delay}, algorithm="{exchange.algorithm}"'
    return [
        f"diloco = sparsecomm.torch.DiLoCo(model, inner, {options})",
        "# inner: your optimizer. NumPy: sc.LocalSteps(parameters, ...), with the same options",
    ]


def _caveats(way: Way, table: Sequence[Way], network: Network) -> list[str]:
    lines = []
    if way.method in (LOCAL, DELAYED, DENSE_LOCAL):
        lines.append(
            f"Loss: {_above(way)} for one LSTM of 197,000 weights, after 600 local steps on 8 ranks. Your model "
            "and shorter runs may lose more: with half the steps, going from H = 10 to H = 30 costs twice as much. See "
            "docs/reports/local-steps.md, and compare on your own model."
        )
    if way.method in (ADAMW, SGD):
        lines.append(
            f"Loss: {_above(way)} for one model of at most 200,000 weights on 8 ranks. Your model may lose more: "
            "compare with dense, see docs/guides/compare-with-dense.md."
        )
    if others := sorted({other.predicted.participants for other in table if other.method != DENSE} - {PARTICIPANTS}):
        lines.append(
            f"Losses were measured with {PARTICIPANTS} participants in an exchange: ranks, or nodes that count as one. "
            f"Here, {' or '.join(map(str, others))} participate."
        )
    if "momentum" in way.arguments:
        lines.append("Use SGD without momentum, at twice the learning rate that suits momentum 0.9, and a Warmup.")
    if way.method == DELAYED:
        lines.append(
            f"Exchanges are applied late, after fragment_sync_delay={way.exchange.delay}. The loss includes the effect."
        )
    stream, product = stream_rate(network), network.rate * network.rtt / 8
    if stream < network.rate / 2:
        lines.append(
            f"A single TCP connection reaches {rate_text(stream)} on this link, because of delay and loss. BBR does "
            "not slow down after a loss: if you can, run `sysctl net.ipv4.tcp_congestion_control=bbr` on all machines."
        )
    if product > _DEFAULT_BUFFERS:
        lines.append(
            f"The link holds {bytes_text(product)} in flight: raise the maxima of net.ipv4.tcp_rmem and "
            "net.ipv4.tcp_wmem above that on all machines."
        )
    return lines


def _above(way: Way) -> str:
    assert way.loss is not None, "a plan takes only ways that were trained"
    return f"{way.loss:.2f} nats above dense sums in every step" if way.loss >= 0.005 else "not above dense sums"
