"""The parts of a call, for docs/concepts/index.md."""

from __future__ import annotations

from docs.drawings.svg import Canvas

__all__ = ["draw"]

_HEIGHT = 34


def draw() -> str:
    """Return the drawing: from gradient and residual to the result and the next residual."""
    canvas = Canvas("The parts of a sparse allreduce, on one rank")
    _box(canvas, 14, 14, 150, "gradient")
    _box(canvas, 266, 14, 150, "residual")
    _box(canvas, 140, 84, 150, "residual + gradient")
    _box(canvas, 14, 164, 220, "1. selection of k entries")
    _box(canvas, 14, 234, 220, "2. exchange: sums of all ranks")
    _box(canvas, 14, 304, 220, "3. result, the same on all ranks", "whole")
    _box(canvas, 300, 164, 116, "4. residual for", "part", 174)
    canvas.text(358, 202, "the next step", "small middle")
    for x in (89, 341):
        canvas.arrow(x, 14 + _HEIGHT, 215 + (x - 215) / 4, 83, "entries")
    canvas.arrow(180, 84 + _HEIGHT, 124, 163, "entries")
    canvas.text(58, 146, "k largest", "small")
    canvas.arrow(250, 84 + _HEIGHT, 340, 163, "entries")
    canvas.text(318, 146, "other entries", "small")
    for y in (164, 234):
        canvas.arrow(124, y + _HEIGHT, 124, y + 69, "entries")
    canvas.arrow(234, 234 + _HEIGHT / 2, 299, 234 + _HEIGHT / 2, "entries")
    canvas.text(267, 240, "not in", "small middle")
    canvas.text(267, 270, "the result", "small middle")
    return canvas.svg(430, 352)


def _box(
    canvas: Canvas, x: float, y: float, width: float, what: str, kind: str = "box", height: float = _HEIGHT
) -> None:
    """Draw a box with its name in the first line."""
    canvas.box(x, y, width, height, kind, 5)
    canvas.text(x + width / 2, y + 21, what, "small middle on" if kind == "whole" else "small middle")
