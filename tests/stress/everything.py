"""All attacks, one after another, each in a process of its own: some minutes with ``--scale 1``.

The reports of the attacks are written beside that of all: NAME.json and NAME.txt.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.processes import ROOT
from tests.stress.chunks import command_line
from tests.stress.report import Report

__all__ = ["HELP", "add_arguments", "run"]

HELP = "all attacks, one after another, in some minutes"

_ATTACKS: dict[str, list[str | int]] = {  # numbers are scaled
    "calls": ["--calls", 4000],
    "messages": ["--messages", 500_000],
    "inputs": ["--inputs", 3000],
    "states": ["--states", 1000],
    "states --over mpi": ["--states", 50],
    "states --over gloo": ["--states", 50],
    "sanitized calls": ["--cases", 300],
    "sanitized messages": ["--cases", 50_000],
    "sanitized inputs": ["--cases", 500],
    "threads": ["--calls", 5000, "--forks", 50],
    "signals": ["--calls", 1000],
    "interrupts --over mpi": ["--stride", 0, "--signals", 50],
    "endurance": ["--calls", 20_000, "--communicators", 300],
    "stopped": ["--rounds", 2],
    "lost": ["--runs", 2],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--scale", type=float, default=1.0, help="by which all numbers are multiplied (%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Run all attacks."""
    with tempfile.TemporaryDirectory(prefix="sparsecomm-stress-") as temporary:
        folder = Path(temporary) if arguments.report is None else arguments.report.resolve().parent
        build = Path(temporary) / "sanitized"
        for name, words in _ATTACKS.items():
            scaled = [max(1, round(word * arguments.scale)) if isinstance(word, int) else word for word in words]
            kept = ["--build", build] if name.startswith("sanitized") else []
            file = folder / f"{name.replace(' ', '-')}.json"
            file.unlink(missing_ok=True)
            command = command_line(*name.split(), *scaled, "--seed", report.seed)
            subprocess.run([*command, *map(str, kept), "--report", str(file)], cwd=ROOT, check=False)
            if file.exists():
                one = Report(name, report.seed)
                one.add(file)
                report.counts.update({f"{name}: {what}": number for what, number in one.counts.items()})
                report.figures |= {f"{name}: {what}": value for what, value in one.figures.items()}
                report.failures += one.failures
            else:
                report.fail(f"{name} ended without a report", shlex.join(command[1:]))
