"""Rows for the JSON file, and tables of them."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from rich.table import Table

from bench import report
from bench.compare.contenders import OURS, Contender, Ours
from bench.compare.links import link_text
from bench.compare.timing import Times
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.cli.bench.clocks import PART_OF
from sparsecomm.primitives.costs import Costs, Link

SPARSE = [name for name in OURS if name != "dense"]
DENSE = ["dense", "dense-ring", "dense-mpi"]
TARGETED = (8, 25_600_000, 25_600)  # P, n, k


def launched_ring() -> bool:
    """Whether Open MPI was told to take its ring for allreduce."""
    said = {
        name: os.environ.get(f"OMPI_MCA_coll_tuned_{name}") for name in ("use_dynamic_rules", "allreduce_algorithm")
    }
    return said == {"use_dynamic_rules": "1", "allreduce_algorithm": "4"}


def rings() -> list[str]:
    return ["dense-ring", "dense", *(["dense-mpi"] if launched_ring() else [])]


def fastest(times: Times, names: list[str], kind: str) -> str | None:
    return min((n for n in names if (n, kind) in times.seconds), key=lambda n: times.median(n, kind), default=None)


def timing_rows(contenders: list[Contender], times: Times) -> list[dict[str, Any]]:
    rows = []
    for c in contenders:
        row: dict[str, Any] = {"name": c.name, "ours": isinstance(c, Ours)}
        row["format"] = c.wire.name if isinstance(c, Ours) else None
        for kind in ("step", "exchange"):
            q1, median, q3 = report.quartiles(times.seconds[c.name, kind], 1e3)
            row[f"{kind}_ms"], row[f"{kind}_quartiles_ms"] = median, [q1, q3]
            row["rounds"] = int(np.isfinite(times.seconds[c.name, kind]).sum())
        key = c.name, "exchange"
        row |= {"sent": times.most[key], "sent_mean": times.mean[key], "wire": times.wire[key]}
        row["parts_ms"] = {
            part: float(np.nanmedian(seconds)) * 1e3 for (name, part), seconds in times.parts.items() if name == c.name
        }
        rows.append(row)
    return rows


def timing_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "",
        "whole step, ms",
        "quartiles",
        "exchange, ms",
        "quartiles",
        "of it sums and merges, ms",
        "packing, ms",
        "bytes sent: max",
        "mean",
        "on the wire",
        "rounds",
        title="times, the maximum over ranks",
    )
    for r in rows:
        cells = []
        for kind in ("step", "exchange"):
            q1, q3 = r[f"{kind}_quartiles_ms"]
            cells += [f"{r[f'{kind}_ms']:.3f}", f"{q1:.3f} - {q3:.3f}"]
        for kind in ("merge", "code"):
            spent = sum(ms for part, ms in r["parts_ms"].items() if PART_OF.get(part) == kind)
            cells.append(f"{spent:.3f}" if r["parts_ms"] else "")
        cells += ["" if math.isnan(r[b]) else f"{r[b]:,.0f}" for b in ("sent", "sent_mean", "wire")]
        table.add_row(("ours: " if r["ours"] else "") + r["name"], *cells, str(r["rounds"]))
    return table


def bound_rows(ours: list[Ours], times: Times, links: dict[str, Link]) -> list[dict[str, Any]]:
    rows = []
    for c in ours:
        name = c.name
        exchange, plain = times.seconds[name, "exchange"], times.seconds[name, "plain"]
        q1, median, q3 = report.quartiles(exchange / plain) if times.median(name, "plain") else [math.nan] * 3
        row: dict[str, Any] = {
            "name": name,
            "exchange_ms": times.median(name, "exchange") * 1e3,
            "plain": {"ms": times.median(name, "plain") * 1e3, "ratio": median, "quartiles": [q1, q3]},
        }
        for source, link in links.items():
            bound = ALGORITHMS[name].predicted_time(c.problem, Costs(link))  # messages alone: no work
            row[source] = {"bound_ms": bound * 1e3, "ratio": times.median(name, "exchange") / bound if bound else None}
        ratio = row["measured"]["ratio"]
        row |= {"target": 1.3, "met": None if ratio is None else ratio <= 1.3}
        rows.append(row)
    return rows


def bound_table(rows: list[dict[str, Any]], links: dict[str, Link]) -> Table:
    table = Table(
        "",
        "exchange, ms",
        "its messages by MPI alone, ms",
        "ratio",
        "quartiles",
        title="exchange against MPI alone, and against alpha and beta",
        caption=link_text(links),
    )
    for source in links:
        table.add_column(f"bound, ms ({source})")
        table.add_column("ratio")
    table.add_column("target")
    table.add_column("met")
    for r in rows:
        q1, q3 = r["plain"]["quartiles"]
        cells = [f"{r['plain']['ms']:.3f}", f"{r['plain']['ratio']:.2f}", f"{q1:.2f} - {q3:.2f}"]
        for source in links:
            ratio = r[source]["ratio"]
            cells += [f"{r[source]['bound_ms']:.3f}", "" if ratio is None else f"{ratio:.2f}"]
        met = "" if r["met"] is None else "yes" if r["met"] else "no"
        table.add_row(f"ours: {r['name']}", f"{r['exchange_ms']:.3f}", *cells, f"<= {r['target']}", met)
    return table


def ratio_rows(times: Times, problem: tuple[int, int, int]) -> list[dict[str, Any]]:
    """How much faster ours is. Dense ring and ours: the fastest that ran, of each.

    Args:
        problem: P, n and k. Targets are for one problem.
    """
    rows = []
    for kind, what, of, aim in (
        ("exchange", "dense ring", rings(), 120),
        ("step", "dense ring", rings(), 40),
        ("step", "gTop-k the paper's way", ["gtopk-paper"], 10),
        ("step", "Top-k by allgather in NumPy", ["topk-numpy"], 10),
        ("exchange", "our allgather", ["allgather"], 2),
        ("exchange", "dense by MPI", ["dense-mpi"], None),
        ("step", "dense by MPI", ["dense-mpi"], None),
        ("exchange", "dense in 8 bits", ["int8"], None),
        ("step", "dense in 8 bits", ["int8"], None),
        ("exchange", "gTop-k the paper's way", ["gtopk-paper"], None),
        ("exchange", "Top-k by allgather in NumPy", ["topk-numpy"], None),
        ("exchange", "torch.topk, all_gather over gloo", ["topk-gloo"], None),
        ("step", "torch.topk, all_gather over gloo", ["topk-gloo"], None),
    ):
        target = aim if problem == TARGETED else None
        slow, ours = fastest(times, of, kind), fastest(times, SPARSE, kind)
        if slow is None or ours is None:
            continue
        q1, median, q3 = report.quartiles(times.seconds[slow, kind] / times.seconds[ours, kind])
        rows.append(
            {
                "what": f"{'whole step' if kind == 'step' else 'exchange alone'}: {what} / ours",
                "theirs": slow,
                "theirs_ms": times.median(slow, kind) * 1e3,
                "ours": ours,
                "ours_ms": times.median(ours, kind) * 1e3,
                "ratio": median,
                "quartiles": [q1, q3],
                "target": target,
                "met": None if target is None else median >= target,
            }
        )
    return rows


def ratio_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "", "theirs", "ms", "ours", "ms", "ratio", "quartiles", "target", "met", title="ratios, round by round"
    )
    for r in rows:
        q1, q3 = r["quartiles"]
        target = "" if r["target"] is None else f">= {r['target']}"
        met = "" if r["met"] is None else "yes" if r["met"] else "no"
        table.add_row(
            r["what"],
            r["theirs"],
            f"{r['theirs_ms']:.3f}",
            r["ours"],
            f"{r['ours_ms']:.3f}",
            f"{r['ratio']:.2f}",
            f"{q1:.2f} - {q3:.2f}",
            target,
            met,
        )
    return table
