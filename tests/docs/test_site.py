"""The documentation site is built without a warning, and a browser loads nothing from other sites.

mkdocs itself warns of missing pages and of broken links and anchors.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
pytest.importorskip("mkdocs")
FETCHED = re.compile(
    r'<(?:link(?![^>]*rel="(?:canonical|next|prev)")|script|img|iframe|source)\b[^>]*(?:href|src)="(\S+?)"'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder


def test_nothing_is_loaded_from_other_sites(site: Path) -> None:
    fetched = {url for page in site.rglob("*.html") for url in FETCHED.findall(page.read_text())}
    assert any(url.endswith(".css") for url in fetched)
    assert any(url.endswith(".svg") for url in fetched)
    assert [url for url in fetched if re.match(r"(\w+:)?//", url)] == []
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert "url(http" not in styles
    assert "@import" not in styles


def test_the_site_has_no_python_files(site: Path) -> None:
    assert [file.name for file in site.rglob("*.py*")] == []


def test_the_search_finds_public_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {entry["title"] for entry in index["docs"]}
    assert any("sparse_allreduce" in title for title in titles)
    assert any("DistributedOptimizer" in title for title in titles)
