"""Files that commands write besides: what may be asked for, checked before anything else is done."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from sparsecomm.errors import InvalidInputError

__all__ = ["PLOTS", "check_writable", "json_and_plot"]

PLOTS = ("png", "pdf", "svg")


def json_and_plot(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The files that ``--json`` and ``--plot`` name.

    Raises:
        InvalidInputError: a plot cannot be drawn, or both are one file.
    """
    json, plot = (Path(name) if name else None for name in (arguments.json, arguments.plot))
    if plot is not None and plot.suffix[1:].lower() not in PLOTS:
        raise InvalidInputError(f"--plot {plot}: expected a file name that ends in .{', .'.join(PLOTS)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidInputError("--plot: needs matplotlib: pip install sparsecomm[bench]")
    if plot is not None and plot == json:
        raise InvalidInputError(f"--json and --plot: both are {plot}; expected two files")
    return json, plot


def check_writable(*paths: Path | None) -> None:
    """Refuse a file that cannot be written; one that exists keeps its contents for now."""
    for path in filter(None, paths):
        existed = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from error
        if not existed:
            path.unlink()
