"""The tutorials of docs/extending do what they say: each is followed, word for word, in a copy of the sources."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import Runner
from tests.processes import ROOT

PAGES = sorted((ROOT / "docs" / "extending").glob("*.md"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("sparsecomm", "tests", "bench"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.stem == "framework" else pytest.mark.exhaustive) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_tutorial_does_what_it_says(page: Path, checkout: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    runner = Runner(checkout, {**os.environ, "PATH": path, "PYTHONPATH": ""})
    runner.run_pages(page)
    assert runner.ran
    assert not runner.left_out
