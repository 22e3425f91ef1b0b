"""Curves of `sparsecomm bench --json`: time against size and density, and the parts of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsecomm.tracing.observers import PARTS

from bench.page import draw
from bench.page.html import Section
from bench.page.results import Result
from sparsecomm.cli.bench import plot
from sparsecomm.quantities import number_text, size_text, time_text

__all__ = ["breakdown", "sizes"]

_PARTS = (*PARTS, "other")
_LOOKS = [  # of the parts, in their order: lightness and hatching tell them apart without colour
    ("#0072b2", ""),
    ("#e69f00", "//"),
    ("#009e73", ""),
    ("#f0e442", "\\\\"),
    ("#cc79a7", ".."),
    ("#d55e00", "xx"),
    ("#bbbbbb", ""),
]


def sizes(results: Sequence[Result]) -> Section | None:
    """Return time against size, a panel for each density, and time against density at the largest size."""
    its = [r for r in results if r.kind == "bench"]
    if not its:
        return None
    section = Section("Time against size and density")
    section.text(
        "A call is sparse_allreduce with a residual and a dense result. Its time is that of the slowest rank, the "
        "median of the timed calls. Where the lines are flat, time is messages and Python, not bytes."
    )
    for result in its:
        header, rows = result.data["header"], result.rows
        figure = plot.draw(header, rows)
        section.figure(figure, f"Time against size, {_where(header)}.", header["command"])
        densities = sorted({row["density"] for row in rows})
        if len(densities) > 2:
            _by_density(section, result, densities)
        last = max(row["size_bytes"] for row in rows)
        shown = [row for row in rows if row["size_bytes"] == last]
        columns: list[Any] = [
            ("algorithm", lambda row: row["algorithm"]),
            ("wire format", lambda row: row["wire_taken"]),
            ("density", lambda row: number_text(row["density"])),
            ("median", lambda row: time_text(row["time_median_us"] / 1e6)),
            ("p99", lambda row: time_text(row["time_p99_us"] / 1e6)),
            ("bytes per rank", lambda row: f"{row['wire_bytes_per_rank']:,}"),
            ("algbw, GB/s", lambda row: f"{row['algbw_gb_per_s']:.3f}"),
            ("busbw, GB/s", lambda row: _optional(row, "busbw_gb_per_s")),
        ]
        section.table(shown, columns, f"The largest size, {size_text(last)}; {_where(header)}", result.path.name)
    return section


def breakdown(results: Sequence[Result]) -> Section | None:
    """Return the parts of a call's time at the largest size, as stacked bars."""
    its = [r for r in results if r.kind == "bench" and any(row["breakdown_us"] for row in r.rows)]
    if not its:
        return None
    section = Section("Breakdown of a call")
    section.text(
        "The parts add up to the median. Exchange includes waiting for slower ranks; other is Python, headers and "
        "copies into and out of messages."
    )
    for result in its:
        last = max(row["size_bytes"] for row in result.rows)
        rows = [row for row in result.rows if row["size_bytes"] == last and row["breakdown_us"]]
        names = [f"{row['algorithm']}, {number_text(row['density'])}, {row['wire_taken']}" for row in rows]
        figure, (axes,) = draw.panels(1, width=8, height=0.34 * len(rows) + 1)
        left = [0.0] * len(rows)
        for part, (colour, hatch) in zip(_PARTS, _LOOKS, strict=True):
            widths = [row["breakdown_us"][part] / 1e3 for row in rows]
            axes.barh(names, widths, left=left, label=part, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.grid(True, axis="x", alpha=0.35)
        axes.set_axisbelow(True)
        draw.legend(figure, [axes])
        section.figure(
            figure, f"Parts of a call of {size_text(last)}, {_where(result.data['header'])}.", result.path.name
        )
    return section


def _by_density(section: Section, result: Result, densities: list[float]) -> None:
    rows, header = result.rows, result.data["header"]
    last = max(row["size_bytes"] for row in rows)
    wire = rows[0]["wire"]
    figure, (axes,) = draw.panels(1, width=6)
    found = []
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        its = [r for r in rows if (r["size_bytes"], r["algorithm"], r["wire"]) == (last, name, wire)]
        its.sort(key=lambda row: row["density"])
        found.append((name, [row["density"] for row in its], [row["time_median_us"] / 1e6 for row in its]))
    draw.lines(axes, found, number_text, x_base=10)
    axes.set_xlabel("density")
    axes.set_ylabel("median time of a call, slowest rank")
    draw.legend(figure, [axes])
    section.figure(figure, f"Time against density at {size_text(last)}, {_where(header)}.", result.path.name)


def _optional(row: dict[str, Any], key: str) -> str | None:
    return f"{row[key]:.3f}" if key in row else None


def _where(header: dict[str, Any]) -> str:
    where = f"{header['ranks']} ranks on {header['machines']} machine(s)"
    return f"{where}, {header['dtype']} on {header['device']}, {header['mpi']}"
