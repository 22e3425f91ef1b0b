"""The picture of a plan: utilisation against the rate of the links, and against H."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsecomm.cli.plan.advice import described
from sparsecomm.cli.plan.methods import ADAMW, DELAYED, DENSE, DENSE_LOCAL, LOCAL, SGD, Way, ways
from sparsecomm.cli.plots import log_axis, pyplot
from sparsecomm.primitives.costs import Costs
from sparsecomm.quantities import number_text, rate_text
from sparsecomm.tuning.utilisation import Network, Training

__all__ = ["draw", "write"]

_STYLES: dict[str, dict[str, Any]] = {
    DENSE: {"color": "#4d4d4d", "marker": "o"},
    DENSE_LOCAL: {"color": "#0072b2", "marker": "s"},
    ADAMW: {"color": "#e69f00", "marker": "^"},
    SGD: {"color": "#cc79a7", "marker": "P"},
    LOCAL: {"color": "#009e73", "marker": "v"},
    DELAYED: {"color": "#d55e00", "marker": "D"},
}
_FACTORS = [10 ** (j / 6) for j in range(-9, 10)]  # multiples of the rate of the plan


def write(path: Path, training: Training, network: Network, every: Sequence[int], costs: Costs, taken: Way) -> None:
    """Write the picture to a file."""
    figure = draw(training, network, every, costs, taken)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def draw(training: Training, network: Network, every: Sequence[int], costs: Costs, taken: Way) -> Any:
    """Return the figure: against the rate with the H of ``taken`` on the left, and against H on the right."""
    H = taken.H if taken.H > 1 else max(every)
    networks = [replace(network, rate=factor * network.rate) for factor in _FACTORS]
    by_rate = [(each.rate, way) for each in networks for way in ways(training, each, [H], costs)]
    by_length = [(way.H, way) for way in ways(training, network, every, costs)]
    figure, (rates, lengths) = pyplot().subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    for method, look in _STYLES.items():
        first = next((way for _, way in by_rate if way.method == method), None)  # of several settings
        at_rate, at_length = (
            [(x, 100 * w.predicted.utilisation) for x, w in points if first and _line_of(w) == _line_of(first)]
            for points in (by_rate, by_length)
        )
        if first and at_rate:
            rates.plot(*zip(*at_rate, strict=True), **look, markevery=[len(at_rate) // 2], label=_label(first, H))
        if method in (DENSE, ADAMW, SGD):
            lengths.axhline(at_length[0][1], color=look["color"])
        elif at_length:
            lengths.plot(*zip(*at_length, strict=True), **look)
    ring = {"marker": "o", "color": "black", "markersize": 14, "fillstyle": "none", "linestyle": ""}
    rates.plot([network.rate], [100 * taken.predicted.utilisation], **ring, label="the plan")
    lengths.plot([taken.H], [100 * taken.predicted.utilisation], **ring)
    rates.axvline(network.rate, color="black", linewidth=0.8, linestyle=":")
    log_axis(rates.xaxis, rate_text)
    rates.set_xlabel("rate of a site's link")
    rates.set_ylabel("utilisation: time of computation / time that passes, %")
    lengths.set_xscale("log", base=2)
    lengths.set_xticks(every, [number_text(each) for each in every])
    lengths.minorticks_off()
    lengths.set_xlabel(f"H, local steps of a round, at {rate_text(network.rate)}")
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
