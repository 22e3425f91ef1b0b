"""The results of many trainings: one file of them all, a table, and plots."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from convergence_tasks import TASKS
from convergence_training import METHODS, MOMENTUM, Curve, Setting, recipe
from rich.table import Table

__all__ = ["Results", "Training", "plot", "size", "table"]

COLOURS = ("#4d4d4d", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7")  # as METHODS


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
        """Return whether it was trained, by the recipe that holds now."""
        return setting in self.trainings and self.trainings[setting].recipe == recipe(setting)

    def write(self, path: Path) -> None:
        trainings = sorted(self.trainings.values(), key=lambda t: sort_key(t.setting))
        lines = ",\n".join(json.dumps(asdict(training), default=float) for training in trainings)  # a line each
        runs = ",\n".join(map(json.dumps, self.runs))
        written = path.with_suffix(".part")
        written.write_text(f'{{"runs": [\n{runs}\n],\n"trainings": [\n{lines}\n]}}\n')
        written.replace(path)  # an interrupt leaves the old file or the new one

    def by_setting(self) -> dict[Setting, dict[int, Training]]:
        """Return the trainings by setting, in which the seed is 0, and by seed."""
        found: dict[Setting, dict[int, Training]] = {}
        for setting in sorted(self.trainings, key=sort_key):
            found.setdefault(replace(setting, seed=0), {})[setting.seed] = self.trainings[setting]
        return found


def sort_key(setting: Setting) -> tuple[Any, ...]:
    """Return the key by which the rows of the table are sorted."""
    methods, models = list(METHODS), list(TASKS)
    return (
        models.index(setting.model),
        setting.steps,
        setting.ranks,
        -setting.density,
        -setting.momentum,
        methods.index(setting.method),
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


def size(nbytes: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def table(results: Results) -> Table:
    """Return a row per setting; each gap is the mean over the seeds, of which each has its own dense training."""
    made = Table(
        title="Sparse gradients against dense ones",
        caption=(
            "score: mean over the seeds (least to most), of what was held out; accuracy in percent, loss in nats.\n"
            "gap: to dense with the same seed, mean; / range: that of dense over its seeds, ! if worse by more.\n"
            "sent: bytes of the rank that sends most; of dense: in all; later: per step once the warm-up is over"
        ),
    )
    for column in ("model", "P", "gradients", "density"):
        made.add_column(column)
    for column in ("seeds", "score", "gap", "/ range", "sent", "of dense", "later"):
        made.add_column(column, justify="right", no_wrap=True)
    groups = results.by_setting()
    last: tuple[str, int] | None = None
    for setting, seeds in groups.items():
        if last not in (None, (setting.model, setting.ranks)):
            made.add_section()
        last = setting.model, setting.ranks
        digits, unit = (1, " %") if TASKS[setting.model].score == "accuracy" else (3, "")
        scores = [training.score for training in seeds.values()]
        whose = dense_of(groups, setting)
        both = [seed for seed in seeds if seed in whose]
        cells = [setting.model, str(setting.ranks), setting.name, f"{setting.density:g}", str(len(seeds))]
        cells.append(f"{np.mean(scores):.{digits}f}{unit} ({min(scores):.{digits}f} - {max(scores):.{digits}f})")
        sent = np.mean([training.curve.sent[-1] for training in seeds.values()])
        if setting.method == "dense" or not both:
            made.add_row(*cells, "", "", size(float(sent)), "", "")
            continue
        gap = float(np.mean([seeds[seed].score - whose[seed].score for seed in both]))
        dense = [training.score for training in whose.values()]
        spread = max(dense) - min(dense)
        worse = -gap if TASKS[setting.model].score == "accuracy" else gap
        times = f"{abs(gap) / spread:.1f}" if spread else "-"
        all_dense = np.mean([whose[seed].curve.sent[-1] for seed in both])
        made.add_row(
            *cells,
            f"{gap:+.{digits}f}{unit}",
            times + ("!" if worse > spread else ""),
            size(float(sent)),
            fraction(float(sent / all_dense)),
            fraction(float(np.mean([later(seeds[s], whose[s]) for s in both]))),
        )
    return made


def fraction(ratio: float) -> str:
    return f"{100 * ratio:.2g} %" if np.isfinite(ratio) else ""


def later(training: Training, dense: Training) -> float:
    """Return the bytes per step after the warm-up, divided by those of dense."""
    setting, curve = training.setting, training.curve
    warm = round(training.recipe["warmup"] * setting.steps)
    sent = curve.sent[-1] - curve.warm
    per_dense_step = dense.curve.sent[-1] / setting.steps
    return sent / (setting.steps - warm) / per_dense_step if per_dense_step else np.nan


def dense_of(groups: dict[Setting, dict[int, Training]], setting: Setting) -> dict[int, Training]:
    """Return the dense trainings to compare with, by seed."""
    return groups.get(replace(setting, method="dense", density=1.0, momentum=MOMENTUM), {})


def plot(results: Results, ranks: int, path: Path) -> None:
    """Plot the held-out loss, by steps and by bytes sent: lines are medians of the seeds, bands their range."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    groups = {s: seeds for s, seeds in results.by_setting().items() if s.ranks == ranks}
    models = [m for m in TASKS if any(s.model == m for s in groups)]
    densities = sorted({s.density for s in groups if s.method != "dense"}, reverse=True) or [1.0]
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    figure, grid = plt.subplots(
        len(models),
        2 * len(densities),
        figsize=(8.5 * len(densities), 4 * len(models) + 0.6),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    drawn = {}
    for row, model in zip(grid, models, strict=True):
        for column, axes in enumerate(row):
            density, by_bytes = densities[column % len(densities)], column >= len(densities)
            for setting, seeds in groups.items():
                if setting.model != model or (setting.method != "dense" and setting.density != density):
                    continue
                curves = [training.curve for training in seeds.values()]
                x = np.mean([curve.sent if by_bytes else curve.steps for curve in curves], axis=0)
                losses = np.array([curve.losses for curve in curves])
                colour = COLOURS[list(METHODS).index(setting.method)]
                (drawn[setting.name],) = axes.plot(
                    x, np.median(losses, axis=0), "-" if setting.momentum == MOMENTUM else "--", color=colour
                )
                axes.fill_between(x, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0)
            axes.set_yscale("log")
            axes.grid(color="0.9")
            if by_bytes and ranks > 1:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size(nbytes)))
            axes.set_title(f"{model}, density {density:g}, by {'bytes' if by_bytes else 'steps'}", fontsize=10)
            axes.set_xlabel("sent by the busiest rank" if by_bytes else "steps")
        begin = [t.curve.losses[0] for s, seeds in groups.items() if s.model == model for t in seeds.values()]
        row[0].set_ylim(top=1.2 * max(begin))  # what diverges leaves the picture
        low, high = row[0].get_ylim()
        row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 1.3, 1.6, 2, 2.5, 3, 4)))
        row[0].yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:.3g}"))
        row[0].yaxis.set_minor_formatter(NullFormatter())
        row[0].set_ylabel("held-out loss, nats")
    figure.suptitle(f"{ranks} ranks: " + "; ".join(TASKS[m].title for m in models), fontsize=11)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=len(drawn), frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
