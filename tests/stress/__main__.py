"""Attacks on the library, each for as long as you like: ``python -m tests.stress ATTACK --seed S --report FILE``.

The exit status is 0 if nothing was found. What was found is printed with the command that shows it again.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tests.stress.report import Report

ATTACKS = (
    "calls", "messages", "inputs", "states", "sanitized", "threads", "signals", "interrupts", "endurance", "stopped",
    "lost", "all",
)  # fmt: skip
_MODULES = {"all": "everything"}  # of other names than their attacks


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    attacks = parser.add_subparsers(metavar="ATTACK", required=True)
    words = sys.argv[1:] if argv is None else argv
    for name in ATTACKS if not set(words[:1]) & set(ATTACKS) else words[:1]:  # what one needs, others need not
        module = import_module(f"tests.stress.{_MODULES.get(name, name)}")
        own = attacks.add_parser(
            name, help=module.HELP, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        own.add_argument("--seed", type=int, help="from which all choices follow (a new one)")
        own.add_argument("--report", type=Path, metavar="FILE", help="write JSON to FILE, and text beside it")
        module.add_arguments(own)
        own.set_defaults(attack=name, run=module.run)
    arguments = parser.parse_args(argv)
    if arguments.seed is None:
        arguments.seed = secrets.randbits(31)
    report = Report(arguments.attack, arguments.seed)
    arguments.run(arguments, report)
    if arguments.report is not None:
        arguments.report.unlink(missing_ok=True)
        report.write(arguments.report)
    print(report, flush=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
