"""The drawings of the documentation show what the algorithms do now."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.drawings.pictures import PICTURES

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("name", PICTURES)
def test_drawings_are_up_to_date(name: str) -> None:
    drawn = PICTURES[name]()
    assert (IMAGES / f"{name}.svg").read_text() == drawn, "run: python -m docs.drawings --write"
    ElementTree.fromstring(drawn)


def test_every_drawing_is_shown_and_described() -> None:
    pages = "\n".join(page.read_text() for page in (IMAGES.parent).rglob("*.md"))
    described = dict(re.findall(r"!\[([^\]]{40,})\]\((?:\.\./)*images/([\w-]+)\.svg\)", pages))
    assert set(described.values()) == set(PICTURES) == {image.stem for image in IMAGES.glob("*.svg")}
