"""Hooks of mkdocs: the changes that the documentation site makes to the pages in docs/.

- A page shows a plot by its place in the checkout, ``../../bench/results/x.png``. The site has a copy of it in
  ``results/``. Other files outside docs/ are linked to in the repository.
- A table of the reference is followed by the docstrings of its names, which link to each other.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "bench" / "results"
sys.path.insert(0, str(DOCS))
from links import absolute, repository  # noqa: E402
from reference import ENTRIES, entries_of, with_docstrings  # noqa: E402

PLOT = re.compile(r"(?<=\]\()((?:\.\./)*)\.\./bench/results/(?=[^)\s]+\.(?:png|svg)\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository at the foot of each page."""
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": repository(), "name": "Source code"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the plots to the files of the site."""
    for plot in sorted([*RESULTS.glob("*.png"), *RESULTS.glob("*.svg")]):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to plots at the copies, and links to other files outside docs/ at the repository. Add docstrings."""
    markdown = with_docstrings(markdown)
    return absolute(PLOT.sub(r"\1results/", markdown), Path(page.file.abs_src_path or DOCS), keep=DOCS)


NAME = re.compile(r"(?<!<pre>)<code>((?:sparsecomm\.)?(?:(?:torch|jax|patches)\.)?\w+(?:\.\w+)?)</code>")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link public names in the reference."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    entries = _entries(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        name, _, member = match[1].rpartition("sparsecomm.")[2].partition(".")
        if name in ("torch", "jax", "patches") or name not in entries:
            return match[0]
        identifier = f"{entries[name]}.{member}" if member else entries[name]
        return f'<autoref optional identifier="{identifier}">{match[0]}</autoref>'

    return NAME.sub(link, html)


def _entries(own: str) -> dict[str, str]:
    """Return the paths of names on a page: those of its own entries, and of the package's entries on other pages."""
    package = [path for paths in ENTRIES.values() for path in paths if path.count(".") == 1]
    here = entries_of((DOCS / own).read_text())
    return {path.rpartition(".")[2]: path for path in [*package, *here]}
