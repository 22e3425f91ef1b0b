"""Draw a call as ranks have recorded it with SPARSECOMM_TRACE: time from left to right, a row for each rank."""

from __future__ import annotations

import re
from pathlib import Path

from docs.drawings.svg import Canvas
from sparsecomm.tracing.events import Call, clock_offsets, messages, read

__all__ = ["draw"]

FILES = Path(__file__).parents[2] / "bench" / "results" / "trace"
_LEFT, _RIGHT, _TOP, _ROW, _BAR, _WIDTH = 70, 20, 74, 58, 24, 860
# The names of the parts in the legend. The colours are those of Okabe and Ito.
_PARTS = {
    "select": ("select", "#0072b2"),
    "code": ("pack, unpack", "#009e73"),
    "exchange": ("send and wait", "#b9bcc6"),
    "merge": ("merge, select again", "#d55e00"),
    "take-back": ("return to the residual", "#cc79a7"),
    "densify": ("dense result", "#e69f00"),
}
_STYLE = (
    "\n".join(f"    .{name} {{ fill: {colour}; }}" for name, (_, colour) in _PARTS.items())
    + "\n    path.message { stroke: #6b6b76; } .tip.message { fill: #6b6b76; }\n"
    "    @media (prefers-color-scheme: dark) { path.message { stroke: #d0d0d8; } .tip.message { fill: #d0d0d8; } }\n"
)


def draw() -> str:
    """Draw the last call of the files in ``bench/results/trace``."""
    ranks = read(sorted(FILES.glob("trace.?.json")))
    ahead = clock_offsets(ranks)
    lasts: dict[int, Call] = {number: next(iter(rank.calls.values()))[-1] for number, rank in ranks.items()}
    begin = min(call.start - ahead[rank].seconds for rank, call in lasts.items())
    end = max(call.parts[-1].end - ahead[rank].seconds for rank, call in lasts.items())
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)

    def x(seconds: float, rank: int) -> float:
        return round(_LEFT + scale * (seconds - ahead[rank].seconds - begin), 2)

    call = lasts[0]
    canvas = Canvas(f"call {call.number} on {len(ranks)} ranks", _STYLE)
    what = re.sub(r"\d{4,}", lambda digits: f"{int(digits[0]):,}", call.description.partition(", with")[0])
    canvas.text(_LEFT, 22, f"{what.replace('=', ' = ')}, on {len(ranks)} hosts", "head")
    left = float(_LEFT)
    for name, (shown, _) in _PARTS.items():
        canvas.box(left, 36, 12, 12, name)
        canvas.text(left + 17, 46, shown, "small")
        left += 31 + 6.4 * len(shown)
    bottom = _TOP + _ROW * len(ranks)
    for tick in range(int(1e3 * (end - begin)) // 10 + 1):
        at = _LEFT + scale * tick / 100
        canvas.line(at, _TOP - 12, at, bottom - 12, "lane")
        canvas.text(at, bottom + 4, f"{10 * tick} ms", "small middle")
    rows = {rank: _TOP + _ROW * row for row, rank in enumerate(lasts)}
    for rank, its in lasts.items():
        canvas.text(12, rows[rank] + 17, f"rank {rank}", "head")
        for part in its.parts:
            canvas.box(
                x(part.start, rank), rows[rank], max(0.6, x(part.end, rank) - x(part.start, rank)), _BAR, part.name
            )
    for message in messages(ranks):
        if any(message.received is part for part in lasts[message.receiver].parts):
            down = rows[message.receiver] > rows[message.sender]
            y0, y1 = rows[message.sender] + _BAR * down, rows[message.receiver] + _BAR * (not down)
            starts, ends = x(message.sent.start, message.sender), x(message.received.end, message.receiver)
            canvas.arrow(starts, y0, ends, y1, "message", 0.8)
    return canvas.svg(_WIDTH, bottom + 16)
