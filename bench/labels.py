"""Texts beside the points of a plot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Label", "label_points"]


class Label(NamedTuple):
    """A text beside a point of a plot, in data coordinates."""

    x: float
    y: float
    text: str
    color: str = "black"


def label_points(axes: Any, labels: Sequence[Label], size: float = 8) -> None:
    """Write labels beside their points, where they hide no other label and few points.

    Call it last: it depends on the limits and the size of the axes.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # computes the layout
    pixels, frame = figure.dpi / 72, axes.get_window_extent()
    dots = []
    for line in axes.lines:
        ends = line.get_transform().transform(line.get_xydata())
        dots += list(ends)
        if line.get_linestyle() != "None":
            for before, after in itertools.pairwise(ends):
                dots += [before + (after - before) * j / 40 for j in range(1, 40)]
    boxes: list[tuple[float, float, float, float]] = []
    for label in sorted(labels, key=lambda label: -label.y):
        x, y = axes.transData.transform((label.x, label.y))
        width, height = 0.58 * size * len(label.text) * pixels, 1.3 * size * pixels
        best, lowest = None, math.inf
        for distance, side in itertools.product((0, 0.7, -0.7, 1, -1, 1.5, -1.5, 2, -2, 3, -3), (1, -1, 0)):
            left = x + (side * 8 * pixels if side >= 0 else -8 * pixels - width) - (width / 2 if side == 0 else 0)
            bottom = y - height / 2 + distance * height
            box = left, bottom, left + width, bottom + height
            outside = box[0] < frame.x0 or box[2] > frame.x1 or box[1] < frame.y0 or box[3] > frame.y1
            hidden = sum(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes)
            on = sum(box[0] < dot[0] < box[2] and box[1] < dot[1] < box[3] for dot in dots)
            if (cost := 1000 * outside + 100 * hidden + 2 * on + 2 * abs(distance) + (side != 1)) < lowest:
                best, lowest = box, cost
        assert best is not None
        boxes.append(best)
        at = (best[0] - x) / pixels, ((best[1] + best[3]) / 2 - y) / pixels
        place = {"xytext": at, "textcoords": "offset points", "va": "center", "ha": "left"}
        axes.annotate(label.text, (label.x, label.y), **place, color=label.color, fontsize=size).set_in_layout(False)
