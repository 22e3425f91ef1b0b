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

    In the beginning gradients change fast, and entries that wait grow stale. The paper's stages, an epoch each, have
    densities 0.25, 0.0625, 0.015625, 0.004, and 0.001 from then on: ``Warmup(0.001, 4 * steps_per_epoch)``. In a short
    training they send most of its bytes: 2 % of the steps were better than 10 % in docs/reports/convergence.md.

    Attributes:
        density: the final one, from step ``dense_steps + steps`` on.
        steps: number of steps of all stages together.
        start: density of the first stage; 1.0 is a dense sum.
        stages: how many; the density falls by the same factor from stage to stage, and to the final one.
        dense_steps: number of steps with a dense sum before the first stage.

    Raises:
        InvalidInputError: one of them cannot be used.
    """

    density: float
    steps: int
    start: float = 0.25
    stages: int = 4
    dense_steps: int = 0

    def __post_init__(self) -> None:
        for name, value in (("density", self.density), ("start", self.start)):
            object.__setattr__(self, name, density_at(value, name=name))
        for name, value, minimum in (
            ("steps", self.steps, 0),
            ("stages", self.stages, 1),
            ("dense_steps", self.dense_steps, 0),
        ):
            if (count := to_int(value, minimum)) is None:
                raise InvalidInputError(f"{name}={quote(value)}: expected a whole number from {minimum} on")
            object.__setattr__(self, name, count)

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
    """A schedule that begins with dense steps: see `with_dense_steps`.

    Attributes:
        density: the density or schedule that follows. A schedule counts its steps from the end of the dense ones.
        dense_steps: number of dense steps.
    """

    density: Schedule
    dense_steps: int

    def __call__(self, step: int) -> float:
        """Return the density of step number ``step``, counted from 0."""
        return 1.0 if step < self.dense_steps else density_at(self.density, step - self.dense_steps)


def with_dense_steps(density: Schedule, dense_steps: Any = 0) -> Schedule:
    """Return a schedule that begins with dense steps, and then follows ``density``, which counts steps from there.

    Raises:
        InvalidInputError: ``dense_steps`` is not a whole number of at least 0, or ``density`` is not a density.
    """
    if (count := to_int(dense_steps, 0)) is None:
        raise InvalidInputError(f"dense_steps={quote(dense_steps)}: expected a whole number, at least 0")
    if not callable(density):
        density = density_at(density)
    return DenseStart(density, count) if count else density


def final_density(schedule: Any, otherwise: float) -> float:
    """Return the density at which a schedule ends, or ``otherwise`` for a function that does not say."""
    while callable(schedule):
        schedule = getattr(schedule, "density", otherwise)
    return float(schedule)


def density_at(schedule: Any, step: int | None = None, *, name: str = "density") -> float:
    """Return the density of a step; ``None``: of all steps, which no function gives.

    A density is no number of entries, so unlike k it is never an int. What a function returns may also be the int 1, or
    an array of one element.

    Raises:
        InvalidInputError: the schedule is, or gives, no number in (0, 1].
    """
    value, density, said = schedule, math.nan, f"{name}={quote(schedule)}: expected"
    if step is not None and callable(schedule):
        value = schedule(step)
        said = f"{name}: the function returned {quote(value)} for step {step}; expected"
        if not isinstance(value, (bool, str, bytes)):
            with suppress(*FAULTS):
                density = float(value)
    elif not isinstance(value, numbers.Integral):
        density = to_float(value)
    if not 0 < density <= 1:
        raise InvalidInputError(f"{said} a float in (0, 1]: the part of the elements; 1.0 is a dense sum")
    return density
