"""The files that commands write with ``--json`` and ``--plot``, checked before anything else is done; JSON text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sparsecomm.cli.plots import check_matplotlib
from sparsecomm.errors import InvalidInputError

__all__ = ["PLOTS", "check_writable", "json_and_plot", "json_text"]

PLOTS = ("png", "pdf", "svg")


def json_and_plot(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Return the files that ``--json`` and ``--plot`` name; ``None`` for an option that was not given.

    Raises:
        InvalidInputError: a plot cannot be drawn, or both are one file.
    """
    figures, plot = (Path(name) if name else None for name in (arguments.json, arguments.plot))
    if plot is not None and plot.suffix[1:].lower() not in PLOTS:
        raise InvalidInputError(f"--plot {plot}: expected a file name that ends in .{', .'.join(PLOTS)}")
    if plot is not None:
        check_matplotlib("--plot")
    if plot is not None and plot == figures:
        raise InvalidInputError(f"--json and --plot: both are {plot}; expected two files")
    return figures, plot


def check_writable(*paths: Path | None) -> None:
    """Check that files can be written. One that exists keeps its contents.

    Raises:
        InvalidInputError: one cannot.
    """
    for path in filter(None, paths):
        existed = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from error
        if not existed:
            path.unlink()


def json_text(data: dict[str, Any]) -> str:
    """Return ``data`` as JSON with a line for each key, and for each row where a value is a list of rows."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in data.items()) + "\n}\n"
