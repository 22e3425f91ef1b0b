"""The options of a `Reducer`, and the recommended setting of a training, which every way to train uses by default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

from sparsecomm.algorithms import AlgorithmName
from sparsecomm.calls.arguments import chunk_of
from sparsecomm.calls.plan import CallOptions, Options
from sparsecomm.checks import check_choice, quote, to_bool, to_float, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.schedule import Schedule, Warmup, density_at
from sparsecomm.wire import MEAN_OF_CONTRIBUTORS, WireName

__all__ = [
    "ALGORITHM",
    "DENSITY",
    "FILLED",
    "WIRE",
    "Clip",
    "OnStep",
    "ReducerOptions",
    "Scope",
    "Settings",
    "check_layout",
    "training_options",
]

# The recommended setting for training with SGD (docs/choosing.md). "auto" stands for `ALGORITHM` and `WIRE`.
DENSITY: Final = Warmup(0.1, 0, dense_steps=100)
ALGORITHM: Final[AlgorithmName] = "double"
WIRE: Final[WireName] = "packed_int2"

Scope: TypeAlias = Literal["tensor", "bucket", "model", "chunk"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
FILLED = ("bucket", "chunk")  # scopes whose buckets have a size in bytes
Clip: TypeAlias = "float | None"
OnStep: TypeAlias = Callable[[int, dict[str, float]], None]


class ReducerOptions(CallOptions, total=False):
    """Keyword arguments of `sparsecomm.Reducer`, which documents them and has their defaults."""

    dense_steps: int
    scope: Scope
    chunk: int
    bucket_bytes: int | None
    dense_below: int
    momentum: float
    masking: bool
    clip: Clip
    decay: float
    on_step: OnStep | None


@dataclass(frozen=True)
class Settings:
    """The checked options of a `sparsecomm.Reducer`, which documents them.

    Attributes:
        chunk: ``None`` unless the scope is "chunk".

    Raises:
        InvalidInputError: an option is out of range, or contradicts another one.
    """

    density: Schedule
    options: Options
    scope: str
    chunk: int | None
    dense_below: int
    bucket_bytes: int | None
    momentum: float
    masking: bool
    clip: Clip
    decay: float
    skip_nonfinite: bool

    def __post_init__(self) -> None:
        momentum, decay = to_float(self.momentum), to_float(self.decay)
        clip = None if self.clip is None else to_float(self.clip)
        bucket_bytes = None if self.bucket_bytes is None else to_int(self.bucket_bytes, 1) or 0
        checks = (
            ("momentum", 0 <= momentum < 1, "must be at least 0 and below 1"),
            ("clip", clip is None or 0 < clip < math.inf, "must be a norm above 0, or None"),
            ("decay", 0 < decay <= 1, "must be a number in (0, 1]; at 1 residuals keep everything"),
            ("bucket_bytes", bucket_bytes != 0, "must be a number of bytes, at least 1, or None"),
        )
        for name, valid, expected in checks:
            if not valid:
                raise InvalidInputError(f"{name}={quote(getattr(self, name))}: {expected}")
        if decay < 1 and self.options.algorithm == "dense":
            raise InvalidInputError(
                f"decay={quote(self.decay)} has no effect with algorithm='dense', which leaves no residual; remove one"
            )
        first = density_at(self.density, 0)
        chunk = chunk_of(self.chunk)
        values = {
            "density": self.density if callable(self.density) else first,
            "dense_below": check_layout(self.scope, self.dense_below),
            "chunk": chunk if self.scope == "chunk" else None,
            "bucket_bytes": bucket_bytes,
            "momentum": momentum,
            "masking": to_bool("masking", self.masking),
            "clip": clip,
            "decay": decay,
            "skip_nonfinite": to_bool("skip_nonfinite", self.skip_nonfinite),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check_dtypes(self, accumulators: Iterable[str]) -> None:
        """Check that sums of these types can be made.

        Raises:
            InvalidInputError: the wire format or the algorithm does not support one of them.
        """
        for accumulator in accumulators:
            self.options.check(accumulator, by_chunk=self.chunk is not None)

    def call_options(self, dtype: str) -> Options:
        """Return the options of sparse calls with sums of type ``dtype``: see `training_options`."""
        return training_options(self.options, dtype, by_chunk=self.chunk is not None)


def check_layout(scope: str, dense_below: int, scopes: Sequence[str] = SCOPES) -> int:
    """Check the options of `sparsecomm.reducer.layout.layout`, and return ``dense_below`` as an int.

    Raises:
        InvalidInputError: ``scope`` is not one of ``scopes``, or ``dense_below`` is not a number of elements.
    """
    check_choice("scope", scope, scopes)
    elements = to_float(dense_below)
    if not (elements >= 0 and elements.is_integer()):
        raise InvalidInputError(f"dense_below={quote(dense_below)}: must be a number of elements, at least 0")
    return int(elements)


def training_options(options: Options, dtype: str, *, by_chunk: bool) -> Options:
    """Return the options of a training's sparse calls, with the recommended setting in place of "auto".

    ``algorithm="auto"`` becomes `ALGORITHM`, and then ``wire="auto"`` becomes `WIRE`, or stays exact for float64 sums.
    `ALGORITHM` cannot count contributors and cannot select by chunk; in these cases "auto" becomes "fastest", with
    exact values.

    Args:
        options: checked options.
        dtype: type of the sums.
        by_chunk: whether ranks select by chunk.
    """
    if options.algorithm != "auto":
        return options
    if by_chunk or options.op == MEAN_OF_CONTRIBUTORS:
        return replace(options, algorithm="fastest")
    wire = WIRE if options.wire == "auto" and dtype != "float64" else options.wire
    return replace(options, algorithm=ALGORITHM, wire=wire)
