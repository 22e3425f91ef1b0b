"""Result files: their kind, the command that made them, and their tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A file is of the first kind whose keys are all in the file, or else in its first row.
FILE_KINDS: dict[str, tuple[str, ...]] = {
    "compare": ("times", "ratios", "bounds"),
    "densities": ("densities", "crossings"),
    "ddp": ("run", "ddp"),
    "hook": ("run", "hook"),
    "overlap": ("run", "overlap"),
    "round": ("run", "round"),
}
ROW_KINDS: dict[str, tuple[str, ...]] = {
    "bench": ("time_median_us", "algorithm_taken"),
    "model": ("formula_step_seconds", "messages_per_rank"),
    "auto model": ("per machine", "candidates"),
    "auto": ("fastest", "candidates"),
    "paper": ("slowdown", "method", "model"),
    "gpu": ("called_us",),
    "recovery": ("experiment", "way"),
}


@dataclass(frozen=True)
class Result:
    """The contents of a result file; of a file of lines, their list as ``rows``."""

    path: Path
    data: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the main table; empty if there is none."""
        rows = self.data.get("rows", [])
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @property
    def kind(self) -> str:
        """A key of `FILE_KINDS` or `ROW_KINDS`, or "other"."""
        first: dict[str, Any] = next(iter(self.rows), {})
        for kinds, keys_of in ((FILE_KINDS, self.data), (ROW_KINDS, first)):
            for kind, keys in kinds.items():
                if all(key in keys_of for key in keys):
                    return kind
        return "other"

    @property
    def about(self) -> dict[str, Any]:
        """Command, machine and date of the run."""
        runs, machine = self.data.get("runs"), self.data.get("machine_info")
        if isinstance(runs, list) and runs:
            return {**runs[0], "command": "\n".join(run["command"] for run in runs[:3])}
        if isinstance(machine, dict):
            text = f"{machine.get('machine')}, {machine.get('cores')} cores"
            return {"command": "pytest bench --benchmark-json", "machine": text, "date": self.data.get("datetime")}
        run = self.data.get("run") or self.data.get("header") or self.data
        return run if isinstance(run, dict) else {}

    @property
    def text(self) -> str | None:
        """The tables that the command wrote beside the file, if it did."""
        file = self.path.with_suffix(".txt")
        return file.read_text() if file.exists() else None

    @property
    def pictures(self) -> list[Path]:
        """The pictures that the command wrote beside the file."""
        folder, stem = self.path.parent, self.path.stem
        return sorted([*folder.glob(f"{stem}.png"), *folder.glob(f"{stem}-*.png")])

    @property
    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """All lists of rows in the file, by name; rows within rows are flattened."""
        lists = {name: rows for name, rows in self.data.items() if isinstance(rows, list) and rows}
        return {
            name: [_flat(row) for row in rows]
            for name, rows in lists.items()
            if name != "runs" and all(isinstance(row, dict) for row in rows)
        }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{key} {name}" if name in row else name: inner for name, inner in _flat(value).items()}
        elif not isinstance(value, list):
            flat[key] = value
    return flat


def read(paths: Iterable[Path]) -> list[Result]:
    """Return the results of files, and of all .json and .jsonl files in folders, by name.

    Raises:
        ValueError: a file is not JSON, or there is none.
        OSError: a file cannot be read.
    """
    files = [
        file
        for path in paths
        for file in (sorted([*path.glob("*.json"), *path.glob("*.jsonl")]) if path.is_dir() else [path])
    ]
    if not files:
        raise ValueError("there is no .json or .jsonl file to report on")
    return [_read(file) for file in files]


def _read(file: Path) -> Result:
    try:
        text = file.read_text()
        if file.suffix == ".jsonl":
            return Result(file, {"rows": [json.loads(line) for line in text.splitlines() if line.strip()]})
        data = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: it is not text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: it is not JSON ({error})") from error
    return Result(file, data if isinstance(data, dict) else {"rows": data})
