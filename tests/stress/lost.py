"""One of four ranks is killed at a random time, again and again: see `tests.stress.lost_rank`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.processes import ENVIRONMENT, ROOT
from tests.stress.report import Report

__all__ = ["HELP", "add_arguments", "run"]

HELP = "one of four ranks is killed, and the others go on"

_SECONDS_PER_RUN = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--runs", type=int, default=200, help="(%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Kill a rank in so many jobs."""
    words = ["-m", "tests.stress.lost_rank", "--runs", str(arguments.runs), "--seed", str(report.seed)]
    limit = 120 + _SECONDS_PER_RUN * arguments.runs
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=limit
    )
    print(done.stdout, end="", flush=True)
    report.counts["runs"] += arguments.runs
    if done.returncode != 0:
        report.fail(f"status {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}", " ".join(words))
