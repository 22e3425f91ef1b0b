"""Grids of trainings: every combination of the values of some settings, and a file of what came of each."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

__all__ = ["Grid", "mean_and_range"]

T = TypeVar("T")


def mean_and_range(scores: Sequence[float]) -> str:
    """Return the mean of the scores of several seeds, and the least and the most of them."""
    return f"{fmean(scores):.3f}" + (f" ({min(scores):.3f} - {max(scores):.3f})" if len(scores) > 1 else "")


class Grid(Generic[T]):
    """Settings of one kind: a dataclass, frozen, all of whose fields have defaults.

    Args:
        kind: the dataclass.
        key: what settings are called in the file of results, which has a line of JSON for each training.
    """

    def __init__(self, kind: type[T], key: str) -> None:
        self._kind, self._key = kind, key

    def combinations(self, words: Sequence[str]) -> Iterator[T]:
        """Return every combination of what words such as ``momentum=0.5,0.9`` give."""
        types = {name: type(value) for name, value in asdict(self._kind()).items()}  # type: ignore[call-overload]
        values: dict[str, list[Any]] = {}
        for word in words:
            name, _, given = word.partition("=")
            if name not in types or not given:
                sys.exit(f"{word}: expected NAME=VALUE,VALUE..., where NAME is one of {', '.join(types)}")
            try:
                values[name] = [types[name](value) for value in given.split(",")]
            except ValueError:
                sys.exit(f"{word}: expected values of type {types[name].__name__}")
        for chosen in itertools.product(*values.values()):
            yield self._kind(**dict(zip(values, chosen, strict=True)))

    def read(self, path: Path) -> dict[T, dict[str, Any]]:
        """Return the outcomes that a file has."""
        lines = path.read_text().splitlines() if path.exists() else []
        return {self._kind(**entry[self._key]): entry["outcome"] for entry in map(json.loads, lines)}

    def append(self, path: Path, setting: T, outcome: dict[str, Any]) -> None:
        """Add a training to a file."""
        with path.open("a") as file:
            settings = asdict(setting)  # type: ignore[call-overload]
            file.write(json.dumps({self._key: settings, "outcome": outcome}) + "\n")

    def unusual(self, setting: T, *told: str) -> dict[str, Any]:
        """Return the values of a setting that are not the usual ones, but for those of these names."""
        usual = asdict(self._kind())  # type: ignore[call-overload]
        mine = asdict(setting)  # type: ignore[call-overload]
        return {name: value for name, value in mine.items() if name not in told and value != usual[name]}

    def by_seed(self, done: dict[T, dict[str, Any]]) -> dict[T, list[dict[str, Any]]]:
        """Return the outcomes of each setting, of all its seeds."""
        found: dict[T, list[dict[str, Any]]] = {}
        for setting, outcome in done.items():
            found.setdefault(replace(setting, seed=0), []).append(outcome)  # type: ignore[type-var]
        return found

    def run(
        self,
        description: str,
        train: Callable[[T], dict[str, Any]],
        said: Callable[[dict[str, Any]], str],
        table: Callable[[dict[T, dict[str, Any]]], Table],
        file: str,
    ) -> None:
        """Be a command line: train what it names and the file of results lacks, or print its table.

        Args:
            description: of the program.
            train: returns the outcome of a training; called in other processes.
            said: returns what is printed of an outcome.
            table: of all outcomes.
            file: of results, unless another is given.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument(
            "settings", nargs="*", metavar="NAME=VALUE,...", help=f"see {self._kind.__name__} in the program"
        )
        parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
        parser.add_argument("--out", type=Path, default=Path(file), help="the file of results")
        parser.add_argument("--report", type=Path, help="train nothing: print the table of this file")
        given = parser.parse_args()
        if given.report:
            Console(width=180).print(table(self.read(given.report)))
            return
        done = self.read(given.out)
        try:
            todo = [setting for setting in self.combinations(given.settings) if setting not in done]
        except ValueError as error:
            sys.exit(str(error))
        with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
            futures = {pool.submit(train, setting): setting for setting in todo}
            for future in as_completed(futures):
                setting, outcome = futures[future], future.result()
                self.append(given.out, setting, outcome)
                print(said(outcome), self.unusual(setting), flush=True)
