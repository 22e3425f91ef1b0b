"""The plots of `bench.paper.beyond`: where ours wins, and where it loses. Legible in grey: markers differ, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsecomm.cli.outputs import panels, pyplot
from sparsecomm.quantities import number_text

Group = dict[str, Any]  # a `bench.paper.beyond.Cell` for each method
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
RATIOS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def draw(groups: list[Group], folder: Path) -> None:
    """Write beyond-32-exchange.png, -step.png and -ranks.png."""
    exchange, step = "dense / ours: exchange and work", "dense / ours: whole step"
    _against_rate(groups, exchange, lambda its: its["dense"].seconds / its["ours"].seconds, folder, "exchange")
    _against_rate(groups, step, lambda its: its["dense"].step / its["ours"].step, folder, "step")
    _against_ranks(groups, folder)


def draw_densities(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write beyond-32-density.png: the time of dense / that of the best sparse algorithm, against the density."""
    figure, (axes,) = panels(1, 4.8, 4)
    rates = sorted({row["rate"] for row in rows})
    for rate, look in zip(rates, [*STYLES.values(), ("#000000", "v", "-")], strict=False):
        points = [(row["density"], row["dense"] / row["seconds"]) for row in rows if row["rate"] == rate]
        _line(axes, points, look, _rate_name(rate))
    axes.set_title(f"{rows[0]['model']}, {rows[0]['P']} ranks, by link rate in bit/s")
    _ratio_axis(axes, [row["dense"] / row["seconds"] for row in rows])
    _x_axis(axes, [row["density"] for row in rows], "density k/n", lambda density: f"{density:g}")
    axes.set_ylabel("dense / best sparse: exchange and work")
    axes.legend(frameon=False)
    figure.savefig(folder / "beyond-32-density.png", dpi=130)
    pyplot().close(figure)


def _against_rate(groups: list[Group], label: str, ratio: Callable[[Group], float], folder: Path, name: str) -> None:
    def draw_model(axes: Any, own: list[Group]) -> None:
        for P, look in STYLES.items():
            points = sorted((8 / its["ours"].link.beta, ratio(its)) for its in own if its["ours"].P == P)
            _line(axes, points, look, f"{P:,} ranks")
        _ratio_axis(axes, [ratio(its) for its in groups])
        _x_axis(axes, [8 / its["ours"].link.beta for its in own], "rate of a link, bit/s", _rate_name)

    _by_model(groups, draw_model, label, folder / f"beyond-32-{name}.png")


def _against_ranks(groups: list[Group], folder: Path) -> None:
    def draw_model(axes: Any, own: list[Group]) -> None:
        for method, (colour, marker, line, name) in METHODS.items():
            points = sorted((its[method].P, 1e3 * its[method].step) for its in own)
            _line(axes, points, (colour, marker, line), name)
        compute = 1e3 * (own[0]["ours"].step - own[0]["ours"].seconds)
        axes.axhline(compute, color="0.5", linewidth=1, linestyle=(0, (1, 3)), label="compute alone")
        axes.set_yscale("log")
        _x_axis(axes, [its["ours"].P for its in own], "ranks", lambda P: f"{P:,.0f}")

    gigabit = [its for its in groups if round(8 / its["ours"].link.beta) == 10**9]
    _by_model(gigabit, draw_model, "step on links of 1 Gb/s, ms", folder / "beyond-32-ranks.png")


def _by_model(groups: list[Group], draw_model: Callable[[Any, list[Group]], None], label: str, file: Path) -> None:
    """Write a figure with a panel for each model."""
    models = list(dict.fromkeys(its["ours"].model for its in groups))
    figure, all_axes = panels(len(models), 4.1, 3.3, sharey=True)
    for model, axes in zip(models, all_axes, strict=True):
        draw_model(axes, [its for its in groups if its["ours"].model == model])
        axes.set_title(model)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncol=len(names), frameon=False)
    figure.supylabel(label)
    figure.savefig(file, dpi=130)
    pyplot().close(figure)


def _line(axes: Any, points: list[tuple[float, float]], look: tuple[str, str, str], label: str) -> None:
    if points:
        colour, marker, line = look
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=line, label=label)


def _ratio_axis(axes: Any, ratios: list[float]) -> None:
    """Label the y axis with ratios, and shade the area in which dense is faster."""
    bottom, top = min(0.5, 0.8 * min(ratios)), 1.3 * max(ratios)
    ticks = [ratio for ratio in RATIOS if bottom <= ratio <= top]
    axes.set(yscale="log", ylim=(bottom, top))
    axes.set_yticks(ticks, [f"{ratio:g}x" for ratio in ticks])
    axes.axhspan(bottom, 1, color="0.88", zorder=0)
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.text(0.02, 0.02, "dense is faster", transform=axes.transAxes, color="0.25", fontsize=9)


def _x_axis(axes: Any, values: list[float], label: str, text: Callable[[float], str]) -> None:
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(ticks := sorted(set(values)), [text(value) for value in ticks])
    axes.minorticks_off()
    axes.grid(color="0.85", linewidth=0.6)


def _rate_name(bits: float) -> str:
    return f"{number_text(bits / 1e9)}G" if bits >= 0.999e9 else f"{number_text(bits / 1e6)}M"
