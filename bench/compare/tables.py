"""The rows of the JSON file, and tables of them."""

from __future__ import annotations

import math
import os
from itertools import product
from typing import Any

import numpy as np
from rich.table import Table

from bench import report
from bench.compare.contenders import CONTENDERS, Ours
from bench.report import interval, number, quartiles
from bench.timing import Runner, Timing
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import number_text

Row = dict[str, Any]
Times = dict[tuple[str, str], Timing]  # by contender and kind
KINDS = {"step": "whole step", "exchange": "exchange alone"}
SPARSE = [name for name, contender in CONTENDERS.items() if contender.kind == "ours" and name != "dense"]
DENSE = ["dense", "dense-ring", "dense-mpi"]


def link_text(links: dict[str, Link]) -> str:
    """Describe links by their source."""
    return "; ".join(
        f"{source}: alpha = {link.alpha * 1e6:.1f} us, beta = {link.beta * 1e9:.3f} ns/byte"
        for source, link in links.items()
    )


def launched_ring() -> bool:
    """Return whether Open MPI uses its ring for allreduce."""
    settings = {
        name: os.environ.get(f"OMPI_MCA_coll_tuned_{name}") for name in ("use_dynamic_rules", "allreduce_algorithm")
    }
    return settings == {"use_dynamic_rules": "1", "allreduce_algorithm": "4"}


def rings() -> list[str]:
    return ["dense-ring", "dense", *(["dense-mpi"] if launched_ring() else [])]


def fastest(times: Times, names: list[str], kind: str) -> str | None:
    return min((n for n in names if (n, kind) in times), key=lambda n: times[n, kind].median, default=None)


def timing_rows(runners: dict[str, Runner], times: Times, own_hosts: bool) -> list[Row]:
    rows = []
    for name, runner in runners.items():
        row: Row = {"name": name, "ours": isinstance(runner, Ours)}
        row["format"] = runner.taken.wire.name if isinstance(runner, Ours) else None
        for kind in KINDS:
            slowest = times[name, kind].slowest
            q1, row[f"{kind}_ms"], q3 = quartiles(slowest, 1e3)
            row[f"{kind}_quartiles_ms"] = [q1, q3]
            row["rounds"] = int(np.isfinite(slowest).sum())
        exchange = times[name, "exchange"]
        sent, wire = exchange.traffic.T
        row |= {"sent": sent.max(), "sent_mean": sent.mean(), "wire": wire.max() if own_hosts else math.nan}
        row["parts_ms"] = {
            part: 1e3 * float(np.nanmedian(part_times.max(axis=0))) for part, part_times in exchange.parts.items()
        }
        rows.append(row)
    return rows


def timing_table(rows: list[Row]) -> Table:
    def part(name: str) -> Any:
        return lambda row: f"{row['parts_ms'][name]:.3f}" if row["parts_ms"] else None

    columns = [
        ("", _name),
        ("whole step, ms", number("step_ms")),
        ("quartiles", interval("step_quartiles_ms")),
        ("exchange, ms", number("exchange_ms")),
        ("quartiles", interval("exchange_quartiles_ms")),
        ("of it sums and merges, ms", part("merge")),
        ("packing, ms", part("code")),
        ("bytes sent: max", number("sent", ",.0f")),
        ("mean", number("sent_mean", ",.0f")),
        ("on the wire", number("wire", ",.0f")),
        ("rounds", lambda row: row["rounds"]),
    ]
    return report.table(rows, columns, title="times, the maximum over ranks")


def _name(row: Row) -> str:
    return ("ours: " if CONTENDERS[row["name"]].kind == "ours" else "") + str(row["name"])


def bound_rows(ours: dict[str, Ours], times: Times, links: dict[str, Link]) -> list[Row]:
    rows = []
    for name, runner in ours.items():
        exchange, plain = times[name, "exchange"], times[name, "plain"]
        q1, median, q3 = quartiles(exchange.slowest / plain.slowest) if plain.median else [math.nan] * 3
        row: Row = {
            "name": name,
            "exchange_ms": exchange.median * 1e3,
            "plain": {"ms": plain.median * 1e3, "ratio": median, "quartiles": [q1, q3]},
        }
        for source, link in links.items():
            bound = runner.taken.algorithm.predicted_time(runner.problem, Costs(link))  # messages alone: no work
            row[source] = {"bound_ms": bound * 1e3, "ratio": exchange.median / bound if bound else None}
        rows.append(row)
    return rows


def bound_table(rows: list[Row], links: dict[str, Link]) -> Table:
    def inside(source: str, cell: Any) -> Any:
        return lambda row: cell(row[source])

    columns = [
        ("", _name),
        ("exchange, ms", number("exchange_ms")),
        ("its messages by MPI alone, ms", inside("plain", number("ms"))),
        ("ratio", inside("plain", number("ratio", ".2f"))),
        ("quartiles", inside("plain", interval("quartiles", ".2f"))),
    ]
    for source in links:
        columns.append((f"bound, ms ({source})", inside(source, number("bound_ms"))))
        columns.append(("ratio", inside(source, number("ratio", ".2f"))))
    title = "exchange against MPI alone, and against alpha and beta"
    return report.table(rows, columns, title=title, caption=link_text(links))


def ratio_rows(times: Times) -> list[Row]:
    """Return our speed-ups. "Dense ring" and "ours" are the fastest that ran, of each."""
    rows = []
    others = {
        "dense ring": rings(),
        "our allgather": ["allgather"],
        "dense by MPI": ["dense-mpi"],
        "dense in 8 bits": ["int8"],
        "gTop-k the paper's way": ["gtopk-paper"],
        "Top-k by allgather in NumPy": ["topk-numpy"],
        "torch.topk, all_gather over gloo": ["topk-gloo"],
    }
    for (what, theirs), kind in product(others.items(), ("exchange", "step")):
        slow, ours = fastest(times, theirs, kind), fastest(times, SPARSE, kind)
        if slow is None or ours is None:
            continue
        q1, median, q3 = quartiles(times[slow, kind].slowest / times[ours, kind].slowest)
        row = {"what": f"{KINDS[kind]}: {what} / ours", "theirs": slow, "ours": ours}
        row |= {"theirs_ms": times[slow, kind].median * 1e3, "ours_ms": times[ours, kind].median * 1e3}
        rows.append(row | {"ratio": median, "quartiles": [q1, q3]})
    return rows


def ratio_table(rows: list[Row]) -> Table:
    columns = [
        ("", lambda row: row["what"]),
        ("theirs", lambda row: row["theirs"]),
        ("ms", number("theirs_ms")),
        ("ours", lambda row: row["ours"]),
        ("ms", number("ours_ms")),
        ("ratio", number("ratio", ".2f")),
        ("quartiles", interval("quartiles", ".2f")),
    ]
    return report.table(rows, columns, title="ratios, round by round")


def density_row(density: float, times: Times) -> Row:
    row: Row = {"density": density}
    for kind in KINDS:
        ours, dense = fastest(times, SPARSE, kind), fastest(times, DENSE, kind)
        assert ours is not None and dense is not None  # noqa: PT018 - the options have both
        a, b = times[ours, kind], times[dense, kind]
        ratio = float(np.median(b.slowest / a.slowest))
        row[kind] = {"ours": ours, "ours_ms": a.median * 1e3, "dense": dense, "dense_ms": b.median * 1e3}
        row[kind] |= {"ratio": ratio, "winner": "ours" if ratio > 1 else "dense"}
    return row


def density_table(rows: list[Row]) -> Table:
    def side(kind: str, who: str) -> Any:
        return lambda row: f"{row[kind][who]} {row[kind][who + '_ms']:.3f}"

    columns: list[report.Column] = [("density", number("density", "g"))]
    for kind, name in KINDS.items():
        columns += [(f"{name}: ours, ms", side(kind, "ours")), ("dense, ms", side(kind, "dense"))]
        columns.append(("ratio", lambda row, kind=kind: f"{row[kind]['ratio']:.2f}"))
        columns.append(("winner", lambda row, kind=kind: row[kind]["winner"]))
    crossings = "; ".join(f"{name}: {_crossing_text(rows, kind)}" for kind, name in KINDS.items())
    return report.table(rows, columns, title="sparse against dense: the fastest of each", caption=crossings)


def _crossing_text(rows: list[Row], kind: str) -> str:
    density = crossing(rows, kind)
    if density is None:
        return f"{rows[0][kind]['winner']} wins at all these densities"
    return f"dense wins above a density of {number_text(density, 2)}"


def crossing(rows: list[Row], kind: str) -> float | None:
    """Return the density from which on dense wins, between two that were measured: linear in the logarithms."""
    for lower, upper in zip(reversed(rows[:-1]), reversed(rows[1:]), strict=True):
        a, b = (math.log(r[kind]["ratio"]) for r in (lower, upper))
        if a > 0 >= b:
            return float(math.exp(np.interp(0, [b, a], [math.log(upper["density"]), math.log(lower["density"])])))
    return None
