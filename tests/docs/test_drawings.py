"""The drawings of the documentation show what the algorithms do now."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.drawings.pictures import PICTURES, apart
from docs.drawings.timeline import holdings, timeline
from docs.drawings.traces import trace

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("name", PICTURES)
def test_drawings_are_up_to_date(name: str) -> None:
    drawn = PICTURES[name]()
    assert (IMAGES / f"{name}.svg").read_text() == drawn, "run: python -m docs.drawings --write"
    ElementTree.fromstring(drawn)


def test_a_trace_tells_steps_senders_and_amounts() -> None:
    found = trace(apart(4), 64, "butterfly")
    assert [(m.sent, m.sender, m.receiver, m.items) for m in found.messages] == [
        (step, rank, rank ^ 1 << step, 64) for step in range(2) for rank in range(4)
    ]
    states = holdings(found, [[frozenset([rank])] for rank in range(4)], lambda message: [0])
    assert states[1] == [[frozenset({0, 1})]] * 2 + [[frozenset({2, 3})]] * 2
    assert states[2] == [[frozenset(range(4))]] * 4


def test_phases_that_do_not_fit_are_refused() -> None:
    found = trace(apart(4), 64, "butterfly")
    with pytest.raises(ValueError, match="2 steps"):
        timeline(found, "butterfly", [(1, "only one")], [])


def test_every_drawing_is_shown_and_described() -> None:
    pages = "\n".join(page.read_text() for page in (IMAGES.parent).rglob("*.md"))
    described = dict(re.findall(r"!\[([^\]]{40,})\]\((?:\.\./)*images/([\w-]+)\.svg\)", pages))
    assert set(described.values()) == set(PICTURES) == {image.stem for image in IMAGES.glob("*.svg")}
