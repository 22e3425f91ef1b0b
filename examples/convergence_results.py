"""The results of many trainings: one file of them all, and what the seeds of a setting come to."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from convergence_tasks import TASKS
from convergence_training import METHODS, Curve, Setting, recipe

__all__ = ["Outcome", "Results", "Training", "about", "best", "grouped"]

K = TypeVar("K")


@dataclass(frozen=True)
class Training:
    """A training that has ended.

    Attributes:
        setting: which.
        recipe: what else it depends on.
        transport: what carried the messages.
        curve: its outcome.
    """

    setting: Setting
    recipe: dict[str, Any]
    transport: str
    curve: Curve

    @property
    def score(self) -> float:
        curve = self.curve
        return curve.accuracy if TASKS[self.setting.model].score == "accuracy" else curve.loss

    @property
    def step_bytes(self) -> float:
        """Bytes per step once the warm-up is over."""
        return (self.curve.sent[-1] - self.curve.warm) / (self.setting.steps - self.setting.warm)

    @property
    def step_seconds(self) -> float:
        """Seconds of communication per step once the warm-up is over; NaN where nobody counted."""
        if not self.curve.seconds:
            return math.nan
        return (self.curve.seconds[-1] - self.curve.warm_seconds) / (self.setting.steps - self.setting.warm)


@dataclass(frozen=True)
class Outcome:
    """The trainings of a setting, and the dense ones to compare with.

    Attributes:
        setting: the seed in it is 0.
        seeds: trainings by seed.
        dense: dense trainings of the same model, ranks and number of steps, by seed.
    """

    setting: Setting
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
        """The mean score with the sign with which less is better; infinite where a training diverged."""
        return self.sign * self.score if math.isfinite(self.score) else math.inf

    @property
    def sign(self) -> int:
        return -1 if TASKS[self.setting.model].score == "accuracy" else 1

    @property
    def pairs(self) -> list[tuple[Training, Training]]:
        """Each training with the dense one of the same seed, where there is one."""
        return [(training, self.dense[seed]) for seed, training in self.seeds.items() if seed in self.dense]

    @property
    def gap(self) -> float:
        """The mean difference of the scores to dense with the same seed."""
        return float(np.mean([mine.score - dense.score for mine, dense in self.pairs])) if self.pairs else math.nan

    @property
    def spread(self) -> float:
        """The range of dense over its seeds."""
        scores = [training.score for training in self.dense.values()]
        return max(scores) - min(scores) if scores else math.nan

    def mean(self, number: Callable[[Training], float]) -> float:
        """Return the mean of a number of each training."""
        return float(np.mean([number(training) for training in self.seeds.values()]))


class Results:
    """Trainings by setting; a newer one replaces an older one.

    Attributes:
        trainings: by setting.
        runs: the machine, versions and command of each run that added some.
    """

    def __init__(self) -> None:
        self.trainings: dict[Setting, Training] = {}
        self.runs: list[dict[str, Any]] = []

    @classmethod
    def read(cls, *paths: Path) -> Results:
        """Return the trainings of all these files together.

        Raises:
            SystemExit: a file cannot be read, or is none of this example's.
        """
        results = cls()
        for path in paths:
            results._take(path)
        return results

    def _take(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            for entry in found["trainings"]:
                self.add(
                    Training(Setting(**entry["setting"]), entry["recipe"], entry["transport"], Curve(**entry["curve"]))
                )
            self.runs += [run for run in found["runs"] if run not in self.runs]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not results of this example ({type(error).__name__}: {error})") from error

    def add(self, training: Training) -> None:
        self.trainings[training.setting] = training

    def has(self, setting: Setting) -> bool:
        """Return whether it was trained, by the recipe that holds now.

        A training that was compared with something else is taken for this one, too.
        """
        now = recipe(setting)
        if setting in self.trainings and self.trainings[setting].recipe == now:
            return True
        for training in self.trainings.values():
            if training.setting.work == setting.work and training.recipe == now:
                self.add(replace(training, setting=setting))
                return True
        return False

    def write(self, path: Path) -> None:
        trainings = sorted(self.trainings.values(), key=lambda t: sort_key(t.setting))
        lines = ",\n".join(json.dumps(asdict(training), default=float) for training in trainings)  # a line each
        runs = ",\n".join(map(json.dumps, self.runs))
        written = path.with_suffix(".part")
        written.write_text(f'{{"runs": [\n{runs}\n],\n"trainings": [\n{lines}\n]}}\n')
        written.replace(path)  # an interrupt leaves the old file or the new one

    def outcomes(self) -> list[Outcome]:
        """Return what the seeds of each setting come to, in the order of the table."""
        found: dict[Setting, dict[int, Training]] = {}
        for setting in sorted(self.trainings, key=sort_key):
            found.setdefault(replace(setting, seed=0), {})[setting.seed] = self.trainings[setting]
        dense = {(s.model, s.ranks, s.steps): seeds for s, seeds in found.items() if s.method == "dense"}
        return [Outcome(s, seeds, dense.get((s.model, s.ranks, s.steps), {})) for s, seeds in found.items()]


def sort_key(setting: Setting) -> tuple[Any, ...]:
    """Return the key by which the rows of the table are sorted."""
    methods, models = list(METHODS), list(TASKS)
    return (
        models.index(setting.model),
        setting.steps,
        setting.ranks,
        setting.method != "dense",
        setting.equal_to > 0,
        -(setting.equal_to or setting.density),
        methods.index(setting.method),
        -setting.momentum,
        setting.rate,
        setting.wire,
        setting.warmup,
        -setting.decay,
        setting.seed,
    )


def about(command: Iterable[str]) -> dict[str, Any]:
    """Describe this run."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model na")]
        processor = names[0] if names else processor
    packages = ("sparsecomm", "torch", "numpy", "scikit-learn", "mpi4py")
    return {
        "command": " ".join(command),
        "machine": f"{processor}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the one with the best mean score."""
    return min(outcomes, key=lambda outcome: outcome.badness)


def grouped(outcomes: Iterable[Outcome], key: Callable[[Setting], K]) -> dict[K, list[Outcome]]:
    """Return the outcomes whose settings have equal keys, in their order."""
    found: dict[K, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(key(outcome.setting), []).append(outcome)
    return found
