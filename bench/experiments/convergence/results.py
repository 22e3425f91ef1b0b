"""The results of many training runs in one file, and their summary over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.experiments.convergence.training import METHODS, Curve, Setting, recipe
from bench.experiments.tasks import TASKS

K = TypeVar("K")


@dataclass(frozen=True)
class Training:
    """A finished training. The outcome depends on nothing but the setting and the recipe."""

    setting: Setting
    recipe: dict[str, Any]
    curve: Curve

    @property
    def score(self) -> float:
        curve = self.curve
        return curve.accuracy if TASKS[self.setting.model].score == "accuracy" else curve.loss

    @property
    def step_bytes(self) -> float:
        """Bytes per step after the warm-up."""
        return (self.curve.sent[-1] - self.curve.warm) / (self.setting.steps - self.setting.warm)

    @property
    def step_seconds(self) -> float:
        """Seconds of communication per step after the warm-up; NaN if they were not counted."""
        if not self.curve.seconds:
            return math.nan
        return (self.curve.seconds[-1] - self.curve.warm_seconds) / (self.setting.steps - self.setting.warm)


@dataclass(frozen=True)
class Outcome:
    """The runs of a setting, and dense ones of the same model, ranks and steps to compare with, by seed."""

    setting: Setting  # with seed 0
    seeds: dict[int, Training]
    dense: dict[int, Training]

    @property
    def scores(self) -> list[float]:
        return [training.score for training in self.seeds.values()]

    @property
    def score(self) -> float:
        return float(np.mean(self.scores))

    @property
    def badness(self) -> float:
        """The mean score with the sign that makes smaller better; infinite if a training diverged."""
        return self.sign * self.score if math.isfinite(self.score) else math.inf

    @property
    def sign(self) -> int:
        return -1 if TASKS[self.setting.model].score == "accuracy" else 1

    @property
    def pairs(self) -> list[tuple[Training, Training]]:
        """Pairs of a training and the dense training with the same seed."""
        return [(training, self.dense[seed]) for seed, training in self.seeds.items() if seed in self.dense]

    @property
    def gap(self) -> float:
        """The mean difference of the scores to dense training with the same seed."""
        return float(np.mean([mine.score - dense.score for mine, dense in self.pairs])) if self.pairs else math.nan

    @property
    def spread(self) -> float:
        """The range of dense scores over the seeds."""
        scores = [training.score for training in self.dense.values()]
        return max(scores) - min(scores) if scores else math.nan

    def mean(self, number: Callable[[Training], float]) -> float:
        """Return the mean of a function of the runs."""
        return float(np.mean([number(training) for training in self.seeds.values()]))


class Results:
    """Trainings by setting, where a newer one replaces an older one, and descriptions of the runs that made them."""

    def __init__(self, *paths: Path) -> None:
        """Read the runs of several files."""
        self.trainings: dict[Setting, Training] = {}
        self.runs: list[dict[str, Any]] = []
        try:
            for path in paths:
                contents = json.loads(path.read_text())
                for entry in contents["trainings"]:
                    setting, curve = Setting(**entry["setting"]), Curve(**entry["curve"])
                    self.add(Training(setting, entry["recipe"], curve))
                self.runs += [run for run in contents["runs"] if run not in self.runs]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not results of this program ({type(error).__name__}: {error})") from error

    def add(self, training: Training) -> None:
        self.trainings[training.setting] = training

    def has(self, setting: Setting) -> bool:
        """Return whether a setting was trained with the current recipe, possibly for another comparison."""
        current = recipe(setting)
        if setting in self.trainings and self.trainings[setting].recipe == current:
            return True
        for training in self.trainings.values():
            if training.setting.work == setting.work and training.recipe == current:
                self.add(replace(training, setting=setting))
                return True
        return False

    def write(self, path: Path) -> None:
        trainings = sorted(self.trainings.values(), key=lambda t: sort_key(t.setting))
        lines = ",\n".join(json.dumps(asdict(training), default=float) for training in trainings)  # one per line
        runs = ",\n".join(map(json.dumps, self.runs))
        written = path.with_suffix(".part")
        written.write_text(f'{{"runs": [\n{runs}\n],\n"trainings": [\n{lines}\n]}}\n')
        written.replace(path)  # atomic

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each setting, in the order of the table."""
        trainings: dict[Setting, dict[int, Training]] = {}
        for setting in sorted(self.trainings, key=sort_key):
            trainings.setdefault(replace(setting, seed=0), {})[setting.seed] = self.trainings[setting]
        dense = {(s.model, s.ranks, s.steps): seeds for s, seeds in trainings.items() if s.method == "dense"}
        return [Outcome(s, seeds, dense.get((s.model, s.ranks, s.steps), {})) for s, seeds in trainings.items()]


def sort_key(setting: Setting) -> tuple[Any, ...]:
    """Return the key by which the rows of the table are sorted."""
    methods, models = list(METHODS), list(TASKS)
    s, density = setting, setting.equal_to or setting.density
    compared = models.index(s.model), s.steps, s.ranks, s.method != "dense", s.equal_to > 0, -density
    return *compared, methods.index(s.method), -s.momentum, s.rate, s.wire, s.warmup, -s.decay, s.seed


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome with the best mean score."""
    return min(outcomes, key=lambda outcome: outcome.badness)


def grouped(outcomes: Iterable[Outcome], key: Callable[[Setting], K]) -> dict[K, list[Outcome]]:
    """Group outcomes by a key of their settings, in their order."""
    groups: dict[K, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome.setting), []).append(outcome)
    return groups
