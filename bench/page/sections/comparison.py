"""Whole steps beside what others do, and where a dense sum is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page import draw
from bench.page.html import Section, number
from bench.page.results import Result
from sparsecomm.quantities import number_text, rate_text, time_text

__all__ = ["dense_wins", "link_text", "others"]


def link_text(data: dict[str, Any]) -> str:
    """Return the rate of the links as measured in the run, or that ranks share memory."""
    links = data.get("links", {})
    beta = links.get("measured", {}).get("beta", 0)
    rate = 8 / beta if beta else 0
    if "given" not in links:
        return "shared memory"
    return rate_text(rate)


def others(results: Sequence[Result]) -> Section | None:
    """Return bars of whole steps by contender, and the ratios."""
    its = [r for r in results if r.kind == "compare" and len(r.data["times"]) > 4]
    if not its:
        return None
    section = Section("Whole step against other methods")
    section.text(
        "A step goes from gradient and residual to the dense sum. Times are medians of the slowest rank; all "
        "contenders take turns in one run. Solid bars: algorithms of sparsecomm. Hatched, light bars: what others do. "
        "Axes are logarithmic."
    )
    figure, axes = draw.panels(len(its), width=4.9, height=3.9, across=2, beside=0)
    for each, result in zip(axes, its, strict=True):
        data = result.data
        rows = sorted(data["times"], key=lambda row: row["step_ms"])
        own = {row["name"]: row["ours"] for row in rows}
        draw.bars(each, list(own), [row["step_ms"] / 1e3 for row in rows], time_text, own.__getitem__)
        n = f"n = {data['n'] / 1e6:g}M, density {number_text(data['density'])}, {data['wire']}"
        each.set_title(f"{result.name}: P = {data['P']}, {link_text(data)}\n{n}", fontsize="small")
    section.figure(figure, "Time of a whole step, by contender, on emulated networks.", "python -m bench.compare")
    for result in its:
        columns = [
            ("", lambda row: row["what"]),
            ("theirs", lambda row: row["theirs"]),
            ("ms", number("theirs_ms", ".2f")),
            ("ours", lambda row: row["ours"]),
            ("ms", number("ours_ms", ".2f")),
            ("theirs / ours", number("ratio", ".2f")),
            ("quartiles", lambda row: " - ".join(f"{q:.2f}" for q in row["quartiles"])),
        ]
        what = f"Ratios, P = {result.data['P']}, {link_text(result.data)}, n = {result.data['n']:,}"
        section.table(result.data["ratios"], columns, what, result.path.name)
    return section


def dense_wins(results: Sequence[Result]) -> Section | None:
    """Return the time of the fastest sparse and of the fastest dense sum against density, and the crossings."""
    its = [r for r in results if r.kind == "densities"]
    models = [r for r in results if r.kind == "auto model"]
    if not its and not models:
        return None
    section = Section("Where dense wins")
    section.text(
        "A dense sum takes the same time at every density. A sparse one takes longer the more entries are selected: "
        "beyond the density at which the lines cross, sum dense gradients. On shared memory that is soon, on a slow "
        "network late."
    )
    if its:
        figure, axes = draw.panels(len(its))
        for each, result in zip(axes, its, strict=True):
            rows = result.data["densities"]
            density = [row["density"] for row in rows]
            each.plot(
                density, [row["step"]["ours_ms"] / 1e3 for row in rows], "D-", color="#d55e00", label="sparse, fastest"
            )
            each.plot(
                density, [row["step"]["dense_ms"] / 1e3 for row in rows], "o--", color="#4d4d4d", label="dense, fastest"
            )
            crossing = result.data["crossings"]["step"]
            if crossing is not None:
                each.axvline(crossing, color="black", linewidth=1, linestyle=":", label="crossing")
                each.annotate(
                    f" {number_text(crossing, 2)}",
                    (crossing, 0.03),
                    xycoords=("data", "axes fraction"),
                    fontsize="small",
                )
            each.set_xscale("log")
            draw.log_axis(each.xaxis, number_text)
            each.xaxis.set_minor_formatter(draw.no_labels())
            draw.log_axis(each.yaxis, time_text)
            each.grid(True, alpha=0.35)
            each.set_xlabel("density")
            each.set_title(
                f"P = {result.data['P']}, {link_text(result.data)}, n = {result.data['n'] / 1e6:g}M", fontsize="small"
            )
        axes[0].set_ylabel("whole step, slowest rank")
        draw.legend(figure, axes)
        section.figure(
            figure,
            "Time of a whole step against density. Right of the dotted line a dense sum is faster.",
            "python -m bench.compare --densities ...",
        )
    rows = [
        {
            "where": f"P = {r.data['P']}, {link_text(r.data)}, n = {r.data['n']:,}",
            "file": r.path.name,
            **{kind: _from(r.data, kind) for kind in ("step", "exchange")},
        }
        for r in its
    ]
    if rows:
        columns = [
            ("", lambda row: row["where"]),
            ("whole step: dense wins", lambda row: row["step"]),
            ("exchange alone: dense wins", lambda row: row["exchange"]),
            ("file", lambda row: row["file"]),
        ]
        section.table(rows, columns, "Densities from which on a dense sum is faster")
    for result in models:
        _fastest(section, result)
    return section


def _from(data: dict[str, Any], kind: str) -> str:
    crossing = data["crossings"][kind]
    if crossing is not None:
        return f"from {number_text(crossing, 2)} on"
    winner = data["densities"][0][kind]["winner"]
    return "never, at these densities" if winner == "ours" else "always, at these densities"


def _fastest(section: Section, result: Result) -> None:
    """Add a table of the fastest algorithm by number of ranks, rate and density."""
    largest = max(row["n"] for row in result.rows)
    its = [row for row in result.rows if row["per machine"] == 1 and row["n"] == largest]
    cases = sorted({(row["rate"], row["density"]) for row in its})
    found = {(row["ranks"], row["rate"], row["density"]): row["fastest"].partition(",")[0] for row in its}
    columns: list[Any] = [("ranks", lambda P: P)]
    for rate, density in cases:
        name = f"{rate_text(rate)}, {number_text(density)}"
        columns.append((name, lambda P, rate=rate, density=density: found.get((P, rate, density))))
    section.table(
        sorted({row["ranks"] for row in its}),
        columns,
        f"The fastest algorithm on simulated networks, by rate and density; n = {largest:,}, one rank per node",
        result.path.name,
    )
