"""The page of results: a section for each file, with its command, its pictures and its tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from bench.page import read, write

ROOT = Path(__file__).parents[2]


IMAGE = re.compile(r'<img alt="([^"]+)" src="([^"]+)"')


def page(folder: Path, *files: Path) -> str:
    """Return the page of some files, after checking that its pictures exist."""
    write(read(files), folder / "site")
    text = (folder / "site" / "index.html").read_text()
    assert all((folder / "site" / source).stat().st_size > 1000 for _, source in IMAGE.findall(text))
    return text


@pytest.mark.exhaustive
def test_results_in_the_repository(tmp_path: Path) -> None:
    text = page(tmp_path, ROOT / "bench" / "results")
    for file in (ROOT / "bench" / "results").glob("*.json*"):
        assert file.name in text
    for subject in ("Time of a whole step", "messages against ranks"):
        assert any(subject in alt for alt, _ in IMAGE.findall(text))


PARTS = dict.fromkeys(("select", "exchange", "merge", "code", "take-back", "densify", "other"), 1.5)
HEADER = {"command": "sparsecomm bench -x", "ranks": 2, "machines": 1, "dtype": "float32", "mpi": "MPI"}
ROWS: list[dict[str, Any]] = [
    {
        "size_bytes": size,
        "density": density,
        "algorithm": name,
        "wire": "auto",
        "wire_taken": "packed",
        "time_median_us": 12.5,
        "sent_bytes_per_rank": 4321,
        "breakdown_us": PARTS,
    }
    for size in (4096, 65536)
    for density in (0.001, 0.01, 0.1)
    for name in ("dense", "tree", "of the user's", "auto")
]


@pytest.mark.parametrize(
    ("data", "pictures", "text"),
    [
        ({"header": HEADER, "rows": ROWS}, ["Time against size", "Parts of a call"], "sparsecomm bench -x"),
        (
            {"header": HEADER, "rows": [row | {"breakdown_us": None} for row in ROWS[:4]]},
            ["Time against size"],
            "4,321",
        ),
        ({"command": "it", "tables": [{"P": 4, "speed": {"up": 2.5}}, {"P": 8, "speed": {"up": 3.5}}]}, [], "3.5"),
    ],
    ids=["bench", "without parts", "other"],
)
def test_kinds(data: dict[str, Any], pictures: list[str], text: str, tmp_path: Path) -> None:
    (file := tmp_path / "curves.json").write_text(json.dumps(data))
    html = page(tmp_path, file)
    assert re.findall(r'<img alt="(.*): curves"', html) == pictures
    assert text in html


def test_tables_beside_the_file_are_shown(tmp_path: Path) -> None:
    (file := tmp_path / "curves.json").write_text(json.dumps({"command": "it", "rows": [{"a": 1}]}))
    file.with_suffix(".txt").write_text("# it\na table")
    assert "a table</pre>" in page(tmp_path, file)


def test_names_are_escaped(tmp_path: Path) -> None:
    (file := tmp_path / "curves.json").write_text(json.dumps({"command": "<script>", "rows": [{"a": "<b>"}]}))
    text = page(tmp_path, file)
    assert "<b>" not in text
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(("contents", "error"), [("{", "it is not JSON"), (None, "there is no .json")])
def test_refused(contents: str | None, error: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "broken.json").write_text(contents)
    with pytest.raises(ValueError, match=error):
        read([tmp_path])
