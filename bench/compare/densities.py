"""From which density on a dense sum is faster."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rich.table import Table

from bench.compare.tables import DENSE, SPARSE, fastest
from bench.compare.timing import Times


def density_row(density: float, times: Times) -> dict[str, Any]:
    row: dict[str, Any] = {"density": density}
    for kind in ("step", "exchange"):
        ours, dense = fastest(times, SPARSE, kind), fastest(times, DENSE, kind)
        a, b = times.seconds[ours, kind], times.seconds[dense, kind]
        row[kind] = {
            "ours": ours,
            "ours_ms": float(np.median(a)) * 1e3,
            "dense": dense,
            "dense_ms": float(np.median(b)) * 1e3,
            "ratio": float(np.median(b / a)),
            "winner": "ours" if np.median(b / a) > 1 else "dense",
        }
    return row


def density_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("density", title="sparse against dense: the fastest of each", caption=crossings(rows))
    for kind in ("whole step", "exchange alone"):
        for column in (f"{kind}: ours, ms", "dense, ms", "ratio", "winner"):
            table.add_column(column)
    for r in rows:
        cells = []
        for kind in ("step", "exchange"):
            c = r[kind]
            cells += [f"{c['ours']} {c['ours_ms']:.3f}", f"{c['dense']} {c['dense_ms']:.3f}", f"{c['ratio']:.2f}"]
            cells.append(c["winner"])
        table.add_row(f"{r['density']:g}", *cells)
    return table


def crossings(rows: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{'whole step' if kind == 'step' else 'exchange alone'}: {text(crossing(rows, kind), rows, kind)}"
        for kind in ("step", "exchange")
    )


def text(density: float | None, rows: list[dict[str, Any]], kind: str) -> str:
    if density is None:
        return f"{rows[0][kind]['winner']} wins at all these densities"
    return f"dense wins above a density of {density:.2g}"


def crossing(rows: list[dict[str, Any]], kind: str) -> float | None:
    """The density from which on dense wins, between two that were measured: linear in the logarithms."""
    for lower, upper in zip(reversed(rows[:-1]), reversed(rows[1:]), strict=True):
        a, b = (math.log(r[kind]["ratio"]) for r in (lower, upper))
        if a > 0 >= b:
            return float(math.exp(np.interp(0, [b, a], [math.log(upper["density"]), math.log(lower["density"])])))
    return None
