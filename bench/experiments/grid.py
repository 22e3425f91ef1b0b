"""Grids of trainings: every combination of some settings, a file of outcomes, and a table of them."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from bench import report

T = TypeVar("T")
Outcome = dict[str, Any]
WIDTH = 180


def mean_and_range(scores: Sequence[float]) -> str:
    """Return the mean of the scores of several seeds, with the minimum and the maximum."""
    return f"{fmean(scores):.3f}" + (f" ({min(scores):.3f} - {max(scores):.3f})" if len(scores) > 1 else "")


class Grid(Generic[T]):
    """Trainings with settings of one kind, which a file keeps as lines of JSON.

    Args:
        kind: a frozen dataclass whose fields all have defaults, with a field ``seed``.
        key: the name of the settings in the file.
    """

    def __init__(self, kind: type[T], key: str) -> None:
        self._kind, self._key = kind, key

    def combinations(self, words: Sequence[str]) -> Iterator[T]:
        """Yield every combination of values such as ``momentum=0.5,0.9``."""
        types = {name: type(value) for name, value in asdict(self._kind()).items()}  # type: ignore[call-overload]
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
            yield self._kind(**dict(zip(values, chosen, strict=True)))

    def read(self, path: Path) -> dict[T, Outcome]:
        """Return the outcomes in a file."""
        lines = path.read_text().splitlines() if path.exists() else []
        return {self._kind(**entry[self._key]): entry["outcome"] for entry in map(json.loads, lines)}

    def not_default(self, setting: T, *except_names: str) -> str:
        """Return the values of a setting that are not the defaults, as words, except some."""
        defaults, values = asdict(self._kind()), asdict(setting)  # type: ignore[call-overload]
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

    def table(
        self,
        outcomes: Mapping[T, Outcome],
        title: str,
        names: Mapping[str, str],
        columns: Sequence[tuple[str, Callable[[list[Outcome]], object]]],
        order: Callable[[T, list[Outcome]], Any],
        settings: str = "settings",
    ) -> Table:
        """Return a table with a row for each setting, over its seeds.

        Args:
            names: headings of fields that have columns of their own, by field.
            columns: headings, and functions from the outcomes of all seeds to a cell.
            order: the sort key of a row.
            settings: the heading of all other fields that are not the defaults.
        """
        groups = {setting: list(seeds.values()) for setting, seeds in self.by_seed(outcomes).items()}
        rows = sorted(groups.items(), key=lambda item: order(*item))
        cells: list[report.Column] = [
            (heading, lambda row, name=name: getattr(row[0], name)) for name, heading in names.items()
        ]
        cells.append((settings, lambda row: self.not_default(row[0], "seed", *names)))
        cells += [(heading, lambda row, cell=cell: cell(row[1])) for heading, cell in columns]
        return report.table(rows, cells, title=title, box=None)

    def run(
        self,
        description: str | None,
        train: Callable[[T], Outcome],
        file: str,
        write: Callable[[dict[T, Outcome], Path], None],
    ) -> None:
        """Run the command line: train the missing combinations, or report the outcomes in a file.

        Args:
            train: returns the outcome of a training; runs in other processes.
            file: the default file of outcomes.
            write: prints tables of all outcomes, and may write files beside the file of outcomes.
        """
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=description, formatter_class=form)
        fields = f"fields of {self._kind.__name__} in the module"
        parser.add_argument("settings", nargs="*", metavar="NAME=VALUE,...", help=fields)
        parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
        parser.add_argument("--out", type=Path, default=Path(file), help="the file of outcomes (%(default)s)")
        parser.add_argument("--report", type=Path, help="train nothing: print the tables of this file")
        options = parser.parse_args()
        if options.report:
            write(self.read(options.report), options.report)
            return
        done = self.read(options.out)
        try:
            missing = [setting for setting in self.combinations(options.settings) if setting not in done]
        except ValueError as error:
            sys.exit(str(error))
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            futures = {pool.submit(train, setting): setting for setting in missing}
            for future in as_completed(futures):
                setting, outcome = futures[future], future.result()
                with options.out.open("a") as lines:
                    settings = asdict(setting)  # type: ignore[call-overload]
                    lines.write(json.dumps({self._key: settings, "outcome": outcome}) + "\n")
                numbers = {name: round(value, 4) for name, value in outcome.items() if isinstance(value, float)}
                print(numbers, self.not_default(setting), flush=True)


def show(table: Table) -> None:
    """Print a table."""
    Console(width=WIDTH).print(table)
