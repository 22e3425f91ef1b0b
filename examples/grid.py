"""Grids of trainings: every combination of the values of some settings, and a file of what came of each."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["Grid"]

T = TypeVar("T")


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
            values[name] = [types[name](value) for value in given.split(",")]
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
