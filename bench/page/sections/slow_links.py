"""How much of its time training computes on links with a delay and losses, and what single exchanges take there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page.html import Section, number
from bench.page.results import Result
from bench.utilisation import plots, tables
from sparsecomm.quantities import bytes_text, number_text, percent_text, rate_text

__all__ = ["slow_links"]


def slow_links(results: Sequence[Result]) -> Section | None:
    """Return heat maps of utilisation, and the times of exchanges."""
    its = [r for r in results if r.kind in ("utilisation", "calls")]
    if not its:
        return None
    section = Section("Links with delay and losses")
    section.text(
        "Utilisation is the time of computation / the time that passes, over whole rounds of H local steps of 30 ms: "
        "four ranks, each behind an emulated link of its own, 30.8 million parameters."
    )
    for result in its:
        if result.kind == "calls":
            columns = [
                ("link", lambda row: row["link"]),
                ("elements", number("n", ",")),
                ("exchange", lambda row: row["exchange"]),
                ("ms, before", lambda row: row.get("that") and number_text(row["that"][0])),
                ("ms", lambda row: row.get("this") and number_text(row["this"][0])),
                ("target", number("target")),
            ]
            section.table(result.data["calls"], columns, "Single exchanges, medians", result.path.name)
            continue
        cells = tables.found(result.rows)
        if any(row["method"] in tables.LOCAL for row in result.rows):
            section.figure(plots.heat_maps(cells), "Utilisation in percent, H against the link.", result.path.name)
        columns = [
            ("link", lambda row: rate_text(row["rate"])),
            ("round trip, ms", number("rtt", "g", 1e3)),
            ("lost", lambda row: percent_text(row["loss"])),
            ("method", lambda row: row["method"]),
            ("H", number("H", "d")),
            ("utilisation, %", _percent("utilisation")),
            ("planned, %", _percent("planned")),
            ("exchange, s", number("exchange_s")),
            ("sent", lambda row: bytes_text(row["sent"]) if row.get("sent") else None),
        ]
        section.table(result.rows, columns, "Utilisation of each cell", result.path.name)
    return section


def _percent(key: str) -> Any:
    return lambda row: None if row.get(key) is None else tables.percent(row[key])
