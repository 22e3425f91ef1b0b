"""The gTop-k paper's models: as emulated, beside what was published, and on more ranks and other networks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.page import draw
from bench.page.html import Section
from bench.page.results import Result
from bench.paper import beyond as simulations
from bench.paper import tables
from bench.paper.models import MODELS, RANKS
from sparsecomm.primitives.costs import Link
from sparsecomm.quantities import number_text

__all__ = ["beyond", "paper"]

_LOOKS = {"dense": "dense", "topk": "allgather", "gtopk": "tree", "ours": "butterfly"}  # by method: whose look it has


def paper(results: Sequence[Result]) -> Section | None:
    """Return throughput against workers beside what was published, and the tables of `bench.paper`."""
    its = [r for r in results if r.kind == "paper"]
    if not its:
        return None
    section = Section("The gTop-k paper's models")
    section.text(
        "Real selection and real messages on an emulated network; the compute time of a model is a wait. Full lines "
        "are measured, in dilated time; dashed lines with hollow marks are what the paper published (Shi et al., ICDCS "
        "2019)."
    )
    for result in its:
        models = [name for name in MODELS if any(row["model"] == name for row in result.rows)]
        figure, axes = draw.panels(len(models))
        for each, name in zip(axes, models, strict=True):
            model = MODELS[name]
            for method, look in _LOOKS.items():
                rows = [row for row in result.rows if (row["model"], row["method"]) == (name, method)]
                found = sorted((row["P"], model.batch / tables.step_seconds(row)) for row in rows)
                style, label = draw.style(look), tables.NAMES[method]
                if found:
                    each.plot(*zip(*found, strict=True), label=label, **style)
                if method in model.published:
                    hollow = {**style, "linestyle": "--", "linewidth": 1, "markerfacecolor": "white"}
                    each.plot(RANKS, model.published[method], label=f"{label}, published", **hollow)
            draw.size_axis(each, list(map(float, RANKS)), number_text)
            draw.log_axis(each.yaxis, number_text)
            each.set_title(name, fontsize="small")
            each.set_xlabel("workers")
        axes[0].set_ylabel("samples per second and worker")
        draw.legend(figure, axes)
        section.figure(figure, "Throughput of a worker against workers; level is perfect scaling.", result.path.name)
        for made in (tables.throughput(result.rows), tables.speedups(result.rows), tables.parts(result.rows)):
            _add(section, made, result)
    return section


def beyond(results: Sequence[Result]) -> Section | None:
    """Return the simulations beyond 32 ranks with their plots, and how far they are from the emulated runs."""
    its = [r for r in results if r.kind == "beyond"]
    if not its:
        return None
    section = Section("Beyond 32 ranks")
    section.text(
        "Simulated ranks, with costs of work as the emulated runs measured them. Below the line of 1 a dense sum is "
        "faster. ~ marks the algorithm's formula."
    )
    for result in its:
        for picture in sorted(result.path.parent.glob(f"{result.name}*.png")):
            section.image(picture.read_bytes(), "png", picture.stem, result.about.get("command", ""))
        cells = [simulations.Cell(**{**cell, "link": Link(**cell["link"])}) for cell in result.data["cells"]]
        _add(section, simulations.cells_table("Times, and how many times as fast ours is", cells), result)
        _add(section, simulations.errors_table(result.data["errors"]), result)
    return section


def _add(section: Section, made: Table, result: Result) -> None:
    """Add a table of `rich`."""
    rows = list(zip(*(column.cells for column in made.columns), strict=True))
    columns = [(str(column.header), lambda row, i=i: row[i]) for i, column in enumerate(made.columns)]
    section.table(rows, columns, str(made.title), result.path.name)
