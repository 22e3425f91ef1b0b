"""The figures as they are shown: the table, the JSON file, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sparsecomm as sc
from sparsecomm.algorithms import Link
from sparsecomm.cli.model.options import Asked
from sparsecomm.cli.model.simulate import Row
from sparsecomm.cli.outputs import json_text

__all__ = ["SCHEMA", "as_json", "plot", "table_head", "table_line"]

SCHEMA = 1  # of the JSON file: higher when a field changes its meaning or leaves

# -- the table --------------------------------------------------------------------------------------------------------

_COLUMNS = [
    ("ranks", "", 7),
    ("algorithm", "", 22),
    ("wire", "", 16),
    ("exchange", "ms", 12),
    ("formula", "ms", 12),
    ("step", "ms", 12),
    ("formula", "ms", 12),
    ("sent", "B/rank", 13),
    ("received", "B/rank", 13),
    ("messages", "/rank", 10),
]


def table_head(asked: Asked) -> str:
    costs, node = asked.costs, asked.costs.node or asked.costs.link
    per_node = f", {asked.per_node} ranks each: {_link(node)} inside" if asked.per_node > 1 else ""
    work = (
        f"{costs.select * 1e9:g} ns per element to select, {costs.add * 1e9:g} to add; per entry "
        f"{costs.merge * 1e9:g} to merge, {costs.codec * 1e9:g} to pack and unpack; {costs.call * 1e9:g} per call"
    )
    lines = [
        f"sparsecomm {sc.__version__}: simulated ranks, in virtual time",
        f"machines  {_link(costs.link)} between them{per_node}",
        f"work      {work} ({asked.source})",
        f"gradient  float32, n={asked.n}, k={asked.k}; {asked.shared:.0%} of the entries are selected by all ranks",
        "time      of the last rank; exchange: messages alone; step: with the work; ~ the formula's, not simulated",
    ]
    if asked.straggler:
        lines.append(
            f"late      the last rank, by {asked.straggler * 1e3:g} ms; times count from the others' beginning"
        )
    lines.append("")
    lines.append("".join(f"{name:>{width}}" for name, _, width in _COLUMNS)[2:])
    lines.append("".join(f"{unit:>{width}}" for _, unit, width in _COLUMNS)[2:].rstrip())
    return "\n".join(f"# {line}".rstrip() for line in lines)


def table_line(row: Row) -> str:
    name = row.name if row.name == row.chosen.algorithm.name else f"{row.name}: {row.chosen.algorithm.name}"
    values = [str(row.P), name, row.chosen.wire.name]
    if row.found is None:
        values += ["~" + _ms(row.exchange), _ms(row.exchange), "~" + _ms(row.step), _ms(row.step), "-", "-", "-"]
    else:
        found = row.found
        values += [_ms(found.exchange), _ms(row.exchange), _ms(found.step), _ms(row.step)]
        values += [str(found.sent), str(found.received), str(found.messages)]
    return "".join(f" {value:>{width - 1}}" for value, (_, _, width) in zip(values, _COLUMNS, strict=True))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _link(link: Link) -> str:
    rate = f"{8e-9 / link.beta:.4g} Gb/s" if link.beta else "any rate"
    return f"{rate} and {link.alpha * 1e6:.4g} us"


# -- files ------------------------------------------------------------------------------------------------------------


def as_json(asked: Asked, rows: Sequence[Row]) -> str:
    header = {
        "sparsecomm": sc.__version__,
        "ranks_per_node": asked.per_node,
        "costs": asdict(asked.costs),
        "costs_from": asked.source,
        "dtype": "float32",
        "n": asked.n,
        "k": asked.k,
        "shared": asked.shared,
        "straggler_seconds": asked.straggler,
        "seed": asked.seed,
    }
    found = [
        {
            "ranks": row.P,
            "machines": row.num_nodes,
            "algorithm": row.name,
            "runs": row.chosen.algorithm.name,
            "wire": row.chosen.wire.name,
            "simulated": row.found is not None,
            "exchange_seconds": row.found and row.found.exchange,
            "step_seconds": row.found and row.found.step,
            "formula_exchange_seconds": row.exchange,
            "formula_step_seconds": row.step,
            "sent_bytes_per_rank": row.found and row.found.sent,
            "received_bytes_per_rank": row.found and row.found.received,
            "messages_per_rank": row.found and row.found.messages,
            "scale": row.found and row.found.scale,
        }
        for row in rows
    ]
    return json_text({"schema": SCHEMA, "header": header, "rows": found})


_COLOURS = ("#4d4d4d", "#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot(path: Path, asked: Asked, rows: Sequence[Row]) -> None:
    """Time of a step, bytes and messages against ranks; dotted, without markers, where only the formula is known."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, (times, amounts, counts) = pyplot.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    handles = []
    for i, name in enumerate(asked.algorithms):
        its = [row for row in rows if row.name == name]
        simulated = [(row.P, row.found) for row in its if row.found is not None]
        style: dict[str, Any] = {"color": _COLOURS[i % len(_COLOURS)], "linewidth": 1.6}
        marks: dict[str, Any] = {"marker": _MARKERS[i % len(_MARKERS)], "markersize": 5}
        if name == "auto":  # it lies on another line: rings around its marks
            style |= {"color": "black", "linewidth": 0, "zorder": 5}
            marks |= {"marker": "o", "markersize": 10, "markerfacecolor": "none"}
        times.plot([P for P, _ in simulated], [found.step for _, found in simulated], **style, **marks)
        amounts.plot([P for P, _ in simulated], [max(f.sent, f.received) for _, f in simulated], **style, **marks)
        counts.plot([P for P, _ in simulated], [found.messages for _, found in simulated], **style, **marks)
        last = [row for row in its if row.found is not None][-1:]
        beyond = [(r.P, r.found.step if r.found else r.step) for r in its if r.found is None or r in last]
        if len(beyond) > len(last):
            times.plot([P for P, _ in beyond], [seconds for _, seconds in beyond], linestyle=":", **style)
        handles.append(Line2D([], [], **style, **marks, label=name))
    if any(row.found is None for row in rows):
        handles.append(Line2D([], [], color="black", linestyle=":", label="by the formula"))

    shown = asked.ranks[:: -(-len(asked.ranks) // 12)]
    for axes in (times, amounts, counts):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(shown, [str(P) for P in shown], rotation=45 if len(shown) > 8 else 0)
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.set_xlim(asked.ranks[0] / 1.2, asked.ranks[-1] * 1.2)
        axes.set_xlabel("ranks" + (f", {asked.per_node} per machine" if asked.per_node > 1 else ""))
        axes.grid(True, which="major", alpha=0.35)
        axes.grid(True, which="minor", axis="y", alpha=0.12)
    for axes, text, label in (
        (times, _time_text, "time of a step, last rank"),
        (amounts, _bytes_text, "bytes that the busiest rank sends or receives"),
        (counts, _count_text, "messages that the busiest rank sends or receives"),
    ):
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(text))
        low, high = axes.get_ylim()
        if high / low < 30:  # a power of ten or two are too few to read by
            axes.yaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 3, 5, 7)))
            axes.yaxis.set_minor_formatter(matplotlib.ticker.FuncFormatter(text))
        else:
            axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axes.set_ylabel(label)
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    late = f", the last rank {asked.straggler * 1e3:g} ms late" if asked.straggler else ""
    figure.suptitle(f"simulated: n={asked.n:,}, k={asked.k:,}, {_link(asked.costs.link)} between machines{late}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _count_text(count: float, _: object = None) -> str:
    return f"{count:g}"


def _time_text(seconds: float, _: object = None) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale * 0.9999:
            return f"{seconds / scale:g} {unit}"
    return f"{seconds * 1e9:g} ns"


def _bytes_text(nbytes: float, _: object = None) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale * 0.9999:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} B"
