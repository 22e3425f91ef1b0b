"""Kernels on CPU and GPU, and stored runs of pytest-benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page import draw
from bench.page.html import Section, number
from bench.page.results import Result
from sparsecomm.quantities import number_text, time_text

__all__ = ["benchmarks", "gpu", "kernels"]


def kernels(results: Sequence[Result]) -> Section | None:
    """Return the figures of `bench.figures`: ratios and their targets."""
    its = [r for r in results if r.kind == "kernels"]
    if not its:
        return None
    section = Section("Kernels and calls on the CPU")
    section.text("Each ratio is of two things that were timed in turn in one run.")
    columns: list[Any] = [
        ("what", lambda row: row["what"]),
        ("ours, ms", number("ours_ms", ".3f")),
        ("against", lambda row: row["against"]),
        ("theirs, ms", number("theirs_ms", ".3f")),
        ("ratio or value", number("ratio", ".2f")),
        ("quartiles", lambda row: " - ".join(f"{q:.2f}" for q in row["quartiles"])),
        ("target", lambda row: f"{row['sense']} {number_text(row['target'])}"),
        ("met", lambda row: "yes" if row["met"] else "no"),
    ]
    for result in its:
        section.table(result.rows, columns, f"{result.name}: {result.where}", result.path.name)
    return section


def gpu(results: Sequence[Result]) -> Section | None:
    """Return times beside the floor that memory bandwidth sets."""
    its = [r for r in results if r.kind == "gpu"]
    if not its:
        return None
    section = Section("Kernels on a GPU")
    section.text(
        "A floor is the bytes that must move, over the bandwidth of a copy in the same run. Replayed: the device's own "
        "time. Called: with Python and launches."
    )
    for result in its:
        rows = [row for row in result.rows if row.get("floor_us") and row.get("replayed_us")]
        if rows:
            figure, (axes,) = draw.panels(1, width=8, height=0.3 * len(rows) + 1)
            ratios = [row["replayed_us"] / row["floor_us"] for row in rows]
            positions = range(len(rows))[::-1]
            axes.barh(positions, ratios, color="#0072b2", height=0.65)
            axes.axvline(1, color="black", linewidth=1.2)
            axes.set_yticks(positions, [row["what"] for row in rows])
            for position, ratio in zip(positions, ratios, strict=True):
                axes.annotate(f" {ratio:.2f}", (ratio, position), va="center", fontsize="small")
            axes.set_xlabel("time / floor")
            section.figure(figure, f"Time over the floor of memory bandwidth: {result.where}.", result.path.name)
        plain = [key for key in result.rows[0] if not isinstance(result.rows[0][key], (list, dict))]
        columns = [(key, lambda row, key=key: _cell(row.get(key))) for key in plain]
        section.table(result.rows, columns, f"{result.name}: {result.where}", result.path.name)
    return section


def benchmarks(results: Sequence[Result]) -> Section | None:
    """Return stored runs of pytest-benchmark."""
    its = [r for r in results if r.kind == "pytest-benchmark"]
    if not its:
        return None
    section = Section("Benchmarks of pytest")
    columns: list[Any] = [
        ("benchmark", lambda row: row["name"]),
        ("min", lambda row: time_text(row["stats"]["min"])),
        ("median", lambda row: time_text(row["stats"]["median"])),
        ("iqr", lambda row: time_text(row["stats"]["iqr"])),
        ("rounds", lambda row: row["stats"]["rounds"]),
        ("GB/s", lambda row: _cell(row.get("extra_info", {}).get("floor_gb_per_s"))),
    ]
    for result in its:
        section.table(result.data["benchmarks"], columns, f"{result.name}: {result.where}", result.path.name)
    return section


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return number_text(value, 4)
