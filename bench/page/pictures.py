"""Pictures of result files, by kind: functions from a `Result` to a figure. All can be read without colour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from bench import model
from bench.page.results import Result
from bench.paper import tables
from bench.paper.models import MODELS, RANKS
from sparsecomm.cli import bench as plot
from sparsecomm.cli.outputs import log_axis, panels, size_axis, style
from sparsecomm.quantities import bytes_text, number_text, rate_text, time_text
from sparsecomm.tracing.observers import PARTS

Text = Callable[[float], str]
_PART_COLOURS = "#0072b2", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#bbbbbb"
_PART_HATCHES = "", "//", "", "\\\\", "..", "xx", ""
_PAPER_STYLES = {"dense": "dense", "topk": "allgather", "gtopk": "tree", "ours": "butterfly"}  # algorithm by method


def _legend(figure: Any, all_axes: Sequence[Any]) -> None:
    handles = {label: h for axes in all_axes for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside right upper")


def _bars(values: Mapping[str, float], text: Text, ours: Callable[[str], bool]) -> Any:
    """Return horizontal bars on a logarithmic axis with their values; other methods than ours are hatched."""
    figure, (axes,) = panels(1, 5.5, 0.4 * len(values) + 0.8)
    names = sorted(values, key=lambda name: -values[name])
    for i, name in enumerate(names):
        other = {"color": "#d9d9d9", "hatch": "///", "edgecolor": "#555"}
        axes.barh(i, values[name], height=0.68, **({"color": style(name)["color"]} if ours(name) else other))
        axes.annotate(f" {text(values[name])}", (values[name], i), va="center", fontsize="small")
    axes.set_yticks(range(len(names)), names)
    low, high = min(values.values()), max(values.values())
    axes.set_xscale("log")
    axes.set_xlim(low / 2, high * (high / low) ** 0.28 * 1.6)
    log_axis(axes.xaxis, text)
    axes.minorticks_off()
    axes.grid(True, axis="x", alpha=0.35)
    return figure


def _lines(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]], x_text: Text, y_text: Text) -> None:
    """Draw a line for each algorithm on two logarithmic axes."""
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*sorted(points), strict=True), label=name, **style(name))
    size_axis(axes, sorted({float(x) for points in lines.values() for x, _ in points}), x_text)
    log_axis(axes.yaxis, y_text)


# -- algorithms beside each other -------------------------------------------------------------------------------------


def compared_times(result: Result) -> Any:
    own = {row["name"]: row["ours"] for row in result.data["times"]}
    return _bars({row["name"]: row["step_ms"] / 1e3 for row in result.data["times"]}, time_text, own.__getitem__)


def compared_bytes(result: Result) -> Any:
    own = {row["name"]: row["ours"] for row in result.data["times"]}
    return _bars({r["name"]: r["sent"] for r in result.data["times"] if r["sent"]}, bytes_text, own.__getitem__)


def densities(result: Result) -> Any:
    figure, (axes,) = panels(1, 5, 3.6)
    for name, key, look in (("sparse, fastest", "ours_ms", "D-"), ("dense, fastest", "dense_ms", "o--")):
        points = [(row["density"], row["step"][key] / 1e3) for row in result.data["densities"]]
        axes.plot(*zip(*points, strict=True), look, label=name)
    if (crossing := result.data["crossings"]["step"]) is not None:
        axes.axvline(crossing, color="black", linewidth=1, linestyle=":", label=f"crossing at {number_text(crossing)}")
    log_axis(axes.xaxis, number_text)
    axes.minorticks_off()
    log_axis(axes.yaxis, time_text)
    axes.set_xlabel("density")
    axes.set_ylabel("whole step, slowest rank")
    _legend(figure, [axes])
    return figure


def auto_ratios(result: Result) -> Any:
    figure, (axes,) = panels(1, 6, 1.6)
    ratios = sorted(row["ratio"] for row in result.rows)
    axes.plot(ratios, [i % 5 for i in range(len(ratios))], "o", color="#0072b2", markersize=4, markerfacecolor="none")
    axes.axvline(ratios[len(ratios) // 2], color="black", linewidth=2.2)
    axes.set_yticks([])
    axes.set_xlabel(f"time of auto / time of the fastest, {len(ratios)} cases; the bar is the median")
    return figure


def by_rate(result: Result) -> Any:
    """Draw time against the rate of the links for the largest case, the best wire format of each algorithm."""
    n, P = (max(row[key] for row in result.rows) for key in ("n", "ranks"))
    rows = [row for row in result.rows if (row["n"], row["ranks"], row["per machine"]) == (n, P, 1)]
    all_densities = sorted({row["density"] for row in rows})
    figure, all_axes = panels(len(all_densities), 3.5, 3.2, sharey=True)
    for axes, density in zip(all_axes, all_densities, strict=True):
        best: dict[str, dict[float, float]] = {}
        for row in rows:
            for candidate in row["candidates"] if row["density"] == density else ():
                times = best.setdefault(candidate["name"].partition(",")[0], {})
                times[row["rate"]] = min(candidate["seconds"], times.get(row["rate"], candidate["seconds"]))
        _lines(axes, {name: list(times.items()) for name, times in best.items()}, rate_text, time_text)
        axes.set_title(f"{P} ranks, density {number_text(density)}", fontsize="small")
        axes.set_xlabel("rate of each node's link")
    _legend(figure, all_axes)
    return figure


def recovery(result: Result) -> Any:
    rows = [row for row in result.rows if row["experiment"] == "on the same gradients"]
    all_densities = sorted({row["density"] for row in rows})
    figure, all_axes = panels(2 * len(all_densities), 3.5, 3.2, columns=2)
    for axes, (density, key) in zip(all_axes, product(all_densities, ("found", "applied")), strict=True):
        for way in dict.fromkeys(row["way"] for row in rows):
            points = [(row["ranks"], row[key]) for row in rows if (row["way"], row["density"]) == (way, density)]
            look = style(way.partition(" ")[0].rstrip(",")) | ({"linestyle": "--"} if " " in way else {})
            axes.plot(*zip(*points, strict=True), label=way, **look)
        size_axis(axes, sorted({float(row["ranks"]) for row in rows}), number_text)
        axes.set_title(f"{key}, density {number_text(density)}", fontsize="small")
        axes.set_xlabel("ranks")
    _legend(figure, all_axes)
    return figure


# -- curves of `sparsecomm bench` and of simulated ranks --------------------------------------------------------------


def by_size(result: Result) -> Any:
    return plot.draw(result.data["header"], result.rows)


def by_density(result: Result) -> Any:
    if len({row["density"] for row in result.rows}) < 3:
        return None
    largest, wire = max(row["size_bytes"] for row in result.rows), result.rows[0]["wire"]
    figure, (axes,) = panels(1, 6, 3.2)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in result.rows:
        if (row["size_bytes"], row["wire"]) == (largest, wire):
            lines.setdefault(row["algorithm"], []).append((row["density"], row["time_median_us"] / 1e6))
    _lines(axes, lines, number_text, time_text)
    axes.set_xlabel(f"density, at {bytes_text(largest)}")
    _legend(figure, [axes])
    return figure


def breakdown(result: Result) -> Any:
    largest = max(row["size_bytes"] for row in result.rows)
    rows = [row for row in result.rows if row["size_bytes"] == largest and row["breakdown_us"]]
    if not rows:
        return None
    names = [f"{row['algorithm']}, {number_text(row['density'])}, {row['wire_taken']}" for row in rows]
    figure, (axes,) = panels(1, 7, 0.34 * len(rows) + 0.8)
    left = [0.0] * len(rows)
    for part, colour, hatch in zip((*PARTS, "other"), _PART_COLOURS, _PART_HATCHES, strict=True):
        widths = [row["breakdown_us"][part] / 1e3 for row in rows]
        axes.barh(names, widths, left=left, label=part, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    _legend(figure, [axes])
    return figure


def by_ranks(result: Result) -> Any:
    return model.draw(result.data["header"], result.rows)


# -- steps, kernels and the paper -------------------------------------------------------------------------------------


def quartiles(result: Result) -> Any:
    """Draw a median and its quartiles for each name."""
    data = result.data[result.kind]
    milliseconds: dict[str, Sequence[float]] = data.get("ms") or data["added_ms"]
    figure, (axes,) = panels(1, 6, 0.36 * len(milliseconds) + 0.7)
    for i, (low, middle, high) in enumerate(milliseconds.values()):
        axes.plot([low, high], [i, i], color="#0072b2", linewidth=5, alpha=0.45, solid_capstyle="butt")
        axes.plot(middle, i, marker="|", markersize=14, markeredgewidth=2.4, color="black")
        axes.annotate(f"  {time_text(middle / 1e3)}", (max(high, middle), i), va="center", fontsize="small")
    axes.set_yticks(range(len(milliseconds)), list(milliseconds))
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlabel("ms, median and quartiles of the slowest rank")
    return figure


def over_floor(result: Result) -> Any:
    rows = [row for row in result.rows if row.get("floor_us") and row.get("replayed_us")]
    if not rows:
        return None
    figure, (axes,) = panels(1, 7, 0.3 * len(rows) + 0.8)
    axes.barh([row["what"] for row in rows], [row["replayed_us"] / row["floor_us"] for row in rows], color="#0072b2")
    axes.axvline(1, color="black", linewidth=1.2)
    axes.invert_yaxis()
    axes.set_xlabel("time / floor of memory bandwidth")
    return figure


def throughput(result: Result) -> Any:
    names = [name for name in MODELS if any(row["model"] == name for row in result.rows)]
    figure, all_axes = panels(len(names), 3.5, 3.2)
    for axes, name in zip(all_axes, names, strict=True):
        for method, algorithm in _PAPER_STYLES.items():
            rows = [row for row in result.rows if (row["model"], row["method"]) == (name, method)]
            points = sorted((row["P"], MODELS[name].batch / tables.step_seconds(row)) for row in rows)
            look, label = style(algorithm), tables.NAMES[method]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **look)
            if method in MODELS[name].published:
                hollow = {**look, "linestyle": "--", "linewidth": 1, "markerfacecolor": "white"}
                axes.plot(RANKS, MODELS[name].published[method], label=f"{label}, published", **hollow)
        size_axis(axes, list(map(float, RANKS)), number_text)
        log_axis(axes.yaxis, number_text)
        axes.set_title(name, fontsize="small")
        axes.set_xlabel("workers")
    all_axes[0].set_ylabel("samples per second and worker")
    _legend(figure, all_axes)
    return figure


PICTURES: dict[str, dict[str, Callable[[Result], Any]]] = {
    "compare": {"Time of a whole step": compared_times, "Bytes that the busiest rank sends": compared_bytes},
    "densities": {"Time against density": densities},
    "auto": {"Choice of auto": auto_ratios},
    "auto model": {"Choice of auto": auto_ratios, "Time against rate": by_rate},
    "recovery": {"Share of the true top-k": recovery},
    "bench": {"Time against size": by_size, "Time against density": by_density, "Parts of a call": breakdown},
    "model": {"Time, bytes and messages against ranks": by_ranks},
    **{kind: {"Time": quartiles} for kind in ("ddp", "hook", "overlap", "round")},
    "gpu": {"Time over floor": over_floor},
    "paper": {"Throughput": throughput},
}
