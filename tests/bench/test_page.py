"""The page of results: a section for every kind of file, no file besides it, and a source for every figure."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.page import html, results
from bench.page.html import Section
from bench.page.sections import SECTIONS

ROOT = Path(__file__).parents[2]
pytest.importorskip("matplotlib")


class Parsed(HTMLParser):
    """The tags of a page; fails if they do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(*files: Path) -> str:
    found = results.read(files)
    sections = [section for make in SECTIONS if (section := make(found)) is not None]
    return html.page("results", "all", sections)


def titles(text: str) -> list[str]:
    return re.findall(r"<h2 [^>]*>([^<]*)</h2>", text)


@pytest.mark.exhaustive
def test_what_is_in_the_repository(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "page.html"
    ran = subprocess.run(
        [sys.executable, "-m", "bench.page", "--out", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    text = out.read_text()
    parsed = Parsed(text)
    for subject in (
        "Where dense wins",
        "Time, bytes and messages against ranks",
        "Time against the rate",
        "Bytes of a step",
    ):
        assert any(title.startswith(subject) for title in titles(text))
    assert {"Accuracy against bytes", "Steps of training", "Kernels and calls on the CPU"} <= set(titles(text))
    for file in (ROOT / "bench" / "results").glob("*.json*"):
        assert file.name in text
    anchors = {its.get("id") for _, its in parsed.attributes}
    for tag, its in parsed.attributes:
        for key in ("href", "src"):
            if (link := its.get(key)) is not None:
                assert link.startswith("data:image/") or link.removeprefix("#") in anchors, (tag, link[:80])
        assert tag not in ("script", "link")
    pictures = [its for tag, its in parsed.attributes if tag == "img"]
    assert len(pictures) >= 8
    for its in pictures:
        assert its["alt"]
        source = str(its["src"])
        if source.startswith("data:image/svg"):
            assert b"<svg" in base64.b64decode(source.partition(",")[2])[:1000]


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
ERRORS = [
    {
        "model": "ResNet-20",
        "P": 4,
        "method": "ours",
        "algorithm": "tree",
        "wire": "plain",
        "emulated": 0.003,
        "simulated": 0.002,
        "error": -0.33,
        "error_of_step": -0.01,
    }
]
CELLS = [
    {
        "model": "ResNet-20",
        "method": method,
        "P": 64,
        "algorithm": "tree",
        "wire": "plain",
        "simulated": True,
        "link": {"alpha": 1e-4, "beta": 8e-9},
        "seconds": seconds,
        "formula": seconds,
    }
    for method, seconds in {"ours": 0.001, "gtopk": 0.002, "topk": 0.003, "dense": 0.01966}.items()
]


UTILISATION = {
    "rate": 5e7, "rtt": 0.08, "loss": 0.001, "method": "blocking", "H": 8, "utilisation": 0.437, "exchange_s": 0.3,
    "planned": 0.5, "sent": 1e6,
}  # fmt: skip
EXCHANGE = {
    "link": "a link",
    "n": 2_500_000,
    "exchange": "the first call",
    "this": [512.0, 500.0, 530.0],
    "target": 600,
}


@pytest.mark.parametrize(
    ("data", "expected", "said"),
    [
        ({"setting": {}, "runs": [], "rows": [UTILISATION]}, ["Links with delay and losses"], ">44<"),
        ({"run": {}, "calls": [EXCHANGE]}, ["Links with delay and losses"], "512"),
        ({"header": HEADER, "rows": bench_rows(breakdown_us=None)}, ["Time against size and density"], "4,321"),
        (
            {"header": HEADER, "rows": bench_rows(breakdown_us=PARTS)},
            ["Time against size and density", "Breakdown of a call"],
            "sparsecomm bench -x",
        ),
        ({"machine_info": {"machine": "vm"}, "benchmarks": [BENCHMARK]}, ["Benchmarks of pytest"], "test_it"),
        (
            {"command": "bench.gpu", "device": "A GPU", "rows": [{"what": "peer", "called_us": 9.0}, GPU]},
            ["Kernels on a GPU"],
            "A GPU",
        ),
        ({"command": "bench.paper", "rows": PAPER}, ["The gTop-k paper&#x27;s models"], "gTop-k, the paper&#x27;s way"),
        ({"command": "bench.paper.beyond", "work": {}, "errors": ERRORS, "cells": CELLS}, ["Beyond 32 ranks"], "19.66"),
        (
            {"command": "it", "tables": [{"P": 4, "speed": {"up": 2.5}}, {"P": 8, "speed": {"up": 3.5}}]},
            ["Other results"],
            "3.5",
        ),
    ],
    ids=["utilisation", "calls", "bench", "breakdown", "pytest", "gpu", "paper", "beyond", "other"],
)
def test_kinds(data: dict[str, Any], expected: list[str], said: str, tmp_path: Path) -> None:
    (file := tmp_path / "found.json").write_text(json.dumps(data))
    text = page(file)
    Parsed(text)
    assert titles(text) == [*expected, "Runs behind this page"]
    assert said in text


def test_names_are_escaped(tmp_path: Path) -> None:
    (file := tmp_path / "found.json").write_text(json.dumps({"command": "<script>", "rows": [{"a": "<b>"}]}))
    text = page(file)
    assert "<script>" not in text
    assert "&lt;b&gt;" in text


@pytest.mark.parametrize(("contents", "said"), [("{", "it is no JSON"), (None, "there is no .json")])
def test_refused(contents: str | None, said: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "broken.json").write_text(contents)
    with pytest.raises(ValueError, match=said):
        results.read([tmp_path])


def test_below_a_heading_pictures_come_before_tables() -> None:
    section = Section("Two")
    for number in (1, 2):
        section.heading(str(number))
        section.table([number], [("a", str)], f"table {number}")
        section.image(b"", "png", f"picture {number}")
    found = re.findall(r"<caption>(\w+ \d)|<figcaption>(\w+ \d)", section.html)
    assert ["".join(each) for each in found] == ["picture 1", "table 1", "picture 2", "table 2"]
