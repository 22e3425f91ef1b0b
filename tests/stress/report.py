"""What an attack did and found, in numbers and in words: printed, and written as JSON."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Failure", "Report"]


@dataclass(frozen=True)
class Failure:
    """Something that should not be: what it was, and the command that shows it again."""

    what: str
    repeat: str


@dataclass
class Report:
    """The outcome of an attack.

    Attributes:
        attack: the name of the command.
        seed: from which all choices follow.
        counts: how often what happened.
        figures: what was measured, by name with its unit.
        failures: what should not be.
    """

    attack: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def fail(self, what: str, repeat: str) -> None:
        """Record a failure, and print it at once."""
        self.failures.append(Failure(what, repeat))
        print(f"FAILED: {what}\n  repeat: {repeat}", file=sys.stderr, flush=True)

    def add(self, file: Path) -> None:
        """Add what another process has written of the same attack; of figures the largest counts."""
        other = json.loads(file.read_text())
        self.counts.update(other["counts"])
        for name, value in other["figures"].items():
            self.figures[name] = max(value, self.figures.get(name, value))
        self.failures += [Failure(**failure) for failure in other["failures"]]

    @property
    def seconds(self) -> float:
        """The time since the attack began."""
        return time.monotonic() - self.began

    def as_json(self) -> dict[str, Any]:
        """Return the report in types that JSON has."""
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        fields = asdict(self) | {"seconds": round(self.seconds, 3), "counts": dict(sorted(self.counts.items()))}
        return {**fields, **machine}

    def write(self, file: Path) -> None:
        """Write the report as JSON to ``file``, and as text beside it, with the suffix ``.txt``."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        file.with_suffix(".txt").write_text(f"{self}\n")

    def __str__(self) -> str:
        lines = [f"{self.attack}: seed {self.seed}, {self.seconds:.1f} s"]
        lines += [f"  {number:>12,} {what}" for what, number in sorted(self.counts.items())]
        lines += [f"  {value:>12.6g} {what}" for what, value in sorted(self.figures.items())]
        for failure in self.failures:
            lines += [f"  FAILED: {failure.what}", f"    repeat: {failure.repeat}"]
        lines.append(f"  {len(self.failures)} failures")
        return "\n".join(lines)
