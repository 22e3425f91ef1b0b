"""The options of a `Reducer`, and the recommended setting of a training, to which every way to train defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

from sparsecomm.algorithms import AlgorithmName
from sparsecomm.calls.options import CallOptions, Options
from sparsecomm.reducer.momentum import Clip, MomentumCorrection
from sparsecomm.reducer.schedule import Schedule, Warmup
from sparsecomm.wire import MEAN_OF_CONTRIBUTORS, WireName

__all__ = [
    "ALGORITHM",
    "DENSITY",
    "FILLED",
    "SCOPES",
    "WIRE",
    "OnStep",
    "ReducerOptions",
    "Scope",
    "Settings",
    "training_options",
]

# The recommended setting of a training by SGD (docs/choosing.md). "auto" stands for `ALGORITHM` and `WIRE`.
DENSITY: Final = Warmup(0.1, 0, dense_steps=100)
ALGORITHM: Final[AlgorithmName] = "double"
WIRE: Final[WireName] = "packed_int2"

Scope: TypeAlias = Literal["tensor", "bucket", "model", "chunk"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
FILLED = ("bucket", "chunk")  # scopes whose buckets are filled to a number of bytes
OnStep: TypeAlias = Callable[[int, dict[str, float]], None]


class ReducerOptions(CallOptions, total=False):
    """Keyword arguments of `sparsecomm.Reducer`, which documents them and has their defaults."""

    dense_steps: int
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

    def call_options(self, dtype: str) -> Options:
        """Return the options of sparse calls with sums of type ``dtype``: see `training_options`."""
        return training_options(self.options, dtype, by_chunk=self.chunk is not None)


def training_options(options: Options, dtype: str, *, by_chunk: bool) -> Options:
    """Return the options of a training's sparse calls, in which "auto" stands for the recommended setting.

    ``algorithm="auto"`` is `ALGORITHM`. Its ``wire="auto"`` is `WIRE`, or an exact format for float64 sums. `ALGORITHM`
    cannot count contributors and cannot select by chunk; for these "auto" is "fastest", with exact values.

    Args:
        options: have been checked.
        dtype: of the sums.
        by_chunk: whether ranks select by chunk.
    """
    if options.algorithm != "auto":
        return options
    if by_chunk or options.op == MEAN_OF_CONTRIBUTORS:
        return replace(options, algorithm="fastest")
    wire = WIRE if options.wire == "auto" and dtype != "float64" else options.wire
    return replace(options, algorithm=ALGORITHM, wire=wire)
