"""Bar charts of results that benchmarks recorded in bench/results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.drawings.svg import Canvas
from sparsecomm.quantities import number_text

__all__ = ["bits_per_change", "comparison", "selection_on_a_gpu", "step_of_adamw", "step_with_ddp"]

RESULTS = Path(__file__).parents[2] / "bench" / "results"
_LABELS, _LENGTH, _ROW = 210, 290, 30  # pixels


def step_of_adamw() -> str:
    """Draw the times of a training step: `python -m bench.training adamw`."""
    milliseconds = {name: times[1] for name, times in _read("training-adamw-4-1gbit")["adamw"]["ms"].items()}
    rows = [
        ("computation alone", milliseconds["computation alone"], "box"),
        ("dense AdamW, gloo", milliseconds["gloo, dense"], "part"),
        ("SparseAdamW", milliseconds["SparseAdamW, over gloo"], "whole"),
        ("SparseAdamW, overlap=True", milliseconds["SparseAdamW, overlap, over gloo"], "whole"),
    ]
    return _bars("Step of 11.5M weights on 4 ranks, links of 1 Gb/s", rows, "ms")


def step_with_ddp() -> str:
    """Draw the times of a training step with DDP: `python -m bench.training ddp`."""
    milliseconds = {name: times[1] for name, times in _read("training-ddp-4-1gbit")["ddp"]["ms"].items()}
    kinds = {"computation alone": "box", "gloo, dense": "part", "gloo, float16": "part"}
    rows = [(name, time, kinds.get(name, "whole")) for name, time in milliseconds.items()]
    return _bars("Step of 11.5M weights with DDP on 4 ranks, links of 1 Gb/s", rows, "ms")


def comparison() -> str:
    """Draw the times of whole sums by each algorithm and each baseline: `python -m bench.compare`."""
    results = sorted(_read("slow-8-1gbit")["times"], key=lambda row: row["step_ms"])
    rows = [(row["name"], row["step_ms"], "whole" if row["ours"] else "part") for row in results]
    return _bars("Sum of 25.6M elements on 8 ranks, density 0.001, links of 1 Gb/s", rows, "ms")


def selection_on_a_gpu() -> str:
    """Draw the times of selections on a GPU: `python -m bench.gpu`."""
    times = {row["what"]: row.get("replayed_us") or row["called_us"] for row in _read("gpu")["rows"]}
    size = "n = 25.6M, density 0.001"
    rows = [
        ("torch.topk", times[f"torch.topk(x.abs(), k), {size}"], "part"),
        ("sparsecomm, top-k", times[f"top-k, {size}"], "whole"),
        ("PyTorch, error feedback", times[f"the same with a residual, {size}"], "part"),
        ("sparsecomm, error feedback", times[f"residual + x and top-k, {size}"], "whole"),
    ]
    return _bars("Selecting 25,600 of 25.6M gradients on one H200", rows, "us")


def bits_per_change() -> str:
    """Draw the bits of a changed weight: `python -m bench.patches trained`."""
    row = next(r for r in _read("patches")["trained"]["rows"] if (r["rate"], r["steps"]) == (1e-6, 1))
    rows = [
        ("index and value", row["pairs"], "part"),
        ("index differences, zstd", row["grail"], "part"),
        ("patch", row["patch"], "whole"),
    ]
    return _bars(f"Bits per changed bfloat16 weight; {row['changed']:.1%} change", rows, "bits")


def _read(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


def _bars(title: str, rows: Sequence[tuple[str, float, str]], unit: str) -> str:
    """Return horizontal bars, each with its label and value. A row has a label, a value and a kind of box."""
    canvas, longest = Canvas(title), max(value for _, value, _ in rows)
    canvas.text(14, 26, title, "head")
    for number, (label, value, kind) in enumerate(rows):
        y = 44 + _ROW * number
        canvas.text(_LABELS - 10, y + 16, label, "small end")
        canvas.box(_LABELS, y, value / longest * _LENGTH, _ROW - 8, kind, 2)
        shown = number_text(value, 3 if value >= 100 else 2)
        canvas.text(_LABELS + value / longest * _LENGTH + 6, y + 16, f"{shown} {unit}", "small")
    return canvas.svg(_LABELS + _LENGTH + 80, 52 + _ROW * len(rows))
