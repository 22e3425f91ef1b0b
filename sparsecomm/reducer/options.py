"""The options of a `Reducer`, for functions that only pass them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from sparsecomm.calls.options import CallOptions
from sparsecomm.reducer.layout import Scope
from sparsecomm.reducer.momentum import Clip

__all__ = ["OnStep", "ReducerOptions"]

OnStep: TypeAlias = Callable[[int, dict[str, float]], None]


class ReducerOptions(CallOptions, total=False):
    """Keyword arguments of `sparsecomm.Reducer`, which documents them and has their defaults."""

    scope: Scope
    chunk: int
    bucket_bytes: int | None
    reorder: bool
    dense_below: int
    momentum: float
    nesterov: bool
    masking: bool
    clip: Clip
    decay: float
    on_step: OnStep | None
