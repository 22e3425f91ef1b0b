"""Write SVG: a canvas with the colours of the documentation, light and dark.

A drawing brings its background along, so that it is legible on any page and on paper. The colours are those of Okabe
and Ito ("Color universal design", 2008), which people with any colour vision tell apart; shapes say the same again.
"""

from __future__ import annotations

import math
from html import escape

__all__ = ["Canvas"]

_STYLE = """
    .page { fill: #ffffff; } text { font: 13px system-ui, sans-serif; fill: #1b1b1f; } .small { font-size: 12px; }
    .head { font-weight: 600; } .middle { text-anchor: middle; } .end { text-anchor: end; }
    .lane { stroke: #c9c9d2; stroke-width: 1; } .band { fill: #f1f2f6; }
    .box { fill: #ffffff; stroke: #767684; stroke-width: 1; } .part { fill: #9cc9e8; } .whole { fill: #0072b2; }
    text.on { fill: #ffffff; } .rejected { fill: #fff3dc; stroke: #b86e00; stroke-width: 2; stroke-dasharray: 4 2; }
    .back { fill: #e2f4ec; stroke: #007a59; stroke-width: 2.5; }
    .border { stroke: #767684; stroke-width: 1.5; stroke-dasharray: 2 3; }
    .entries { stroke: #0072b2; } .dense { stroke: #d55e00; } .words { stroke: #6b6b76; stroke-dasharray: 5 4; }
    path { fill: none; } .tip.entries { fill: #0072b2; } .tip.dense { fill: #d55e00; }
    .tip.words { fill: #6b6b76; stroke-dasharray: none; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #1e2129; } text { fill: #e6e6ea; } .lane { stroke: #4a4d59; } .band { fill: #2a2e39; }
      .box { fill: #1e2129; stroke: #9a9aa8; } .part { fill: #2f6286; } .whole { fill: #56b4e9; }
      text.on { fill: #10131a; } .rejected { fill: #3a2f1b; stroke: #e69f00; }
      .back { fill: #173529; stroke: #2fc29a; }
      .entries { stroke: #56b4e9; } .dense { stroke: #e69f00; } .words { stroke: #a5a5b0; }
      .tip.entries { fill: #56b4e9; } .tip.dense { fill: #e69f00; } .tip.words { fill: #a5a5b0; }
    }
"""


class Canvas:
    """A drawing. Positions are pixels from the upper left corner."""

    def __init__(self, title: str, style: str = "") -> None:
        """Begin a drawing. ``style``: rules of CSS, besides those of all drawings."""
        self._title, self._style = title, _STYLE + style
        self._parts: list[str] = []

    def text(self, x: float, y: float, what: str, kind: str = "") -> None:
        """Write text from (x, y) on, the left end of its base line."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{_class(kind)}>{escape(what)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> None:
        """Draw a rectangle."""
        rounded = f' rx="{radius:g}"' if radius else ""
        where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f"<rect {where}{rounded}{_class(kind)}/>")

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str) -> None:
        """Draw a straight line."""
        self._parts.append(f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"{_class(kind)}/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float, kind: str, width: float = 1.5) -> None:
        """Draw an arrow to (x1, y1)."""
        length, tip = math.hypot(x1 - x0, y1 - y0), 5 + 1.5 * width
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        bx, by = x1 - tip * ux, y1 - tip * uy
        shaft = f'<path d="M{x0:.1f} {y0:.1f}L{bx:.1f} {by:.1f}" stroke-width="{width:g}"{_class(kind)}/>'
        ends = [(x1, y1), (bx - tip / 2.2 * uy, by + tip / 2.2 * ux), (bx + tip / 2.2 * uy, by - tip / 2.2 * ux)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        self._parts.append(f'{shaft}<polygon points="{points}"{_class(f"tip {kind}")}/>')

    def svg(self, width: float, height: float) -> str:
        """Return the drawing as a file of this size."""
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n  <title>{escape(self._title)}</title>'
        page = f'<rect width="{width:g}" height="{height:g}" rx="6" class="page"/>'
        return "\n  ".join([head, f"<style>{self._style}  </style>", page, *self._parts]) + "\n</svg>\n"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
