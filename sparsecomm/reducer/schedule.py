"""Densities that change from step to step."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sparsecomm.checks import FAULTS, quote, to_float, to_int
from sparsecomm.errors import InvalidInputError

__all__ = ["DenseStart", "Schedule", "Warmup", "density_at", "final_density", "with_dense_steps"]

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Warmup:
    """A density that falls in stages: Lin et al., Deep Gradient Compression (ICLR 2018), Section 3.3.

    Gradients change fast at the beginning of a training, and entries that wait in residuals grow stale. The paper's
    stages of one epoch have densities 0.25, 0.0625, 0.015625 and 0.004, and 0.001 follows:
    ``Warmup(0.001, 4 * steps_per_epoch)``. In a short training these stages send most of the bytes; a warm-up of 2 % of
    the steps was better than one of 10 % in docs/reports/convergence.md.

    Attributes:
        density: the final density, from step ``dense_steps + steps`` on.
        steps: the number of steps of all stages together.
        start: the density of the first stage; 1.0 is a dense sum.
        stages: the number of stages. The density falls by the same factor after each.
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
        """Return the density of step number ``step``, counted from 0."""
        return 1.0 if step < self.dense_steps else density_at(self.density, step - self.dense_steps)


def with_dense_steps(density: Schedule, dense_steps: Any = 0) -> Schedule:
    """Return a schedule of ``dense_steps`` dense steps, followed by ``density``, which counts its steps from there.

    Raises:
        InvalidInputError: an argument is out of range.
    """
    count = _count("dense_steps", dense_steps, 0)
    if not callable(density):
        density = density_at(density)
    return DenseStart(density, count) if count else density


def final_density(schedule: Any, default: float) -> float:
    """Return the density at which a schedule ends, or ``default`` for a function without an attribute ``density``."""
    while callable(schedule):
        schedule = getattr(schedule, "density", default)
    return float(schedule)


def density_at(schedule: Any, step: int | None = None, *, name: str = "density") -> float:
    """Return the density of a step. Without a step, ``schedule`` must be a number.

    An int is refused, since it could be meant as a number of entries, like ``k``. A function may also return the int 1,
    or an array of one element.

    Raises:
        InvalidInputError: the density is not a number in (0, 1].
    """
    density, got = math.nan, f"{name}={quote(schedule)}"
    if step is not None and callable(schedule):
        value = schedule(step)
        got = f"{name}: the function returned {quote(value)} for step {step}"
        if not isinstance(value, (bool, str, bytes)):
            with suppress(*FAULTS):
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
