"""The drawings and the numbers of docs/concepts/index.md agree with the algorithms."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import sparsecomm as sc
from docs.drawings.example import GRADIENTS, Example, K, worked_example
from docs.drawings.pictures import PICTURES
from docs.drawings.traces import trace

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "index.md").read_text()


@pytest.mark.parametrize("name", PICTURES)
def test_drawings_are_up_to_date(name: str) -> None:
    drawn = PICTURES[name]()
    assert (IMAGES / f"{name}.svg").read_text() == drawn, "run: python -m docs.drawings --write"
    ElementTree.fromstring(drawn)


def test_every_drawing_is_shown_and_described() -> None:
    pages = "\n".join(page.read_text() for page in (IMAGES.parent).rglob("*.md"))
    described = dict(re.findall(r"!\[([^\]]{40,})\]\((?:\.\./)*images/([\w-]+)\.svg\)", pages))
    assert set(described.values()) == set(PICTURES) == {image.stem for image in IMAGES.glob("*.svg")}


# -- the worked example ----------------------------------------------------------------------------------------------


def table(name: str) -> list[list[str]]:
    """Return the rows of a table of the page, without the heading."""
    text = re.search(rf"<!-- example: {name} -->\n((?:\|.*\n)+)", PAGE)
    assert text is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text[1].splitlines()[2:]]


def numbers(name: str) -> np.ndarray:
    return np.array([[float(cell) for cell in row[1:]] for row in table(name)])


def entries(cell: str) -> dict[int, float]:
    return {int(index): float(value) for index, value in (part.split(":") for part in cell.split(","))}


def of(vector: sc.SparseVector) -> dict[int, float]:
    return dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))


@pytest.fixture(scope="module")
def example() -> Example:
    return worked_example()


def test_gradients_and_selection(example: Example) -> None:
    np.testing.assert_array_equal(numbers("gradients"), [*GRADIENTS, GRADIENTS.sum(axis=0)])
    assert [entries(row[1]) for row in table("selected")] == [of(vector) for vector in example.selected]


def test_merges_and_result(example: Example) -> None:
    merges = [[f"rank {m.sender} to rank {m.rank}", of(m.total), of(m.kept), of(m.rejected)] for m in example.merges]
    assert [[row[0], *map(entries, row[1:])] for row in table("merges")] == merges
    assert all(entries(table("result")[0][1]) == of(result) for result in example.trace.results)


def test_residuals_and_conservation(example: Example) -> None:
    residuals, result = np.array(example.trace.residuals), example.trace.results[0].to_dense()
    total = residuals.sum(axis=0)
    np.testing.assert_array_equal(numbers("residuals"), [*residuals, total, result, total + result])
    np.testing.assert_array_equal(numbers("residuals")[-1], numbers("gradients")[-1])


def test_other_algorithms() -> None:
    seen = 0
    for call, result, _ in table("others"):
        for algorithm in re.findall(r'"(\w+)"', call):
            traced = trace(list(GRADIENTS), K, algorithm)
            assert all(of(total) == entries(result) for total in traced.results), call
            conserved = sum(traced.residuals) + traced.results[0].to_dense()
            np.testing.assert_array_equal(conserved, GRADIENTS.sum(axis=0))
            seen += 1
    assert seen == 5
