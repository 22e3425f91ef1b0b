"""The options of a `Reducer`: for functions that only pass them on, and as it has checked them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sparsecomm.calls.options import CallOptions, Options
from sparsecomm.reducer.momentum import Clip, MomentumCorrection
from sparsecomm.reducer.schedule import Schedule

__all__ = ["FILLED", "SCOPES", "OnStep", "ReducerOptions", "Scope", "Settings"]

Scope: TypeAlias = Literal["tensor", "bucket", "model", "chunk"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
FILLED = ("bucket", "chunk")  # scopes whose buckets are filled to a number of bytes
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


@dataclass(frozen=True)
class Settings:
    """Checked arguments of a `sparsecomm.Reducer`, which describes them.

    Attributes:
        chunk: elements of a chunk, for a scope of chunks; otherwise ``None``.
        reorder: also false for a scope in which the order does not matter.
    """

    density: Schedule
    options: Options
    correction: MomentumCorrection
    scope: str
    chunk: int | None
    dense_below: int
    bucket_bytes: int | None
    reorder: bool
    skip_nonfinite: bool
