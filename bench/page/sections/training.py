"""Steps of training: with DDP on a slow network, the time that the hook adds, and overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page import draw
from bench.page.html import Section
from bench.page.results import Result
from sparsecomm.quantities import number_text, rate_text, time_text

__all__ = ["steps"]

_TITLES = {
    "training": "A step with DistributedDataParallel",
    "hook": "Time that a hook adds to a step",
    "overlap": "Exchange beside computation",
}


def steps(results: Sequence[Result]) -> Section | None:
    """Return medians and quartiles of steps."""
    its = [r for r in results if r.kind in _TITLES]
    if not its:
        return None
    section = Section("Steps of training")
    section.text("Black marks are medians of the slowest rank, bars their quartiles.")
    for result in sorted(its, key=lambda r: list(_TITLES).index(r.kind)):
        data = next(result.data[key] for key in ("ddp", "hook", "overlap") if key in result.data)
        milliseconds: dict[str, Any] = data.get("ms") or data["added_ms"]
        section.heading(_TITLES[result.kind])
        figure, (axes,) = draw.panels(1, width=7, height=0.36 * len(milliseconds) + 0.9)
        draw.boxes(axes, list(milliseconds), list(milliseconds.values()), lambda ms: time_text(ms / 1e3))
        axes.set_xlabel("ms")
        section.figure(
            figure, f"{_TITLES[result.kind]}: {_what(result, data)}.", result.about.get("command", result.path.name)
        )
        columns = [
            ("", lambda item: item[0]),
            ("median, ms", lambda item: f"{item[1][1]:.2f}"),
            ("quartiles, ms", lambda item: f"{item[1][0]:.2f} - {item[1][2]:.2f}"),
        ]
        section.table(list(milliseconds.items()), columns, _what(result, data), result.path.name)
    return section


def _what(result: Result, data: dict[str, Any]) -> str:
    link = result.about.get("link")
    rate = f", links of {rate_text(link['asked'])}" if link else ""
    size = (
        f"{data['parameters'] / 1e6:.1f}M parameters"
        if "parameters" in data
        else f"{data['parts']} x {data['n']:,} elements"
    )
    density = f", density {number_text(data['density'])}" if "density" in data else ""
    return f"{size}{density}, {data.get('ranks', 1)} rank(s){rate}"
