"""The page of results: a section for each file, with its command, its pictures and its tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from bench.page import results
from bench.page.__main__ import build, write_pages

ROOT = Path(__file__).parents[2]


def page(folder: Path, *files: Path) -> str:
    """Return the page of some files, after checking that its pictures exist."""
    pages = folder / "pages"
    pages.mkdir()
    write_pages(results.read(files), pages)
    text = (pages / "index.md").read_text()
    for alt, picture in re.findall(r"!\[(.*)\]\((.*)\)", text):
        assert alt
        assert (pages / picture).stat().st_size > 1000
    return text


@pytest.mark.exhaustive
def test_what_is_in_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "bench.page", "--out", str(tmp_path / "site")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    text = (tmp_path / "site" / "index.html").read_text()
    pictures = re.findall(r'<img alt="([^"]+)" src="([^"]+)"', text)
    assert len(pictures) > 30
    assert all((tmp_path / "site" / source).exists() for _, source in pictures)
    for file in (ROOT / "bench" / "results").glob("*.json*"):
        assert file.name in text
    for subject in ("Time of a whole step", "Time against density", "Time against rate", "messages against ranks"):
        assert any(subject in alt for alt, _ in pictures)


def bench_rows(**more: Any) -> list[dict[str, Any]]:
    times = dict.fromkeys(("time_min_us", "time_median_us", "time_p99_us", "time_max_us"), 12.5)
    sent = dict.fromkeys(("wire_bytes_per_rank", "sent_bytes_per_rank", "received_bytes_per_rank"), 4321)
    taken = {"algorithm_taken": "tree", "wire_taken": "packed", "wire": "auto", "wrong": None, "algbw_gb_per_s": 1.0}
    return [
        {
            "size_bytes": size,
            "count": size // 4,
            "k": 1,
            "density": density,
            "algorithm": name,
            **taken,
            **times,
            **sent,
            **more,
        }
        for size in (4096, 65536)
        for density in (0.001, 0.01, 0.1)
        for name in ("dense", "tree", "of the user's", "auto")
    ]


PARTS = dict.fromkeys(("select", "exchange", "merge", "code", "take-back", "densify", "other"), 1.5)
HEADER = {
    "command": "sparsecomm bench -x",
    "ranks": 2,
    "machines": 1,
    "dtype": "float32",
    "device": "cpu",
    "mpi": "MPI",
}
BENCHMARK = {"name": "test_it", "stats": {"min": 1e-6, "median": 2e-6, "iqr": 1e-7, "rounds": 3}, "extra_info": {}}
GPU = {"what": "top-k", "called_us": 30.0, "replayed_us": 22.0, "floor_us": 20.0, "quartiles_us": [21.0, 23.0]}


PAPER = [
    {
        "model": "ResNet-20",
        "method": method,
        "P": 32,
        "algorithm": "tree",
        "wire": "plain",
        "slowdown": 32.0,
        "n": 270_000,
        "k": 270,
        "rate": 3e7,
        "compute": 0.139,
        "steps": [0.5],
        "exchange": [0.3],
        "sent": 4512.0,
        "busy": 0.5,
        "parts": dict.fromkeys(("select", "exchange", "merge"), 0.1),
        "alone": {"select": 0.001},
    }
    for method in ("ours", "gtopk", "topk", "dense")
]


@pytest.mark.parametrize(
    ("data", "pictures", "text"),
    [
        (
            {"header": HEADER, "rows": bench_rows(breakdown_us=None)},
            ["Time against size", "Time against density"],
            "4,321",
        ),
        (
            {"header": HEADER, "rows": bench_rows(breakdown_us=PARTS)},
            ["Time against size", "Time against density", "Parts of a call"],
            "sparsecomm bench -x",
        ),
        ({"machine_info": {"machine": "vm"}, "benchmarks": [BENCHMARK]}, [], "test_it"),
        (
            {"command": "bench.gpu", "device": "A GPU", "rows": [{"what": "peer", "called_us": 9.0}, GPU]},
            ["Time over floor"],
            "A GPU",
        ),
        ({"command": "bench.paper", "rows": PAPER}, ["Throughput"], "gtopk"),
        ({"run": {}, "hook": {"added_ms": {"tensor": [1.0, 2.0, 3.0]}}}, ["Time"], "found"),
        ({"command": "it", "tables": [{"P": 4, "speed": {"up": 2.5}}, {"P": 8, "speed": {"up": 3.5}}]}, [], "3.5"),
    ],
    ids=["bench", "breakdown", "pytest", "gpu", "paper", "hook", "other"],
)
def test_kinds(data: dict[str, Any], pictures: list[str], text: str, tmp_path: Path) -> None:
    (file := tmp_path / "found.json").write_text(json.dumps(data))
    found = page(tmp_path, file)
    assert re.findall(r"!\[(.*): found\]", found) == pictures
    assert text in found


def test_tables_beside_the_file_are_shown(tmp_path: Path) -> None:
    (file := tmp_path / "found.json").write_text(json.dumps({"command": "it", "rows": [{"a": 1}]}))
    file.with_suffix(".txt").write_text("# it\na table")
    assert "    a table" in page(tmp_path, file)


def test_names_are_escaped(tmp_path: Path) -> None:
    pytest.importorskip("material")
    data = {"command": "<script>", "rows": [{"a": "<b>"}, {"a": "x|y"}]}
    (file := tmp_path / "found.json").write_text(json.dumps(data))
    page(tmp_path, file)
    build(tmp_path / "pages", tmp_path / "site")
    text = (tmp_path / "site" / "index.html").read_text()
    assert "<b>" not in text
    assert re.search("&lt;script&gt;", text)
    assert "<td>x&#124;y</td>" in text


@pytest.mark.parametrize(("contents", "error"), [("{", "it is not JSON"), (None, "there is no .json")])
def test_refused(contents: str | None, error: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "broken.json").write_text(contents)
    with pytest.raises(ValueError, match=error):
        results.read([tmp_path])
