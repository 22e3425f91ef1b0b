"""Output of commands: tables with columns of fixed width, and JSON with one row per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table: a heading of two lines, the width, and a function from a row to its cell."""

    name: str
    unit: str
    width: int
    cell: Callable[[Any], object]


def table_head(header: Mapping[str, object], columns: Sequence[Column]) -> str:
    """Return the header and the headings of a table, as comment lines."""
    names, units = ("".join(f"{getattr(c, key):>{c.width}}" for c in columns)[2:] for key in ("name", "unit"))
    lines = [*(f"{name:<15} {value}" for name, value in header.items()), "", names, units]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def table_line(row: object, columns: Sequence[Column]) -> str:
    """Return a row as a line of text."""
    return "".join(f" {column.cell(row):>{column.width - 1}}" for column in columns)


def json_text(data: dict[str, Any]) -> str:
    """Return ``data`` as JSON with one line per key, and per row of a list of rows."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in data.items()) + "\n}\n"
