"""What error messages advise: the name that was probably meant, and the command that installs what is missing."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

__all__ = ["did_you_mean", "listed", "pip_install"]


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'butterfly'?", or "" if no known name is close to what was given."""
    near = difflib.get_close_matches(given, known, 1) if isinstance(given, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: Collection[str], max_names: int = 8) -> str:
    """Return names for a message: all, or the first and how many others there are; "nothing" for none."""
    shown = ", ".join(map(repr, islice(names, max_names)))
    return f"{shown} and {len(names) - max_names} others" if len(names) > max_names else shown or "nothing"


def pip_install(extra: str) -> str:
    """Return the shell command that installs what the ``extra`` of sparsecomm stands for.

    It names the checkout where the package is used from one, since an index may not have this version.
    """
    folder = Path(__file__).resolve().parent.parent
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install 'sparsecomm[{extra}]'"
