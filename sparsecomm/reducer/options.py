"""The options of a `Reducer`, its schedules of densities, and the recommended setting for training."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from sparsecomm.algorithms import AlgorithmName
from sparsecomm.calls.arguments import chunk_of
from sparsecomm.calls.nodes import NodesOption, check_nodes
from sparsecomm.calls.plan import CallOptions, Options
from sparsecomm.checks import ARGUMENT_ERRORS, check_choice, quote, to_bool, to_float, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.wire import MEAN_OF_CONTRIBUTORS, WireName

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Warmup:
    """A density that falls in stages: Lin et al., Deep Gradient Compression (ICLR 2018), Section 3.3.

    Gradients change fast at the beginning of a training, and entries that wait in residuals become stale. The paper
    uses densities 0.25, 0.0625, 0.015625 and 0.004 for one epoch each, and then 0.001:
    ``Warmup(0.001, 4 * steps_per_epoch)``. In a short training these stages send most of the bytes; a warm-up of 2 % of
    the steps was better than one of 10 % in docs/reports/convergence.md.

    Attributes:
        density: the final density, from step ``dense_steps + steps`` on.
        steps: the number of steps of all stages together.
        start: the density of the first stage; 1.0 is a dense sum.
        stages: the number of stages. The density falls by the same factor after each stage.
        dense_steps: the number of steps with a dense sum before the first stage.

    Raises:
        InvalidInputError: an argument is out of range.
    """

    density: float
    steps: int
    start: float = 0.25
    stages: int = 4
    dense_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("density", "start"):
            object.__setattr__(self, name, density_at(getattr(self, name), name=name))
        for name, minimum in {"steps": 0, "stages": 1, "dense_steps": 0}.items():
            object.__setattr__(self, name, _count(name, getattr(self, name), minimum))

    def __call__(self, step: int) -> float:
        """Return the density of step number ``step``, counted from 0."""
        step -= self.dense_steps
        if step < 0:
            return 1.0
        if step >= self.steps:
            return self.density
        stage = step * self.stages // self.steps
        return float(self.start * (self.density / self.start) ** (stage / self.stages))


@dataclass(frozen=True)
class DenseStart:
    """A schedule that begins with dense steps: see `with_dense_steps`."""

    density: Schedule
    dense_steps: int

    def __call__(self, step: int) -> float:
        return 1.0 if step < self.dense_steps else density_at(self.density, step - self.dense_steps)


def with_dense_steps(density: Schedule, dense_steps: Any = None) -> Schedule:
    """Return a schedule of ``dense_steps`` dense steps, followed by ``density``, which counts its steps from there.

    They replace the dense steps of a `Warmup`. ``None``: return ``density``.
    """
    count = 0 if dense_steps is None else _count("dense_steps", dense_steps, 0)
    if not callable(density):
        density = density_at(density)
    if isinstance(density, Warmup):
        return density if dense_steps is None else replace(density, dense_steps=count)
    return DenseStart(density, count) if count else density


def described(schedule: Schedule) -> list[tuple[str, object]]:
    """Return a schedule as options by name, for a comparison with other ranks."""
    if isinstance(schedule, DenseStart):
        return [("dense_steps", schedule.dense_steps), *described(schedule.density)[1:]]
    is_function = callable(schedule) and not isinstance(schedule, Warmup)
    named = f"the function {getattr(schedule, '__qualname__', '')}" if is_function else schedule
    return [("dense_steps", 0), ("density", named)]


def final_density(schedule: Any, default: float) -> float:
    """Return the density at which a schedule ends, or ``default`` for a function without an attribute ``density``."""
    while callable(schedule):
        schedule = getattr(schedule, "density", default)
    return float(schedule)


def density_at(schedule: Any, step: int | None = None, *, name: str = "density") -> float:
    """Return the density of a step. Without a step, ``schedule`` must be a number.

    An int is refused as a schedule, because it could be meant as a number of entries, like ``k``. A function may return
    the int 1, or an array of one element.
    """
    density, got = math.nan, f"{name}={quote(schedule)}"
    if step is not None and callable(schedule):
        value = schedule(step)
        got = f"{name}: the function returned {quote(value)} for step {step}"
        if not isinstance(value, (bool, str, bytes)):
            with suppress(*ARGUMENT_ERRORS):
                density = float(value)
    elif not isinstance(schedule, numbers.Integral):
        density = to_float(schedule)
    if not 0 < density <= 1:
        raise InvalidInputError(f"{got}: must be a float in (0, 1], the share of the elements; 1.0 is a dense sum")
    return density


def _count(name: str, value: Any, minimum: int) -> int:
    if (count := to_int(value, minimum)) is None:
        raise InvalidInputError(f"{name}={quote(value)}: must be a whole number, at least {minimum}")
    return count


# The recommended setting for training with SGD (docs/guides/choosing.md). "auto" means `ALGORITHM` and `WIRE`.
DENSITY: Final = Warmup(0.1, 0, dense_steps=100)
ALGORITHM: Final[AlgorithmName] = "double"
WIRE: Final[WireName] = "packed_int2"

Scope: TypeAlias = Literal["tensor", "bucket", "model", "chunk"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
SIZED_SCOPES = ("bucket", "chunk")  # scopes with buckets of `bucket_bytes`
Clip: TypeAlias = "float | None"
OnStep: TypeAlias = Callable[[int, dict[str, float]], None]


class ReducerOptions(CallOptions, total=False):
    """Keyword arguments of `sparsecomm.Reducer`, which documents them and has their defaults."""

    dense_steps: int | None
    scope: Scope
    chunk: int
    bucket_bytes: int | None
    dense_below: int
    momentum: float
    masking: bool
    clip: Clip
    decay: float
    nodes: NodesOption
    on_step: OnStep | None


class Settings:
    """The options of a `sparsecomm.Reducer`, which documents them, checked and converted.

    ``chunk`` is ``None`` unless the scope is "chunk". ``owner``: the `Owner` of `Reducer.own`, or ``None``.
    """

    owner: Any = None

    def __init__(
        self,
        density: Schedule,
        options: Options,
        scope: str,
        chunk: int,
        dense_below: int,
        bucket_bytes: int | None,
        momentum: float,
        masking: bool,
        clip: Clip,
        decay: float,
        skip_nonfinite: bool,
        nodes: NodesOption,
    ) -> None:
        first, length = density_at(density, 0), chunk_of(chunk)
        self.density: Schedule = density if callable(density) else first
        self.options, self.scope = options, scope
        self.dense_below = check_layout(scope, dense_below)
        self.chunk = length if scope == "chunk" else None
        self.bucket_bytes = None if bucket_bytes is None else to_int(bucket_bytes, 1)
        self.momentum, self.decay = to_float(momentum), to_float(decay)
        self.clip = None if clip is None else to_float(clip)
        self.masking, self.skip_nonfinite = to_bool("masking", masking), to_bool("skip_nonfinite", skip_nonfinite)
        self.nodes = check_nodes(nodes)
        # These algorithms have their own way to sum inside nodes.
        if isinstance(options.algorithm, str) and options.algorithm.startswith("hierarchical"):
            if self.nodes not in ("auto", False):
                raise InvalidInputError(
                    f"algorithm={options.algorithm!r} does not work with nodes=; remove one of them"
                )
            self.nodes = False
        bytes_valid = bucket_bytes is None or self.bucket_bytes is not None
        for name, value, valid, expected in (
            ("momentum", momentum, 0 <= self.momentum < 1, "must be at least 0 and below 1"),
            ("clip", clip, self.clip is None or 0 < self.clip < math.inf, "must be a norm above 0, or None"),
            ("decay", decay, 0 < self.decay <= 1, "must be a number in (0, 1]; at 1 residuals keep everything"),
            ("bucket_bytes", bucket_bytes, bytes_valid, "must be a number of bytes, at least 1, or None"),
        ):
            if not valid:
                raise InvalidInputError(f"{name}={quote(value)}: {expected}")
        if self.decay < 1 and options.algorithm == "dense":
            raise InvalidInputError(
                f"decay={quote(decay)} has no effect with algorithm='dense', which leaves no residual; remove one"
            )

    def call_options(self, dtype: str) -> Options:
        """Return the options of sparse calls with sums of type ``dtype``: see `training_options`."""
        return training_options(self.options, dtype, by_chunk=self.chunk is not None)


def check_layout(scope: str, dense_below: int, scopes: Sequence[str] = SCOPES) -> int:
    """Check the options of `sparsecomm.reducer.connection.layout`, and return ``dense_below`` as an int."""
    check_choice("scope", scope, scopes)
    elements = to_float(dense_below)
    if not (elements >= 0 and elements.is_integer()):
        raise InvalidInputError(f"dense_below={quote(dense_below)}: must be a number of elements, at least 0")
    return int(elements)


def training_options(options: Options, dtype: str, *, by_chunk: bool) -> Options:
    """Return checked options for sparse calls in a training, with "auto" replaced by the recommended setting.

    ``algorithm="auto"`` becomes `ALGORITHM`, and then ``wire="auto"`` becomes `WIRE`, except for sums of ``dtype``
    "float64". `ALGORITHM` cannot count contributors or select by chunk. If the options require one of these, "auto"
    becomes "fastest", with exact values.
    """
    if options.algorithm != "auto":
        return options
    if by_chunk or options.op == MEAN_OF_CONTRIBUTORS:
        return replace(options, algorithm="fastest")
    wire = WIRE if options.wire == "auto" and dtype != "float64" else options.wire
    return replace(options, algorithm=ALGORITHM, wire=wire)
