"""Hooks of mkdocs: the changes that the documentation site makes to the pages in docs/.

- A page shows a plot by its place in the checkout, ``../../bench/results/x.png``. The site has a copy of it in
  ``results/``. Other files outside docs/ are linked to in the repository.
- A docstring names what it speaks of, `sparse_allreduce`. In the reference that is a link.
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
    """Point links to plots at the copies, and links to other files outside docs/ at the repository."""
    return absolute(PLOT.sub(r"\1results/", markdown), Path(page.file.abs_src_path or DOCS), keep=DOCS)


NAME = re.compile(r"(?<!<pre>)<code>((?:sparsecomm\.)?(?:(?:torch|jax|patches)\.)?\w+(?:\.\w+)?)</code>")
ENTRY = re.compile(r"^::: (sparsecomm\.(?:torch\.|jax\.|patches\.|api\.)?(\w+))$", re.MULTILINE)


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
    """Return where names lead on a page: what it lists itself, and what is listed of the package elsewhere."""
    listed = {file: ENTRY.findall(file.read_text()) for file in (DOCS / "reference").glob("*.md")}
    package = {name: path for entries in listed.values() for path, name in entries if path == f"sparsecomm.{name}"}
    return package | {name: path for path, name in listed[DOCS / own]}
