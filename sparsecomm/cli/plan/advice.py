"""A plan in words: the recommendation, the line of code for it, and cautions."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from sparsecomm.cli.plan.methods import ADAMW, DELAYED, DENSE, DENSE_LOCAL, LOCAL, SGD, Way
from sparsecomm.quantities import bytes_text, number_text, percent_text, rate_text, time_text
from sparsecomm.tuning.utilisation import Network, Training, stream_rate

__all__ = ["advice", "described"]

_DEFAULT_BUFFERS = 4e6  # bytes that Linux allows a connection by default


def described(training: Training, network: Network) -> dict[str, str]:
    """Describe the training and the network in words."""
    links = f"{rate_text(network.rate)} each way, round trips of {time_text(network.rtt) if network.rtt else '0 ms'}, "
    sites = f", {network.per_site} at each site" if network.per_site > 1 else ""
    return {
        "training": f"{number_text(training.parameters)} parameters on {training.ranks} ranks{sites}; "
        f"{time_text(training.step_seconds)} a step",
        "links": links + (f"{percent_text(network.loss)} of the packets lost" if network.loss else "no loss"),
    }


def advice(taken: Way, table: Sequence[Way], training: Training, network: Network) -> list[str]:
    """Return the advice, line by line."""
    dense = next(way for way in table if way.method == DENSE)
    locally = [way for way in table if way.method == DENSE_LOCAL and way.H == taken.H]
    others = [f"{_utilisation(dense)} with dense sums in every step"] if dense is not taken else []
    others += [f"{_utilisation(way)} with dense local steps of H = {way.H}" for way in locally if way is not taken]
    pays = taken.method in (ADAMW, SGD, LOCAL, DELAYED)
    instead = f", instead of {' and '.join(others)}" if others else ""
    what = _WHAT[taken.method].format(H=taken.H, density=number_text(taken.exchange.density))
    verdict = "Sparse sums pay here." if pays else "Sparse sums do not pay here."
    take = f"Use {what}: ranks compute {_utilisation(taken)} of the time{instead}."
    cautions = [
        line for caution in _cautions(taken, network) for line in wrap(f"- {caution}", 100, subsequent_indent="  ")
    ]
    return [verdict, *wrap(take, 100), "", *(f"    {line}" for line in _code(taken)), "", *cautions]


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
    return [
        f'local = sc.LocalSteps(parameters, sync_every={way.H}{delay}, algorithm="{exchange.algorithm}")',
        "# PyTorch: sparsecomm.torch.DiLoCo(model, inner, ...), with the same options",
    ]


def _cautions(way: Way, network: Network) -> list[str]:
    lines = []
    if way.method in (LOCAL, DELAYED, DENSE_LOCAL):
        lines.append(
            f"Loss: {_above(way)} in trainings of 600 local steps. Longer trainings suit a larger H: with twice the "
            "steps, H = 30 cost about half as much compared with H = 10, and with half the steps twice as much. See "
            "docs/reports/local-steps.md."
        )
    if way.method in (ADAMW, SGD):
        lines.append(
            f"Loss: {_above(way)} in trainings of small models on 8 ranks. Compare with dense on your own model. See "
            "docs/reports/what-is-lost.md."
        )
    if "momentum" in way.arguments:
        lines.append("Use SGD without momentum, at twice the learning rate that suits momentum 0.9, and a Warmup.")
    if way.method == DELAYED:
        lines.append(
            f"Exchanges are applied late, after fragment_sync_delay={way.exchange.delay}. The loss includes the effect."
        )
    one, product = stream_rate(network), network.rate * network.rtt / 8
    if one < network.rate / 2:
        lines.append(
            f"A single TCP connection reaches {rate_text(one)} on this link, because of delay and loss. BBR does not "
            "slow down after a loss: if you can, run `sysctl net.ipv4.tcp_congestion_control=bbr` on all machines."
        )
    if product > _DEFAULT_BUFFERS:
        lines.append(
            f"The link holds {bytes_text(product)} in flight: raise the maxima of net.ipv4.tcp_rmem and "
            "net.ipv4.tcp_wmem above that on all machines."
        )
    return lines


def _above(way: Way) -> str:
    assert way.loss is not None, "a plan takes only ways that were trained"
    return f"{abs(way.loss):.2f} nats {'above' if way.loss >= 0 else 'below'} dense sums in every step"
