"""Grids of training runs: every combination of some settings, a file of outcomes, and a table of them."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from bench import report

T, R = TypeVar("T"), TypeVar("R")
Outcome = dict[str, Any]
WIDTH = 180


def mean_and_range(scores: Sequence[float]) -> str:
    """Return the mean of the scores of several seeds, with the minimum and the maximum."""
    return f"{fmean(scores):.3f}" + (f" ({min(scores):.3f} - {max(scores):.3f})" if len(scores) > 1 else "")


def mean(key: str, text: Callable[[float], str]) -> Callable[[list[Outcome]], str]:
    """Return a cell: the mean of an entry of the outcomes of all seeds."""
    return lambda seeds: text(fmean(outcome[key] for outcome in seeds))


def spread(key: str) -> Callable[[list[Outcome]], str]:
    """Return a cell: `mean_and_range` of an entry of the outcomes of all seeds."""
    return lambda seeds: mean_and_range([outcome[key] for outcome in seeds])


def in_processes(train: Callable[[T], R], settings: Sequence[T], jobs: int) -> Iterator[tuple[T, R]]:
    """Train in other processes, ``jobs`` at a time; yield settings with their outcomes as they end."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(train, setting): setting for setting in settings}
        try:
            yield from ((futures[future], future.result()) for future in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Grid(Generic[T]):
    """Trainings with settings of one kind, which a file keeps as lines of JSON, and their table."""

    kind: type[T]  # a frozen dataclass whose fields all have defaults, with a field `seed`
    key: str  # the name of the settings in the file
    title: str = ""
    names: Mapping[str, str] = field(default_factory=dict)  # headings of fields that have columns of their own
    columns: Mapping[str, Callable[[list[Outcome]], object]] = field(default_factory=dict)  # from outcomes of all seeds
    order: Callable[[T, list[Outcome]], Any] = lambda setting, seeds: 0  # the sort key of a row

    def combinations(self, words: Sequence[str]) -> Iterator[T]:
        """Yield every combination of values such as ``momentum=0.5,0.9``."""
        types = {name: type(value) for name, value in asdict(self.kind()).items()}  # type: ignore[call-overload]
        values: dict[str, list[Any]] = {}
        for word in words:
            name, _, text = word.partition("=")
            if name not in types or not text:
                sys.exit(f"{word}: expected NAME=VALUE,VALUE..., where NAME is one of {', '.join(types)}")
            try:
                values[name] = [types[name](value) for value in text.split(",")]
            except ValueError:
                sys.exit(f"{word}: expected values of type {types[name].__name__}")
        for chosen in itertools.product(*values.values()):
            yield self.kind(**dict(zip(values, chosen, strict=True)))

    def read(self, path: Path) -> dict[T, Outcome]:
        """Return the outcomes in a file."""
        lines = path.read_text().splitlines() if path.exists() else []
        return {self.kind(**entry[self.key]): entry["outcome"] for entry in map(json.loads, lines)}

    def not_default(self, setting: T, *except_names: str) -> str:
        """Return the values of a setting that are not the defaults, as words, except some."""
        defaults, values = asdict(self.kind()), asdict(setting)  # type: ignore[call-overload]
        return " ".join(
            f"{name}={value}" for name, value in values.items() if name not in except_names and value != defaults[name]
        )

    def by_seed(self, outcomes: Mapping[T, Outcome]) -> dict[T, dict[int, Outcome]]:
        """Return the outcomes of each setting by seed; the seed of the settings is 0."""
        groups: dict[T, dict[int, Outcome]] = {}
        for setting, outcome in outcomes.items():
            without_seed = replace(setting, seed=0)  # type: ignore[type-var]
            groups.setdefault(without_seed, {})[setting.seed] = outcome  # type: ignore[attr-defined]
        return groups

    def show(self, outcomes: Mapping[T, Outcome], path: Path) -> None:
        """Print a table with a row for each setting, over its seeds."""
        groups = {setting: list(seeds.values()) for setting, seeds in self.by_seed(outcomes).items()}
        rows = sorted(groups.items(), key=lambda item: self.order(*item))
        cells: list[report.Column] = [
            (heading, lambda row, name=name: getattr(row[0], name)) for name, heading in self.names.items()
        ]
        cells.append(("settings", lambda row: self.not_default(row[0], "seed", *self.names)))
        cells += [(heading, lambda row, cell=cell: cell(row[1])) for heading, cell in self.columns.items()]
        report.show([], [report.table(rows, cells, title=self.title, box=None)], width=WIDTH)

    def run(
        self,
        description: str | None,
        train: Callable[[T], Outcome],
        file: str,
        write: Callable[[dict[T, Outcome], Path], None] | None = None,
    ) -> None:
        """Run the command line: train the missing combinations, or report the outcomes in a file.

        ``train`` runs in other processes; ``write`` prints the tables instead of `show`.
        """
        parser = report.parser(description)
        fields = f"fields of {self.kind.__name__} in the module"
        parser.add_argument("settings", nargs="*", metavar="NAME=VALUE,...", help=fields)
        parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
        parser.add_argument("--out", type=Path, default=Path(file), help="the file of outcomes (%(default)s)")
        parser.add_argument("--report", type=Path, help="train nothing: print the tables of this file")
        options = parser.parse_args()
        if options.report:
            return (write or self.show)(self.read(options.report), options.report)
        done = self.read(options.out)
        try:
            missing = [setting for setting in self.combinations(options.settings) if setting not in done]
        except ValueError as error:
            sys.exit(str(error))
        for setting, outcome in in_processes(train, missing, options.jobs):
            with options.out.open("a") as lines:
                settings = asdict(setting)  # type: ignore[call-overload]
                lines.write(json.dumps({self.key: settings, "outcome": outcome}) + "\n")
            numbers = {name: round(value, 4) for name, value in outcome.items() if isinstance(value, float)}
            print(numbers, self.not_default(setting), flush=True)
