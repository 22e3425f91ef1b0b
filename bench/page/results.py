"""Result files: what kind each is, which command made it, and when."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Result", "read"]

# By which keys a kind of file is known, the first that fits.
KINDS: dict[str, tuple[str, ...]] = {
    "pytest-benchmark": ("machine_info", "benchmarks"),
    "convergence": ("runs", "trainings"),
    "compare": ("times", "ratios", "bounds"),
    "densities": ("densities", "crossings"),
    "beyond": ("errors", "cells", "work"),
    "training": ("run", "ddp"),
    "hook": ("run", "hook"),
    "overlap": ("run", "overlap"),
    "local-steps round": ("run", "round"),
    "calls": ("run", "calls"),
    "utilisation": ("setting", "runs", "rows"),
}
# The same by the keys of the rows.
ROW_KINDS: dict[str, tuple[str, ...]] = {
    "bench": ("time_median_us", "algorithm_taken"),
    "model": ("formula_step_seconds", "messages_per_rank"),
    "auto model": ("per machine", "candidates"),
    "auto": ("fastest", "candidates"),
    "paper": ("slowdown", "method", "model"),
    "gpu": ("called_us",),
    "kernels": ("against", "ours_ms"),
    "recovery": ("experiment", "way"),
    "local-steps bytes": ("way", "received"),
    "local steps": ("setting", "outcome"),
}


@dataclass(frozen=True)
class Result:
    """The contents of a result file.

    Attributes:
        name: the file's name without its ending.
        path: the file.
        kind: a key of `KINDS` or `ROW_KINDS`; "other" for what is none of them.
        data: the contents; of a file of lines, their list as ``rows``.
    """

    name: str
    path: Path
    kind: str
    data: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the file's main table; empty if there is none."""
        found = self.data.get("rows", [])
        return found if isinstance(found, list) else []

    @property
    def about(self) -> dict[str, Any]:
        """What the file says of the run: command, machine, versions, date."""
        runs = self.data.get("runs")
        if isinstance(runs, list) and runs:
            return {**runs[0], "command": "; ".join(run["command"] for run in runs[:3])}
        run = self.data.get("run") or self.data.get("header") or self.data
        machine = self.data.get("machine_info")
        if isinstance(machine, dict):
            own = machine.get("sparsecomm", {})
            said = (
                f"{machine.get('machine')}, {machine.get('cores')} cores, {own.get('simd')}; {own.get('ranks')} rank(s)"
            )
            return {"command": "pytest bench --benchmark-json", "machine": said, "date": self.data.get("datetime")}
        return run if isinstance(run, dict) else {}

    @property
    def where(self) -> str:
        """The machine and the date, in a line."""
        about = self.about
        said = [about.get("machine"), about.get("device"), about.get("date")]
        return "; ".join(str(text) for text in said if text)


def read(paths: Iterable[Path]) -> list[Result]:
    """Return the results of files, and of all .json and .jsonl files in folders, by name.

    Raises:
        ValueError: a file is no JSON, or there is none.
        OSError: it cannot be read.
    """
    found = []
    for path in paths:
        inside = sorted([*path.glob("*.json"), *path.glob("*.jsonl")]) if path.is_dir() else [path]
        found += [_read(file) for file in inside]
    if not found:
        raise ValueError("there is no .json or .jsonl file to report on")
    return found


def _read(file: Path) -> Result:
    try:
        text = file.read_text()
        whole = (
            {"rows": [json.loads(line) for line in text.splitlines() if line.strip()]}
            if file.suffix == ".jsonl"
            else json.loads(text)
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: it is no text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: it is no JSON ({error})") from error
    data = whole if isinstance(whole, dict) else {"rows": whole}
    return Result(file.stem, file, _kind(data), data)


def _kind(data: dict[str, Any]) -> str:
    rows = data.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    for kind, keys in KINDS.items():
        if all(key in data for key in keys):
            return kind
    return next((kind for kind, keys in ROW_KINDS.items() if all(key in first for key in keys)), "other")
