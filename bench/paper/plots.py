"""The plots of `bench.paper.beyond`: where ours wins, and where it loses. Legible in grey: markers differ, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from sparsecomm.quantities import number_text

if TYPE_CHECKING:
    from bench.paper.beyond import Cell

__all__ = ["draw", "draw_densities"]

Group = dict[str, "Cell"]
STYLES = {  # by ranks: colours of Okabe and Ito
    64: ("#0072B2", "o", "-"),
    256: ("#D55E00", "s", "--"),
    1024: ("#009E73", "^", "-."),
    4096: ("#CC79A7", "D", ":"),
}
METHODS = {
    "dense": ("#000000", "o", "-", "dense"),
    "topk": ("#D55E00", "s", "--", "Top-k, allgather"),
    "gtopk": ("#009E73", "^", "-.", "gTop-k, tree"),
    "ours": ("#0072B2", "D", "-", "ours, auto"),
}


def draw(groups: list[Group], folder: Path) -> None:
    """Write beyond-32-exchange.png, -step.png and -ranks.png."""
    exchange, step = "dense / ours: exchange and work", "dense / ours: whole step"
    _against_rate(groups, exchange, lambda its: its["dense"].seconds / its["ours"].seconds, folder, "exchange")
    _against_rate(groups, step, lambda its: its["dense"].step / its["ours"].step, folder, "step")
    _against_ranks(groups, folder)


def draw_densities(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write beyond-32-density.png: the time of dense by that of the best sparse algorithm, against the density."""
    figure, axes = plt.subplots(figsize=(6.4, 4.4))
    rates = sorted({row["rate"] for row in rows})
    for rate, (colour, marker, line) in zip(rates, [*STYLES.values(), ("#000000", "v", "-")], strict=False):
        points = [(row["density"], row["dense"] / row["seconds"]) for row in rows if row["rate"] == rate]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=line, label=_rate_name(rate))
    axes.axhspan(min(0.5, 0.8 * min(row["dense"] / row["seconds"] for row in rows)), 1, color="0.88", zorder=0)
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.text(0.02, 0.02, "dense is faster", transform=axes.transAxes, color="0.25", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="density k/n", ylabel="dense / best sparse: exchange and work")
    axes.set(title=f"{rows[0]['model']}, {rows[0]['P']} ranks, by link rate in bit/s", ymargin=0)
    axes.xaxis.set_major_locator(FixedLocator(sorted({row["density"] for row in rows})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_ratio_name))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="0.85", linewidth=0.6)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "beyond-32-density.png", dpi=130)
    plt.close(figure)


def _panels(groups: list[Group]) -> tuple[Figure, list[tuple[str, Axes]]]:
    models = list(dict.fromkeys(its["ours"].model for its in groups))
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.1 * columns, 3.3 * rows + 0.6), squeeze=False, sharey="row")
    flat = list(axes.flat)
    for spare in flat[len(models) :]:
        spare.set_visible(False)
    return figure, list(zip(models, flat, strict=False))


def _rate_name(bits: float, _: object = None) -> str:
    return f"{number_text(bits / 1e9)}G" if bits >= 0.999e9 else f"{number_text(bits / 1e6)}M"


def _ratio_name(value: float, _: object = None) -> str:
    return f"{value:g}x"


def _against_rate(groups: list[Group], label: str, ratio: Callable[[Group], float], folder: Path, name: str) -> None:
    figure, panels = _panels(groups)
    everything = [ratio(its) for its in groups]
    for model, axes in panels:
        its_groups = [its for its in groups if its["ours"].model == model]
        rates = sorted({8 / its["ours"].link.beta for its in its_groups})
        for P, (colour, marker, line) in STYLES.items():
            points = sorted((8 / its["ours"].link.beta, ratio(its)) for its in its_groups if its["ours"].P == P)
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=line, label=f"{P:,} ranks")
        axes.set(title=model, xscale="log", yscale="log", xlabel="rate of a link, bit/s")
        bottom, top = min(0.5, 0.8 * min(everything)), 1.3 * max(everything)
        axes.axhspan(bottom, 1, color="0.88", zorder=0)
        axes.axhline(1, color="0.3", linewidth=0.8)
        axes.text(0.02, 0.02, "dense is faster", transform=axes.transAxes, color="0.25", fontsize=9)
        axes.set_ylim(bottom, top)
        axes.xaxis.set_major_locator(FixedLocator(rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_rate_name))
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if bottom <= tick <= top]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_ratio_name))
        axes.grid(color="0.85", linewidth=0.6)
    _finish(figure, panels, label, folder / f"beyond-32-{name}.png")


def _against_ranks(groups: list[Group], folder: Path) -> None:
    gigabit = [its for its in groups if round(8 / its["ours"].link.beta) == 10**9]
    figure, panels = _panels(gigabit)
    for model, axes in panels:
        its_groups = [its for its in gigabit if its["ours"].model == model]
        for method, (colour, marker, line, name) in METHODS.items():
            points = sorted((its[method].P, 1e3 * its[method].step) for its in its_groups)
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=line, label=name)
        compute = 1e3 * (its_groups[0]["ours"].step - its_groups[0]["ours"].seconds)
        axes.axhline(compute, color="0.5", linewidth=1, linestyle=(0, (1, 3)), label="compute alone")
        axes.set(title=model, xscale="log", yscale="log", xlabel="ranks")
        axes.xaxis.set_major_locator(FixedLocator(sorted({its["ours"].P for its in its_groups})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(color="0.85", linewidth=0.6)
    _finish(figure, panels, "step on links of 1 Gb/s, ms", folder / "beyond-32-ranks.png")


def _finish(figure: Figure, panels: list[tuple[str, Axes]], label: str, file: Path) -> None:
    handles, names = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncol=len(names), frameon=False)
    figure.supylabel(label)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file, dpi=130)
    plt.close(figure)
