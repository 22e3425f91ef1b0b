"""Make links to files of the checkout absolute, for the site and for the description of a release.

Pages link by relative paths, which work wherever the repository is read. Only pyproject.toml contains its address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["absolute", "repository"]

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?![\w+.-]+:|[#/])(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
IMAGES = (".png", ".svg")


def repository() -> str:
    """Return the address of the repository."""
    match = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def absolute(markdown: str, page: Path, keep: Path | None = None) -> str:
    """Return the text of a page with absolute links to all files of the checkout but those in the folder ``keep``."""

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match["path"]))
        if not target.exists() or not target.is_relative_to(ROOT) or (keep and target.is_relative_to(keep)):
            return match[0]
        kind = "raw" if target.suffix in IMAGES else "tree" if target.is_dir() else "blob"
        return f"{repository()}/{kind}/main/{target.relative_to(ROOT).as_posix()}{match['anchor'] or ''}"

    return LINK.sub(link, markdown)
