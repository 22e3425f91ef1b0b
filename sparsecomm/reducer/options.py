"""The options of a `Reducer`, its schedules of densities, and the recommended setting for training."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from sparsecomm.algorithms import AlgorithmName
from sparsecomm.calls.arguments import chunk_of
from sparsecomm.calls.nodes import NodesOption, check_nodes
from sparsecomm.calls.options import SumOptions, SumSettings
from sparsecomm.checks import ARGUMENT_ERRORS, check_choice, quote, to_bool, to_float, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.wire import MEAN_OF_CONTRIBUTORS, Op, WireName

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


@dataclass(frozen=True, kw_only=True)
class ReducerSettings(SumSettings):
    """The options of `sparsecomm.Reducer`, which the functions that make reducers pass on.

    Attributes:
        density: the share of the entries that each rank selects: a float in (0, 1], or a function of the step number,
            such as `Warmup`. At 1.0 gradients are summed densely and exactly with any ``algorithm`` and ``wire``, and
            residuals are flushed.
        dense_steps: number of steps at the beginning with density 1.0, instead of the dense steps of a `Warmup`. A
            schedule counts its steps from there. ``None``: as ``density`` says: 100 by default, 0 for a float.
        algorithm: as in `sparse_allreduce`, but "auto" selects "double", which trains best at equal bytes, or
            "fastest" with ``op="mean_of_contributors"`` or ``scope="chunk"``.
        wire: as in `sparse_allreduce`, but if ``algorithm="auto"`` selects "double", "auto" selects "packed_int2",
            which sends values of 2 bits, except for float64 sums.
        op: "mean", "sum" or "mean_of_contributors", as in `sparse_allreduce`. Dense means divide by the world size.
        scope: the elements among which entries are selected. "tensor": each tensor, with a call for each (Lin et al.,
            Deep Gradient Compression, 2018). "model": all tensors, in one call, which begins when the last gradient is
            ready (Shi et al., gTop-k, 2019). "bucket": buckets of neighbouring tensors, so that calls are large and
            overlap with the backward pass. "chunk": every ``chunk`` elements of each tensor, in the calls of "bucket",
            which has the fastest selection and the shortest indices (Sarfi et al., SparseLoCo, 2025).
        chunk: number of elements of a chunk; the last chunk of a tensor may be shorter. ``density * chunk`` entries
            are selected in each chunk, at least one.
        bucket_bytes: size of a bucket in bytes. Buckets are filled in the reverse order of ``tensors``. ``None``: large
            enough that an element costs at most 1.25 times as much as in a huge bucket. The costs of messages and of
            CPUs are measured, and those of GPUs assumed. Pass a size if only some ranks have their tensors on GPUs,
            since the default differs there.
        dense_below: tensors with fewer elements are summed densely, in one call at the end.
        momentum: momentum correction (Lin et al., Section 3.1): residuals accumulate this rank's velocity instead of
            its gradient. Use an optimizer without momentum.
        masking: with ``momentum``, clear the velocity of entries that this rank selects, or that the result contains,
            except in dense sums (Section 3.3).
        clip: maximum norm of a step's gradient (Section 3.2). Each rank clips its own gradient before it is added to
            residuals, assuming that its norm is sqrt(P) times the norm of the mean over the P ranks. Calls begin when
            the last gradient is ready.
        decay: the factor of a residual before a gradient is added (Sarfi et al., Algorithm 1). Below 1, old entries are
            gradually dropped.
        skip_nonfinite: for loss scaling. If a gradient or a sum is not finite on one rank, the step is unusable on all
            ranks, and on every rank at least one result is not finite. Finite gradients stay in residuals; other
            gradients, and entries that could overflow again, are dropped. It costs two more reads of the gradients.
        nodes: which ranks reach each other fast. The ranks of a node add up their gradients densely, and count as one
            rank in the sums between nodes: see docs/guides/nodes.md. "auto": the ranks of a machine, if there are
            several machines with the same number of ranks, at least 2. False: every rank is a node. A process group or
            an mpi4py communicator that contains this rank: its ranks, for example all ranks of a site.
        on_step: called by `wait` with the step number and a dictionary of numbers by name, for loggers.

    Raises:
        InvalidInputError: an option is out of range, or excludes another one.
    """

    density: Schedule = DENSITY
    dense_steps: int | None = None
    op: Op = "mean"
    scope: Scope = "bucket"
    chunk: int = 4096
    bucket_bytes: int | None = None
    dense_below: int = 1024
    momentum: float = 0.0
    masking: bool = True
    clip: Clip = None
    decay: float = 1.0
    skip_nonfinite: bool = False
    nodes: NodesOption = "auto"
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scope", self.scope, SCOPES)
        schedule = with_dense_steps(self.density, self.dense_steps)
        first = density_at(schedule, 0)
        checked: dict[str, object] = {
            "density": schedule if callable(schedule) else first,
            "chunk": chunk_of(self.chunk),
            "bucket_bytes": None if self.bucket_bytes is None else to_int(self.bucket_bytes, 1),
            "masking": to_bool("masking", self.masking),
            "skip_nonfinite": to_bool("skip_nonfinite", self.skip_nonfinite),
            "nodes": check_nodes(self.nodes),
        }
        momentum, decay, dense_below = map(to_float, (self.momentum, self.decay, self.dense_below))
        clip = None if self.clip is None else to_float(self.clip)
        checked |= {"momentum": momentum, "decay": decay, "clip": clip}
        bytes_valid = self.bucket_bytes is None or checked["bucket_bytes"] is not None
        for name, valid, expected in (
            ("dense_below", dense_below >= 0 and dense_below % 1 == 0, "must be a number of elements, at least 0"),
            ("momentum", 0 <= momentum < 1, "must be at least 0 and below 1"),
            ("clip", clip is None or 0 < clip < math.inf, "must be a norm above 0, or None"),
            ("decay", 0 < decay <= 1, "must be a number in (0, 1]; at 1 residuals keep everything"),
            ("bucket_bytes", bytes_valid, "must be a number of bytes, at least 1, or None"),
            ("on_step", self.on_step is None or callable(self.on_step), "must be a function of a number and a dict"),
        ):
            if not valid:
                raise InvalidInputError(f"{name}={quote(getattr(self, name))}: {expected}")
        if decay < 1 and self.algorithm == "dense":
            raise InvalidInputError(
                f"decay={decay!r} has no effect with algorithm='dense', which leaves no residual; remove one"
            )
        # These algorithms have their own way to sum inside nodes.
        if isinstance(self.algorithm, str) and self.algorithm.startswith("hierarchical"):
            if self.nodes not in ("auto", False):
                raise InvalidInputError(f"algorithm={self.algorithm!r} does not work with nodes=; remove one of them")
            checked["nodes"] = False
        checked["dense_below"] = int(dense_below)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def chunk_length(self) -> int | None:
        """The number of elements of a chunk; ``None``: entries are not selected by chunk."""
        return self.chunk if self.scope == "chunk" else None

    def for_sums(self, dtype: str) -> SumSettings:
        """Return the settings of sparse calls with sums of type ``dtype``: "auto" is the recommended setting.

        ``algorithm="auto"`` becomes `ALGORITHM`, and then ``wire="auto"`` becomes `WIRE`, except for sums of ``dtype``
        "float64". `ALGORITHM` cannot count contributors or select by chunk. If the options require one of these, "auto"
        becomes "fastest", with exact values.
        """
        algorithm, wire = self.algorithm, self.wire
        if algorithm == "auto":
            counts = self.op == MEAN_OF_CONTRIBUTORS
            algorithm = "fastest" if counts or self.chunk_length is not None else ALGORITHM
            if algorithm == ALGORITHM and wire == "auto" and dtype != "float64":
                wire = WIRE
        return SumSettings(algorithm=algorithm, op=self.op, wire=wire)


# declared above: ReducerOptions(SumOptions) of ReducerSettings without density, skip_nonfinite
class ReducerOptions(SumOptions, total=False):
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
