"""The style of plots: an algorithm keeps its colour, and every label of a time axis has a unit."""

from __future__ import annotations

import re

import pytest

from sparsecomm.algorithms import ALGORITHMS, inner_algorithms
from sparsecomm.cli import bench as plot
from sparsecomm.cli.outputs import pyplot, style

pytest.importorskip("matplotlib")


def test_algorithms_look_different() -> None:
    names = ["auto", *ALGORITHMS, *(f"hierarchical:{inner}" for inner in inner_algorithms()), "split:2"]
    looks = {repr(sorted(style(name).items())) for name in names}
    assert len(looks) == len(names)
    assert len({style(name)["color"] for name in ALGORITHMS}) == len({style(name)["marker"] for name in ALGORITHMS})
    assert style("of the user's")["color"] == style("of the user's")["color"]


def test_bench() -> None:
    """Narrow time ranges have labels with units; each density has a panel; dense has no wire format."""
    rows = [
        {
            "size_bytes": size,
            "density": density,
            "algorithm": algorithm,
            "wire": wire,
            "time_median_us": 3000 + size / 100,
        }
        for size in (4096, 65536)
        for density in (0.001, 0.01)
        for algorithm in ("dense", "tree")
        for wire in ("auto", "packed")
    ]
    figure = plot.draw({"ranks": 2, "machines": 1, "dtype": "float32", "mpi": "MPI"}, rows)
    figure.canvas.draw()
    panels = figure.axes
    assert [axes.get_title() for axes in panels] == ["density 0.001", "density 0.01"]
    for axes in panels:
        assert len(axes.lines) == 3  # one of dense, and two of tree
        assert [label.get_text() for label in axes.get_xticklabels()] == ["4 KiB", "64 KiB"]
    labels = [label.get_text() for label in panels[0].get_yticklabels(which="both") if label.get_text()]
    low, high = panels[0].get_ylim()
    shown = [text for text in labels if low <= float(text.split()[0]) / 1e3 <= high]
    assert len(shown) >= 1
    assert all(re.fullmatch(r"[\d.]+ (ms|us|s)", text) for text in labels)
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["dense", "tree", "wire format auto", "wire format packed"]
    pyplot().close(figure)
