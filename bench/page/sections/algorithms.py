"""How near "auto" comes to the fastest algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from bench.page import draw
from bench.page.html import Section, number
from bench.page.results import Result

__all__ = ["choice"]


def choice(results: Sequence[Result]) -> Section | None:
    """Return the time of what "auto" takes as a multiple of the fastest, case by case."""
    its = [r for r in results if r.kind in ("auto", "auto model")]
    if not its:
        return None
    section = Section('Choice by "auto"')
    section.text(
        'The time of the algorithm and wire format that "auto" takes, as a multiple of the fastest: 1 is best.'
    )
    figure, (axes,) = draw.panels(1, width=8, height=0.45 * len(its) + 1.2)
    for position, result in enumerate(reversed(its)):
        ratios = sorted(row["ratio"] for row in result.rows)
        offsets = [position + 0.22 * ((i % 5) - 2) / 2 for i in range(len(ratios))]
        axes.plot(ratios, offsets, "o", color="#0072b2", markersize=4, markerfacecolor="none")
        middle = ratios[len(ratios) // 2]
        axes.plot([middle, middle], [position - 0.36, position + 0.36], color="black", linewidth=2.2)
    axes.set_yticks(range(len(its)), [f"{r.name} ({len(r.rows)} cases)" for r in reversed(its)])
    axes.set_xlabel("time of auto / time of the fastest")
    axes.grid(True, axis="x", alpha=0.35)
    section.figure(
        figure, "A ring for each case; the bar is the median.", "python -m bench.auto, python -m bench.auto_model"
    )
    columns = [
        ("ranks", number("ranks", "d")),
        ("n", number("n", ",")),
        ("density", number("density", "g")),
        ("auto takes", lambda row: row["auto"]),
        ("the fastest", lambda row: row["fastest"]),
        ("auto / fastest", number("ratio", ".2f")),
    ]
    for result in its:
        worst = sorted(result.rows, key=lambda row: -row["ratio"])[:5]
        section.table(worst, columns, f"{result.name}: the five worst cases of {len(result.rows)}", result.path.name)
    return section
