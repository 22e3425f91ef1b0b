"""Plots of bench/results in the documentation site, which is built from docs/ alone.

A page shows a plot by its place in the checkout, ``../../bench/results/x.png``, which works wherever the repository is
read. The site has a copy of it in ``results/``.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RESULTS = Path(__file__).parent.parent / "bench" / "results"
LINK = re.compile(r"(?<=\]\()((?:\.\./)*)\.\./bench/results/(?=[^)\s]+\.(?:png|svg)\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the plots to the files of the site."""
    for plot in sorted([*RESULTS.glob("*.png"), *RESULTS.glob("*.svg")]):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to plots at the copies."""
    return LINK.sub(r"\1results/", markdown)
