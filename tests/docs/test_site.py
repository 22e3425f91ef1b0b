"""The documentation site: built without a warning, whole, and without a need for any other site."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
pytest.importorskip("mkdocs")


class Page(HTMLParser):
    """What a page of the site refers to.

    Attributes:
        links: targets of links.
        loaded: what a browser fetches to show the page.
        anchors: places that links may name.
        text: everything that is read.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.text = file.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.loaded.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_every_page_of_docs_is_there(site: Path, pages: dict[Path, Page]) -> None:
    written = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert {file.relative_to(site) for file in pages} == written


def test_links_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in [*page.links, *page.loaded]:
            path, anchor = urldefrag(link)
            if urlsplit(link).scheme:
                continue
            target = (file.parent / unquote(path)).resolve() if path else file
            known = pages[target].anchors if target in pages else {""}
            if not target.exists() or (anchor and unquote(anchor) not in known):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    fetched = {name for page in pages.values() for name in page.loaded if urlsplit(name).netloc}
    assert fetched == set()
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert "url(http" not in styles
    assert "@import" not in styles


def test_the_search_finds_public_names(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())
    titles = {entry["title"] for entry in found["docs"]}
    assert any("sparse_allreduce" in title for title in titles)
    assert any("DistributedOptimizer" in title for title in titles)


def test_public_names_have_an_entry_with_a_docstring(pages: dict[Path, Page]) -> None:
    jax, torch = pytest.importorskip("sparsecomm.jax"), pytest.importorskip("sparsecomm.torch")
    import sparsecomm

    anchors = set().union(*(page.anchors for page in pages.values()))
    for module in (sparsecomm, torch, jax):
        names = {f"{module.__name__}.{name}" for name in module.__all__ if not name.startswith("__")}
        assert names <= anchors
