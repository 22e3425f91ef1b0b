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

from tests.stress.harness import Attack, Numbered

ATTACKS = (
    "calls", "messages", "peers", "inputs", "states", "files", "kills", "threads", "signals", "interrupts",
    "endurance", "stopped", "lost", "soak", "strangers", "all",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    attacks = parser.add_subparsers(metavar="ATTACK", required=True)
    words = sys.argv[1:] if argv is None else argv
    for name in ATTACKS if not set(words[:1]) & set(ATTACKS) else words[:1]:  # what one needs, others need not
        module = import_module(f"tests.stress.{'everything' if name == 'all' else name}")
        (kind,) = (of for of in Attack.__subclasses__() + Numbered.__subclasses__() if of.__module__ == module.__name__)
        doc, raw = str(module.__doc__), argparse.RawDescriptionHelpFormatter
        own = attacks.add_parser(name, help=doc.partition("\n")[0], description=doc, formatter_class=raw)
        own.add_argument("--seed", type=int, help="from which all choices follow (a new one)")
        own.add_argument("--report", type=Path, metavar="FILE", help="write JSON to FILE, and text beside it")
        own.add_argument("--on-ranks", nargs=2, help=argparse.SUPPRESS)
        kind.add_arguments(own)
        own.set_defaults(attack=name, kind=kind)
    given = parser.parse_args(argv)
    if given.seed is None:
        given.seed = secrets.randbits(31)
    attack: Attack = given.kind(given)
    if given.on_ranks:
        attack.be_rank(*given.on_ranks)
        return 0
    if given.report is not None:
        given.report.unlink(missing_ok=True)
    attack.run()
    if given.report is not None:
        attack.report.write(given.report)
    print(attack.report, flush=True)
    return 1 if attack.report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
