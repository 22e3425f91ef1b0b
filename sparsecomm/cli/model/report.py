"""The output of `sparsecomm model`: the table and the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import sparsecomm as sc
from sparsecomm.cli.model.options import Asked
from sparsecomm.cli.model.simulate import Row
from sparsecomm.cli.outputs import json_text
from sparsecomm.primitives.costs import Link
from sparsecomm.quantities import number_text, rate_text, time_text

__all__ = ["SCHEMA", "as_json", "link_text", "table_head", "table_line"]

SCHEMA = 1  # of the JSON file: it rises when a field changes its meaning or is removed

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
    """Return the lines above the rows."""
    costs, node = asked.costs, asked.costs.node or asked.costs.link
    per_node = f", {asked.per_node} ranks each: {link_text(node)} inside" if asked.per_node > 1 else ""
    select, add, merge, codec, call = (
        number_text(1e9 * cost) for cost in (costs.select, costs.add, costs.merge, costs.codec, costs.call)
    )
    work = (
        f"{select} ns per element to select, {add} to add; per entry {merge} to merge, {codec} to pack and unpack; "
        f"{call} per call"
    )
    lines = [
        f"sparsecomm {sc.__version__}: simulated ranks, in virtual time",
        f"nodes     {link_text(costs.link)} between them{per_node}",
        f"work      {work} ({asked.source})",
        f"gradient  float32, n={asked.n}, k={asked.k}; {asked.shared:.0%} of the entries are selected by all ranks",
        "time      of the last rank; exchange: messages alone; step: with the work; ~: by the formula, not simulated",
    ]
    if asked.straggler:
        lines.append(f"late      the last rank, by {time_text(asked.straggler)}; times count from the others' start")
    lines.append("")
    lines.append("".join(f"{name:>{width}}" for name, _, width in _COLUMNS)[2:])
    lines.append("".join(f"{unit:>{width}}" for _, unit, width in _COLUMNS)[2:].rstrip())
    return "\n".join(f"# {line}".rstrip() for line in lines)


def table_line(row: Row) -> str:
    """Return the line of a row."""
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


def link_text(link: Link) -> str:
    """Return rate and latency."""
    rate = rate_text(8 / link.beta) if link.beta else "any rate"
    return f"{rate} and {time_text(link.alpha)}"


# -- files ------------------------------------------------------------------------------------------------------------


def as_json(asked: Asked, rows: Sequence[Row]) -> str:
    """Return the text of the JSON file."""
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
