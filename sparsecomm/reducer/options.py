"""The options of a `Reducer`: for functions that only pass them on, and as it has checked them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from sparsecomm.calls.options import CallOptions, Options
from sparsecomm.reducer.layout import Scope
from sparsecomm.reducer.momentum import Clip, MomentumCorrection
from sparsecomm.reducer.schedule import Schedule

if TYPE_CHECKING:
    from sparsecomm.reducer.bucket import TensorSpec

__all__ = ["OnStep", "ReducerOptions", "Settings"]

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
        specs: of the tensors, by name.
        chunk: elements of a chunk, for a scope of chunks; otherwise ``None``.
        reorder: also false for a scope in which the order does not matter.
    """

    specs: dict[str, TensorSpec]
    density: Schedule
    options: Options
    correction: MomentumCorrection
    scope: str
    chunk: int | None
    dense_below: int
    bucket_bytes: int | None
    reorder: bool
    skip_nonfinite: bool
