"""The worked example of docs/concepts/index.md: a call of `tree` on 4 ranks, and its drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import sparsecomm as sc
from docs.drawings.svg import Canvas
from docs.drawings.traces import Trace, trace

__all__ = ["GRADIENTS", "Example", "Merge", "draw", "worked_example"]

GRADIENTS = np.array(
    [[5, 1, 0, 4, 0, 2, 0, -1], [1, 0, 2, 3, 0, 4, -2, 0], [0, 2, 1, 1, -1, 6, 0, 0], [2, 0, 0, -1, 1, 3, -4, 2]],
    np.float32,
)
K = 2

_CELL, _LEFT, _TOP, _HEIGHT, _GAP = 38.0, 92.0, 12.0, 24.0, 6.0


@dataclass(frozen=True)
class Merge:
    """What a rank makes of its entries and those that it receives."""

    rank: int
    sender: int
    total: sc.SparseVector
    kept: sc.SparseVector
    rejected: sc.SparseVector


@dataclass(frozen=True)
class Example:
    """The call, step by step.

    Attributes:
        selected: by rank.
        merges: in order.
        trace: with the result and the residuals after the call.
    """

    selected: list[sc.SparseVector]
    merges: list[Merge]
    trace: Trace


def worked_example() -> Example:
    """Make the call, and return what happened in it."""
    recorded = trace(list(GRADIENTS), K, "tree")
    selected = [sc.topk(x, K) for x in GRADIENTS]
    merges, held, n = [], list(selected), GRADIENTS.shape[1]
    for message in recorded.messages[: len(GRADIENTS) - 1]:  # on the way to rank 0
        mine = held[message.receiver]
        total = sc.merge_topk(mine, sc.SparseVector(message.indices, message.values, size=n), n)
        held[message.receiver] = kept = sc.merge_topk(total, sc.SparseVector([], np.zeros(0, np.float32), size=n), K)
        rejected = sc.topk(total.to_dense() - kept.to_dense(), n)
        merges.append(Merge(message.receiver, message.sender, total, kept, rejected))
    return Example(selected, merges, recorded)


def draw() -> str:
    """Return the drawing: what is selected, added, rejected, returned and kept back."""
    example = worked_example()
    canvas, y = Canvas("A sparse allreduce of 4 ranks, by hand"), _TOP
    n = GRADIENTS.shape[1]
    for index in range(n):
        canvas.text(_LEFT + _CELL * (index + 0.5), y + 12, str(index), "small middle")
    canvas.text(_LEFT - 10, y + 12, "index", "small end")
    y = _heading(canvas, y + 20, "1. Every rank selects its 2 largest entries")
    for rank, (x, selected) in enumerate(zip(GRADIENTS, example.selected, strict=True)):
        y = _strip(canvas, y, f"rank {rank}", _values(x), dict.fromkeys(selected.indices.tolist(), "whole"))
    y = _heading(canvas, y, "2. Partial sums: the 2 largest are kept")
    for merge in example.merges:
        marks = dict.fromkeys(merge.kept.indices.tolist(), "whole")
        marks |= dict.fromkeys(merge.rejected.indices.tolist(), "rejected")
        y = _strip(canvas, y, f"{merge.sender} \N{RIGHTWARDS ARROW} {merge.rank}", _entries(merge.total), marks)
    y = _heading(canvas, y, "3. All ranks receive the result")
    result = example.trace.results[0]
    y = _strip(canvas, y, "result", _entries(result), dict.fromkeys(result.indices.tolist(), "whole"))
    y = _heading(canvas, y, "4. Residuals keep all other entries")
    dropped: dict[int, set[int]] = {merge.rank: set() for merge in example.merges}
    for merge in example.merges:
        dropped[merge.rank] |= set(merge.rejected.indices.tolist()) & set(result.indices.tolist())
    for rank, residual in enumerate(example.trace.residuals):
        back = set(example.selected[rank].indices.tolist()) - set(result.indices.tolist())
        marks = dict.fromkeys(back, "back") | dict.fromkeys(dropped.get(rank, ()), "rejected")
        y = _strip(canvas, y, f"rank {rank}", _values(residual), marks)
    y += 8
    x = _LEFT - 60.0
    for kind, what in (("whole", "selected, kept"), ("rejected", "rejected, stays"), ("back", "taken back")):
        canvas.box(x, y, 18, 14, kind, 3)
        canvas.text(x + 24, y + 12, what, "small")
        x += 140
    return canvas.svg(_LEFT + _CELL * n + 14, y + 14 + _TOP)


def _heading(canvas: Canvas, y: float, what: str) -> float:
    canvas.box(4, y + 4, _LEFT + _CELL * GRADIENTS.shape[1] + 6, 20, "band", 3)
    canvas.text(10, y + 18, what, "small head")
    return y + 24 + _GAP


def _strip(canvas: Canvas, y: float, name: str, values: Mapping[int, float], marks: Mapping[int, str]) -> float:
    """Draw a vector: cells with values, some of them marked."""
    canvas.text(_LEFT - 10, y + 17, name, "small end")
    for index in range(GRADIENTS.shape[1]):
        mark, x = marks.get(index, ""), _LEFT + _CELL * index
        canvas.box(x + 1.5, y + 1, _CELL - 3, _HEIGHT - 2, mark or "box", 3)
        if index in values:
            style = " on head" if mark == "whole" else " head" if mark else ""
            text = f"{values[index]:g}".replace("-", "\N{MINUS SIGN}")
            canvas.text(x + _CELL / 2, y + 16.5, text, f"middle{style}")
    return y + _HEIGHT + _GAP


def _values(x: np.ndarray) -> dict[int, float]:
    return dict(enumerate(x.tolist()))


def _entries(vector: sc.SparseVector) -> dict[int, float]:
    return dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
