"""A plan in words: what to take, the line of code for it, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from sparsecomm.cli.plan.methods import DELAYED, DENSE, DENSE_LOCAL, LOCAL, STEPS, Way
from sparsecomm.quantities import bytes_text, number_text, percent_text, rate_text, time_text
from sparsecomm.tuning.equal_loss import nats
from sparsecomm.tuning.utilisation import Network, Training, stream_rate

__all__ = ["described", "said"]

_DEFAULT_BUFFERS = 4e6  # bytes of a connection that Linux allows, as it comes


def described(training: Training, network: Network) -> dict[str, str]:
    """Return the training and the network, for people."""
    links = f"{rate_text(network.rate)} each way, round trips of {time_text(network.rtt) if network.rtt else '0 ms'}, "
    sites = f", {network.per_site} at each site" if network.per_site > 1 else ""
    return {
        "training": f"{number_text(training.parameters)} parameters on {training.ranks} ranks{sites}; "
        f"{time_text(training.step_seconds)} a step",
        "links": links + (f"{percent_text(network.loss)} of the packets lost" if network.loss else "no loss"),
    }


def said(taken: Way, found: Sequence[Way], training: Training, network: Network) -> list[str]:
    """Return the advice, line by line."""
    dense = next(way for way in found if way.method == DENSE)
    locally = [way for way in found if way.method == DENSE_LOCAL and way.H == taken.H]
    others = [f"{_part(dense)} with dense sums in every step"]
    others += [f"{_part(way)} with dense local steps of H = {way.H}" for way in locally if way is not taken]
    others = [text for way, text in zip([dense, *locally], others, strict=False) if way is not taken]
    pays = taken.method in (STEPS, LOCAL, DELAYED)
    instead = f", instead of {' and '.join(others)}" if others else ""
    what = _WHAT[taken.method].format(H=taken.H, density=number_text(taken.exchange.density))
    verdict = "Sparse sums pay here." if pays else "Sparse sums do not pay here."
    take = f"Take {what}: ranks compute {_part(taken)} of the time{instead}."
    cautions = [
        line for caution in _cautions(taken, network) for line in wrap(f"- {caution}", 100, subsequent_indent="  ")
    ]
    return [verdict, *wrap(take, 100), "", *(f"    {line}" for line in _code(taken)), "", *cautions]


_WHAT = {
    DENSE: "dense sums in every step",
    DENSE_LOCAL: "dense local steps, H = {H}",
    STEPS: "sparse sums in every step, at a density of {density}",
    LOCAL: "sparse local steps, H = {H}",
    DELAYED: "sparse local steps, H = {H}, exchanged in the background",
}


def _part(way: Way) -> str:
    part = way.found.utilisation
    return percent_text(part, 2) if part < 0.995 else "all"


def _code(way: Way) -> list[str]:
    """Return the lines to paste."""
    exchange = way.exchange
    if way.method == DENSE:
        return ["model = torch.nn.parallel.DistributedDataParallel(model)  # as it is"]
    if way.method == DENSE_LOCAL:
        return [
            "outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)",
            f"diloco = sparsecomm.torch.DiLoCo(model, inner, outer, 1.0, sync_every={way.H})",
        ]
    if way.method == STEPS:
        density = number_text(exchange.density)
        return [
            f'state = sparsecomm.torch.register(model, {density}, algorithm="fastest")  # DistributedDataParallel',
            f'reducer = sc.Reducer(parameters, {density}, algorithm="fastest")  # others',
        ]
    delay = f", fragment_sync_delay={exchange.delay}" if exchange.delay else ""
    return [
        f'local = sc.LocalSteps(parameters, sync_every={way.H}{delay}, algorithm="{exchange.algorithm}")',
        "# PyTorch: sparsecomm.torch.DiLoCo(model, inner, ...), with the same options",
    ]


def _cautions(way: Way, network: Network) -> list[str]:
    """Return what to beware of."""
    lines = []
    if way.method in (LOCAL, DELAYED, DENSE_LOCAL):
        lines.append(
            f"Loss: {way.loss:.2f} nats in trainings of 600 local steps, where dense sums in every step came to "
            f"{nats('dense', 1):.2f}. Longer trainings bear a larger H: with twice the steps, H = 30 cost about half "
            "as much beside H = 10, and with half of them twice as much. See docs/reports/local-steps.md."
        )
    if way.method == STEPS:
        lines.append(
            "Loss: try it with your model first. Sparse gradients suit SGD; with Adam take local steps, also with "
            "H = 1. See docs/reports/convergence.md."
        )
    if way.method == DELAYED:
        lines.append(f"What is exchanged is applied late, by a delay of {way.exchange.delay}, which is in that loss.")
    one, product = stream_rate(network), network.rate * network.rtt / 8
    if one < network.rate / 2:
        lines.append(
            f"One TCP connection carries {rate_text(one)} here in the long run, because of delay and loss. BBR does "
            "not slow down for losses: `sysctl net.ipv4.tcp_congestion_control=bbr` on all machines, if you may."
        )
    if product > _DEFAULT_BUFFERS:
        lines.append(
            f"{bytes_text(product)} are under way when the link is full: raise the maxima of net.ipv4.tcp_rmem and "
            "net.ipv4.tcp_wmem above that, on all machines."
        )
    return lines
