"""The figure of docs/guides/plan.md: utilisation against the rate of the links, and against H.

python -m bench.plan plan.png 50mbit 80ms 0.1%
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.plots import log_axis, pyplot, save, style
from sparsecomm.cli import options
from sparsecomm.cli.plan.methods import ADAMW, DELAYED, DENSE, DENSE_LOCAL, LOCAL, SGD, Way, best, described, ways
from sparsecomm.primitives.costs import Costs
from sparsecomm.quantities import number_text, rate_text
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.tuning.utilisation import Network, Training

_STYLES: dict[str, dict[str, Any]] = {  # the same colour for the same exchange
    DENSE: style("dense"),
    DENSE_LOCAL: style("dense") | {"marker": "s", "linestyle": "--"},
    ADAMW: style("SparseAdamW"),
    SGD: style("double") | {"marker": "P", "linestyle": "--"},
    LOCAL: style("local steps"),
    DELAYED: style("local steps") | {"marker": "D", "linestyle": "--"},
}
_FACTORS = [10 ** (j / 6) for j in range(-9, 10)]  # multiples of the rate of the plan


def draw(training: Training, network: Network, every: Sequence[int], costs: Costs, chosen: Way) -> Any:
    """Return the figure of utilisation: on the left against the rate, on the right against H."""
    H = chosen.H if chosen.H > 1 else max(every)
    networks = [replace(network, rate=factor * network.rate) for factor in _FACTORS]
    by_rate = [(each.rate, way) for each in networks for way in ways(training, each, [H], costs)]
    by_length = [(way.H, way) for way in ways(training, network, every, costs)]
    figure, (rates, lengths) = pyplot().subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    for method, look in _STYLES.items():
        first = next((way for _, way in by_rate if way.method == method), None)  # its first setting
        at_rate, at_length = (
            [(x, 100 * w.predicted.utilisation) for x, w in points if first and _line_of(w) == _line_of(first)]
            for points in (by_rate, by_length)
        )
        if first and at_rate:
            rates.plot(*zip(*at_rate, strict=True), **look, markevery=[len(at_rate) // 2], label=_label(first, H))
        if method in (DENSE, ADAMW, SGD):
            lengths.axhline(at_length[0][1], color=look["color"], linestyle=look.get("linestyle", "-"))
        elif at_length:
            lengths.plot(*zip(*at_length, strict=True), **look)
    ring = {"marker": "o", "color": "black", "markersize": 14, "fillstyle": "none", "linestyle": ""}
    rates.plot([network.rate], [100 * chosen.predicted.utilisation], **ring, label="the plan")
    lengths.plot([chosen.H], [100 * chosen.predicted.utilisation], **ring)
    rates.axvline(network.rate, color="black", linewidth=0.8, linestyle=":")
    log_axis(rates.xaxis, rate_text)
    rates.set_xlabel("rate of a site's link, bits per second")
    rates.set_ylabel("utilisation: compute time / wall time, %")
    lengths.set_xscale("log", base=2)
    lengths.set_xticks(every, [number_text(each) for each in every])
    lengths.minorticks_off()
    lengths.set_xlabel(f"H: local steps per round, at {rate_text(network.rate)}")
    for axes in (rates, lengths):
        axes.set_ylim(-2, 102)
        axes.grid(True, alpha=0.35)
    figure.legend(*rates.get_legend_handles_labels(), frameon=False, loc="outside right upper")
    figure.suptitle("\n".join(described(training, network).values()), fontsize="medium")
    return figure


def _line_of(way: Way) -> tuple[str, str]:
    return way.method, way.arguments


def _label(way: Way, H: int) -> str:
    if way.method in (ADAMW, SGD):
        return f"{way.method}, density {number_text(way.exchange.density)}"
    return way.method if way.method == DENSE else f"{way.method}, H = {H}"


if __name__ == "__main__":
    file, rate, rtt, loss = sys.argv[1:]
    network = Network(options.rate(rate), options.seconds(rtt), options.loss(loss))
    training, every = Training(4, 30_800_000, 0.03), (1, 8, 32, 128)
    chosen = best(list(ways(training, network, every, DEFAULT)))
    save(draw(training, network, every, DEFAULT, chosen), Path(file))
