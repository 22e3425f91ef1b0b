"""The paper's models on more ranks and on other networks: the shipped algorithms on simulated ranks.

    python -m bench.paper.beyond [--results bench/results/paper.json] [--write bench/results]
    python -m bench.paper.beyond --draw bench/results/beyond-32.json    # the plots again, without a simulation

Work costs what a rank took for it alone in the emulated runs of `bench.paper`, whose results are read. First those
runs are simulated, with the messages' costs that they measured, and the error is printed. Then come 64 to 4,096 ranks
on links of 100 Mb/s to 400 Gb/s, and 32 ranks on the paper's own link. A cell is simulated up to the number of ranks
at which that takes seconds, else it is the algorithm's formula, marked ~; the two are compared where both are there.
Dense is the ring or, where its formula says that it takes less, recursive halving and doubling.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track
from rich.table import Table

from bench import report, simulate
from bench.paper import tables
from bench.paper.models import MODELS, PAPER_LINK, Model
from bench.simulate import Problem
from sparsecomm.cli.outputs import log_axis, ordered_style, panels, save, style
from sparsecomm.primitives.costs import Costs, Link, log2_ceil
from sparsecomm.quantities import number_text, rate_text, time_text
from sparsecomm.tuning import choice
from sparsecomm.tuning.choice import Candidate, CostQuery

METHODS = {  # what is called for a method: algorithm and wire format
    "dense": ("dense", "plain"),
    "topk": ("allgather", "plain"),
    "gtopk": ("tree", "plain"),
    "ours": ("auto", "auto"),
}
RANKS = (64, 256, 1024, 4096)
LINKS = {1e8: 200e-6, 1e9: 100e-6, 1e10: 30e-6, 1e11: 10e-6, 4e11: 5e-6}  # bits per second: assumed seconds per message
FEW = ("tree", "butterfly")  # algorithms of few messages, which are simulated on more ranks
MAX_FEW, MAX = 1024, 64
WORKS = ("select", "merge", "codec", "add", "call")
TOLERANCE = 0.20
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A method for a model on P ranks and a link: seconds of the exchange with its work, without the compute time."""

    model: str
    method: str
    P: int
    link: Link
    algorithm: str
    wire: str
    seconds: float
    formula: float
    simulated: bool

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return MODELS[self.model].compute + self.seconds


def simulated_seconds(model: Model, P: int, taken: Candidate, costs: Costs) -> float:
    """Return the seconds of a call on simulated ranks, whose selections overlap only by chance."""
    problem = Problem(model.n, model.k, costs, common=0.0)
    return simulate.simulate(problem, P, taken.algorithm, taken.wire).step_seconds


def cell(model: Model, method: str, P: int, costs: Costs, max_few: int = MAX_FEW) -> Cell:
    """Return the seconds of a method, simulated on up to `MAX` ranks, or ``max_few`` for those of few messages."""
    algorithm, wire = METHODS[method]
    query = CostQuery(P, P, model.n, model.k, 4, algorithm, wire)
    taken = choice.decide(query, costs)
    formula = taken.algorithm.predicted_time(query.problem(taken.wire), costs)
    limit = max(MAX, max_few) if taken.algorithm.name in FEW else MAX
    small = limit >= P
    seconds = simulated_seconds(model, P, taken, costs) if small else formula
    name = taken.algorithm.name
    if method == "dense" and (halving := halving_and_doubling(P, model.n, costs)) < seconds:
        name, seconds, formula, small = "halving and doubling", halving, halving, False
    return Cell(model.name, method, P, costs.link, name, taken.wire.name, seconds, formula, small)


def halving_and_doubling(P: int, n: int, costs: Costs) -> float:
    """Return the seconds of the dense allreduce that is best for many ranks on fast links.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
    2005, Section 4.4: a reduce-scatter by recursive halving, an allgather by recursive doubling.
    """
    part = (P - 1) / P
    return 2 * log2_ceil(P) * costs.link.alpha + part * n * (2 * 4 * costs.link.beta + costs.add)


# -- the emulated runs, simulated --------------------------------------------------------------------------------------


def held_against(rows: list[Row]) -> list[Row]:
    """Return the emulated results with what the simulation says of them, in dilated seconds without the compute time.

    Among the ranks of the emulation a core's work takes ranks / cores times as long, as it does in the simulation.
    """
    found = []
    for row in track(rows, description="the emulated runs"):
        model, P, cores = MODELS[row["model"]], row["P"], os.cpu_count() or 1
        turns = max(1.0, P / cores)
        works = {name: turns * row["costs"][name] for name in WORKS}
        costs = Costs(Link(row["costs"]["alpha"], row["costs"]["beta"]), **works)
        algorithm, wire = METHODS[row["method"]]
        if row["method"] == "ours":
            algorithm, wire = row["algorithm"], row["wire"]
        query = CostQuery(P, P, model.n, model.k, 4, algorithm, wire)
        predicted = simulated_seconds(model, P, choice.decide(query, costs), costs)
        emulated = median(row["steps"]) - row["parts"].get("densify", 0.0)
        scale = row["slowdown"]
        steps = [row["compute"] + seconds / scale for seconds in (predicted, emulated)]
        found.append(
            {
                **{name: row[name] for name in ("model", "P", "method", "algorithm", "wire")},
                "emulated": emulated / scale,
                "simulated": predicted / scale,
                "error": predicted / emulated - 1,
                "error_of_step": steps[0] / steps[1] - 1,
            }
        )
    return found


def errors_table(found: list[Row]) -> Table:
    columns: list[report.Column] = [
        *((name, lambda row, name=name: row[name]) for name in ("model", "P", "method", "algorithm")),
        ("emulated, ms", report.number("emulated", ".2f", 1e3)),
        ("simulated, ms", report.number("simulated", ".2f", 1e3)),
        ("error", report.number("error", "+.0%")),
        ("error of the whole step", report.number("error_of_step", "+.1%")),
        ("within 20 %", lambda row: "yes" if abs(row["error_of_step"]) <= TOLERANCE else "no"),
    ]
    title = "selection, exchange and merging: simulated against emulated, dilated ms"
    return report.table(found, columns, title=title, title_justify="left")


def calibration(rows: list[Row]) -> Costs:
    """Return the costs of work, of a rank alone: medians over the emulated runs. Messages cost nothing yet."""
    return Costs(Link(0.0, 0.0), **{name: median(row["costs"][name] for row in rows) for name in WORKS})


# -- beyond ------------------------------------------------------------------------------------------------------------


def beyond(work: Costs, models: Iterable[str], max_few: int = MAX_FEW) -> list[Cell]:
    """Return the cells of all models, ranks and links."""
    cases = [
        (name, P, replace(work, link=Link(LINKS[rate], 8 / rate))) for name in models for P in RANKS for rate in LINKS
    ]
    return _all(cases, "beyond 32 ranks", max_few)


def papers_link(work: Costs, models: Iterable[str]) -> list[Cell]:
    """Return the cells at 32 ranks on the paper's link, and on one of a tenth of its rate."""
    links = [Link(*PAPER_LINK), Link(PAPER_LINK[0], 10 * PAPER_LINK[1])]
    return _all([(name, 32, replace(work, link=link)) for name in models for link in links], "the paper's link")


Case = tuple[str, int, Costs]


def _all(cases: list[Case], what: str, max_few: int = MAX_FEW) -> list[Cell]:
    """Return the cells of all methods in each case, as many at once as there are cores."""
    with ProcessPoolExecutor(os.cpu_count(), initializer=_small_problems) as pool:
        tasks = [
            pool.submit(cell, MODELS[name], method, P, costs, max_few) for name, P, costs in cases for method in METHODS
        ]
        return [task.result() for task in track(tasks, description=what)]


def _small_problems() -> None:
    """Simulate smaller problems than `bench.model` does: there are hundreds here."""
    simulate._HANDLED = 1 << 20
    os.environ["SPARSECOMM_THREADS"] = "1"


def by_density(work: Costs, model: Model, P: int) -> list[Row]:
    """Return the seconds of dense, and of the best sparse algorithm, at more and more densities, by their formulas."""
    found = []
    for rate, alpha in LINKS.items():
        costs = replace(work, link=Link(alpha, 8 / rate))
        dense = cell(model, "dense", P, costs, MAX).seconds
        for density in DENSITIES:
            query = CostQuery(P, P, model.n, round(density * model.n), 4)
            best = next(each for each in choice.candidates(query, costs) if each.algorithm.name != "dense")
            sparse = {"algorithm": f"{best.algorithm.name}, {best.wire.name}", "seconds": best.seconds}
            found.append({"model": model.name, "P": P, "rate": rate, "density": density, "dense": dense, **sparse})
    return found


def density_table(rows: list[Row]) -> Table:
    columns: list[report.Column] = [
        ("link", lambda row: f"{rate_text(row['rate'])}"),
        ("density", report.number("density", "g")),
        ("dense, ms", report.number("dense", ",.2f", 1e3)),
        ("best sparse, ms", report.number("seconds", ",.2f", 1e3)),
        ("algorithm", lambda row: row["algorithm"]),
        ("dense / sparse", lambda row: f"{row['dense'] / row['seconds']:.2f}"),
    ]
    title = (
        f"{rows[0]['model']} on {rows[0]['P']} ranks: densities at which dense wins, by formula; exchange with its work"
    )
    return report.table(rows, columns, title=title, title_justify="left")


def grouped(cells: list[Cell]) -> list[dict[str, Cell]]:
    """Return the cells of each model, number of ranks and link, by method."""
    groups: dict[tuple[str, int, Link], dict[str, Cell]] = {}
    for each in cells:
        groups.setdefault((each.model, each.P, each.link), {})[each.method] = each
    return list(groups.values())


def cells_table(title: str, cells: list[Cell]) -> Table:
    def milliseconds(method: str) -> report.Column:
        def text(its: dict[str, Cell]) -> str:
            return ("" if its[method].simulated else "~") + f"{1e3 * its[method].seconds:,.2f}"

        return f"{tables.NAMES[method]}, ms", text

    def rate(its: dict[str, Cell]) -> str:
        bits = 8 / its["ours"].link.beta
        return rate_text(bits)

    columns: list[report.Column] = [
        ("model", lambda its: its["ours"].model),
        ("P", lambda its: its["ours"].P),
        ("link", rate),
        ("alpha, us", lambda its: f"{1e6 * its['ours'].link.alpha:.0f}"),
        *map(milliseconds, METHODS),
        ("ours takes", lambda its: f"{its['ours'].algorithm}, {its['ours'].wire}"),
        ("step: dense / ours", lambda its: f"{its['dense'].step / its['ours'].step:.2f}"),
        ("Top-k / ours", lambda its: f"{its['topk'].step / its['ours'].step:.2f}"),
        ("gTop-k / ours", lambda its: f"{its['gtopk'].step / its['ours'].step:.2f}"),
        ("exchange: dense / ours", lambda its: f"{its['dense'].seconds / its['ours'].seconds:.2f}"),
    ]
    return report.table(grouped(cells), columns, title=title, title_justify="left")


def formula_lines(cells: list[Cell]) -> list[str]:
    """Return the ratios of formulas to simulations."""
    lines = []
    for name in sorted({each.algorithm for each in cells if each.simulated}):
        ratios = [each.formula / each.seconds for each in cells if each.simulated and each.algorithm == name]
        lines.append(f"# formula / simulation, {name}: {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} cells")
    return lines


def pages(found: list[Row], own: list[Cell]) -> dict[str, list[list[str]]]:
    """Return the tables of docs/reports/paper.md, as lists of cells, the heading first."""
    errors = [["P", "steps", "within 20 %", "median error", "largest error", "median error without the compute time"]]
    for P in sorted({row["P"] for row in found}):
        its = [row for row in found if row["P"] == P]
        step_errors = [abs(row["error_of_step"]) for row in its]
        parts = median(abs(row["error"]) for row in its)
        within = str(sum(error <= TOLERANCE for error in step_errors))
        errors.append(
            [str(P), str(len(its)), within, f"{median(step_errors):.1%}", f"{max(step_errors):.1%}", f"{parts:.0%}"]
        )
    links = [["model", "ns per byte", "dense, ms", "Top-k, ms", "gTop-k, ms", "ours, ms", "over dense", "over Top-k"]]
    for group in grouped(own):
        steps = {method: each.step for method, each in group.items()}
        line = [group["ours"].model, f"{1e9 * group['ours'].link.beta:g}"]
        line += [f"{1e3 * steps[method]:,.1f}" for method in METHODS]
        links.append([*line, *(f"{steps[method] / steps['ours']:.2f}" for method in ("dense", "topk"))])
    return {"beyond_errors": errors, "beyond_papers_link": links}


# -- plots ------------------------------------------------------------------------------------------------------------

Group = dict[str, Any]  # a `Cell` for each method
RATIOS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def draw(groups: list[Group], folder: Path) -> None:
    """Write beyond-32-exchange.png, -step.png and -ranks.png."""
    exchange, step = "exchange: times as fast as dense", "whole step: times as fast as dense"
    _against_rate(groups, exchange, lambda its: its["dense"].seconds / its["ours"].seconds, folder, "exchange")
    _against_rate(groups, step, lambda its: its["dense"].step / its["ours"].step, folder, "step")
    _against_ranks(groups, folder)


def draw_densities(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write beyond-32-density.png: time of dense / time of the best sparse algorithm, by density."""
    figure, (axes,) = panels(1, 4.8, 4)
    for i, rate in enumerate(rates := sorted({row["rate"] for row in rows})):
        points = [(row["density"], row["dense"] / row["seconds"]) for row in rows if row["rate"] == rate]
        look = ordered_style(len(rates) - 1 - i)
        axes.plot(*zip(*points, strict=True), **look)
        place = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right"}
        axes.annotate(rate_text(rate), points[0], **place, va="center" if points[0][1] > 1 else "top")
    axes.set_title(f"{rows[0]['model']}, {rows[0]['P']} ranks, by rate of the links", fontsize="medium")
    _ratio_axis(axes, [row["dense"] / row["seconds"] for row in rows])
    _x_axis(axes, [row["density"] for row in rows], "density: entries per rank / elements", lambda d: f"{d:g}")
    axes.set_xlim(left=min(row["density"] for row in rows) / 3)
    axes.set_ylabel("exchange: times as fast as dense")
    save(figure, folder / "beyond-32-density.png", 130)


def _against_rate(groups: list[Group], label: str, ratio: Callable[[Group], float], folder: Path, name: str) -> None:
    def draw_model(axes: Any, own: list[Group]) -> None:
        for i, P in enumerate(RANKS):
            points = sorted((8 / its["ours"].link.beta, ratio(its)) for its in own if its["ours"].P == P)
            _line(axes, points, ordered_style(i), f"{P:,} ranks")
        _ratio_axis(axes, [ratio(its) for its in groups])
        _x_axis(axes, [8 / its["ours"].link.beta for its in own], "rate of a link, bits per second", _rate_name)

    _by_model(groups, draw_model, label, folder / f"beyond-32-{name}.png")


def _against_ranks(groups: list[Group], folder: Path) -> None:
    def draw_model(axes: Any, own: list[Group]) -> None:
        for method, algorithm in tables.STYLES.items():
            points = sorted((its[method].P, its[method].step) for its in own)
            _line(axes, points, style(algorithm), "ours, auto" if method == "ours" else tables.NAMES[method])
        compute = own[0]["ours"].step - own[0]["ours"].seconds
        axes.axhline(compute, color="0.5", linewidth=1, linestyle=(0, (1, 3)), label="computation alone")
        log_axis(axes.yaxis, time_text)
        _x_axis(axes, [its["ours"].P for its in own], "ranks", lambda P: f"{P:,.0f}")

    gigabit = [its for its in groups if round(8 / its["ours"].link.beta) == 10**9]
    _by_model(gigabit, draw_model, "time of a step on links of 1 Gb/s", folder / "beyond-32-ranks.png")


def _by_model(groups: list[Group], draw_model: Callable[[Any, list[Group]], None], label: str, file: Path) -> None:
    """Write a figure with a panel for each model."""
    models = list(dict.fromkeys(its["ours"].model for its in groups))
    figure, all_axes = panels(len(models), 4.1, 3.3, sharey=True)
    for model, axes in zip(models, all_axes, strict=True):
        draw_model(axes, [its for its in groups if its["ours"].model == model])
        axes.set_title(model)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncol=len(names), frameon=False)
    figure.supylabel(label)
    save(figure, file, 130)


def _line(axes: Any, points: list[tuple[float, float]], look: dict[str, Any], label: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), **look, label=label)


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


def main() -> int:
    parser = report.parser(__doc__, prog="python -m bench.paper.beyond")
    parser.add_argument("--results", type=Path, default=Path("bench/results/paper.json"), help="%(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    few = f"ranks up to which {' and '.join(FEW)} are simulated (%(default)s); others: {MAX}"
    parser.add_argument("--max-few", type=int, default=MAX_FEW, metavar="P", help=few)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write tables, JSON file and plots there")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw the plots again from this JSON file")
    options: argparse.Namespace = parser.parse_args()
    if options.draw:
        kept = json.loads(options.draw.read_text())
        cells = [Cell(**each | {"link": Link(**each["link"])}) for each in kept["cells"] if each["P"] in RANKS]
        draw(grouped(cells), options.draw.parent)
        draw_densities(kept["densities"], options.draw.parent)
        return 0
    _small_problems()
    rows = json.loads(options.results.read_text())["rows"]
    found, work = held_against([row for row in rows if row["model"] in options.models]), calibration(rows)
    cells, own = beyond(work, options.models, options.max_few), papers_link(work, options.models)
    densities = by_density(work, MODELS["VGG-16"], MAX)
    errors = [abs(row["error_of_step"]) for row in found]
    within = sum(error <= TOLERANCE for error in errors)
    run = report.about("-m bench.paper.beyond", [], threads=1)
    costs = ", ".join(f"{name} {number_text(1e9 * getattr(work, name))} ns" for name in WORKS)
    lines = [
        *report.head(run),
        f"# work of a rank alone, per element, entry or call, as the emulated runs measured it: {costs}",
        f"# emulated steps that the simulation meets within {TOLERANCE:.0%}: {within} of {len(found)}",
        *formula_lines(cells + own),
        "# ~ the formula; compute times are those of the paper's GPUs (P102-100)",
    ]
    all_tables = [
        errors_table(found),
        cells_table("32 ranks on the paper's link, as it was measured, and on one of a tenth of its rate", own),
        cells_table("beyond 32 ranks; exchange with its work, and how many times as fast ours is", cells),
        density_table(densities),
    ]
    data = run | {
        "pages": pages(found, own),
        "errors": found,
        "densities": densities,
        "cells": [{**vars(each), "link": vars(each.link)} for each in [*own, *cells]],
        "work": {name: getattr(work, name) for name in WORKS},
    }
    report.publish(options.write and options.write / "beyond-32", lines, all_tables, data, width=190)
    if options.write:
        draw(grouped(cells), options.write)
        draw_densities(densities, options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
