"""Results of kinds that the page has no section for, as tables; and the runs behind the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page.html import Section
from bench.page.results import Result
from sparsecomm.quantities import number_text

__all__ = ["rest", "runs"]

_MAX_ROWS = 60


def rest(results: Sequence[Result]) -> Section | None:
    """Return every list of rows as a table, with the pictures whose names begin with the file's."""
    its = [r for r in results if r.kind == "other"]
    if not its:
        return None
    section = Section("Other results")
    for result in its:
        section.heading(result.name)
        for picture in sorted(result.path.parent.glob(f"{result.name}*.png")):
            section.image(picture.read_bytes(), "png", f"{picture.stem}, drawn by the command of {result.path.name}.")
        for key, rows in result.data.items():
            if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                _table(section, result, key, [_flat(row) for row in rows])
    return section if section.blocks else None


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose values are plain: those of a dict inside under their own names, lists left out."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {
                f"{key} {inner}" if inner in found or inner in row else inner: v for inner, v in _flat(value).items()
            }
        elif not isinstance(value, list):
            found[key] = value
    return found


def _table(section: Section, result: Result, key: str, rows: list[dict[str, Any]]) -> None:
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if len({str(r.get(name)) for r in rows}) > 1
    ]
    same = {name: value for name, value in rows[0].items() if name not in names} if len(rows) > 1 else {}
    columns = [(name, lambda row, name=name: _text(row.get(name))) for name in names or list(rows[0])]
    caption = f"{result.name}: {key}" + (f", the first {_MAX_ROWS} of {len(rows)}" if len(rows) > _MAX_ROWS else "")
    shared = "; ".join(f"{name} {_text(value)}" for name, value in same.items() if value is not None)
    section.table(rows[:_MAX_ROWS], columns, caption + (f" ({shared})" if shared else ""), result.path.name)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return number_text(value, 4) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def runs(results: Sequence[Result]) -> Section:
    """Return the command, the machine and the date of every file."""
    section = Section("Runs behind this page")
    columns: list[Any] = [
        ("file", lambda r: r.path.name),
        ("command", lambda r: r.about.get("command")),
        ("machine", lambda r: r.about.get("machine")),
        ("date", lambda r: r.about.get("date")),
    ]
    section.table(results, columns, f"{len(results)} files")
    return section
