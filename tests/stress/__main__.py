"""Attacks on the library, of any length: ``python -m tests.stress ATTACK --seed S --report FILE``.

The exit status is 0 without failures. Each failure is printed with a command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tests.processes import ROOT
from tests.stress.harness import Attack, Numbered

ATTACKS = (
    "calls", "messages", "peers", "inputs", "states", "files", "kills", "threads", "interrupts",
    "endurance", "lost", "lives", "soak", "strangers", "all",
)  # fmt: skip
# The attacks of `all`, whose numbers are multiplied by ``--scale``.
PARTS = {
    "calls": "--calls 4000",
    "messages": "--messages 500_000",
    "peers": "--messages 5000",
    "inputs": "--inputs 3000",
    "states": "--states 1000",
    "states over mpi": "--over mpi --states 50",
    "states over gloo": "--over gloo --states 50",
    "files": "--files 300",
    "kills": "--kills 100",
    "calls with sanitizers": "--sanitized BUILD --calls 300",
    "messages with sanitizers": "--sanitized BUILD --messages 50_000",
    "inputs with sanitizers": "--sanitized BUILD --inputs 500",
    "threads": "--calls 5000 --forks 50",
    "interrupts": "--over mpi --stride 0 --signals 50",
    "endurance": "--calls 20_000 --communicators 300",
    "strangers": "--connections 40_000",
    "soak": "--no-network --minutes 1",
    "lost": "--runs 2",
    "lives": "--lives 60",
}


class All(Attack):
    """All attacks in sequence, each in its own process. They take some minutes with ``--scale 1``.

    Each attack's report is written beside the common one, as NAME.json and NAME.txt.
    """

    options = (("scale", 1.0, "by which all numbers are multiplied"),)

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="sparsecomm-stress-") as temporary:
            folder = Path(temporary) if self.arguments.report is None else self.arguments.report.resolve().parent
            for name, options in PARTS.items():
                words = [name.split()[0], "--seed", str(self.report.seed)]
                for word in options.replace("BUILD", f"{temporary}/sanitized").split():
                    scaled = word[0].isdigit() and word != "0"
                    words.append(str(max(1, round(int(word) * self.arguments.scale))) if scaled else word)
                file = folder / f"{name.replace(' ', '-')}.json"
                file.unlink(missing_ok=True)
                command = [sys.executable, "-m", "tests.stress", *words]
                subprocess.run([*command, "--report", str(file)], cwd=ROOT, check=False)
                if file.exists():
                    self.report.add(json.loads(file.read_text()), f"{name}: ")
                else:
                    self.report.failures.append((f"{name} ended without a report", shlex.join(command[1:])))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    attacks = parser.add_subparsers(metavar="ATTACK", required=True)
    words = sys.argv[1:] if argv is None else argv
    for name in ATTACKS if not set(words[:1]) & set(ATTACKS) else words[:1]:  # imports only this attack's modules
        kind, doc = All, str(All.__doc__)
        if name != "all":
            module = import_module(f"tests.stress.{name}")
            classes = Attack.__subclasses__() + Numbered.__subclasses__()
            (kind,) = (class_ for class_ in classes if class_.__module__ == module.__name__)
            doc = str(module.__doc__)
        raw = argparse.RawDescriptionHelpFormatter
        own = attacks.add_parser(name, help=doc.partition("\n")[0], description=doc, formatter_class=raw)
        own.add_argument("--seed", type=int, help="from which all choices follow (a new one)")
        own.add_argument("--report", type=Path, metavar="FILE", help="write JSON to FILE, and text beside it")
        own.add_argument("--on-ranks", nargs=2, help=argparse.SUPPRESS)
        kind.add_arguments(own)
        own.set_defaults(attack=name, kind=kind)
    arguments = parser.parse_args(argv)
    if arguments.seed is None:
        arguments.seed = secrets.randbits(31)
    attack: Attack = arguments.kind(arguments)
    if arguments.on_ranks:
        attack.be_rank(*arguments.on_ranks)
        return 0
    if arguments.report is not None:
        arguments.report.unlink(missing_ok=True)
    attack.run()
    if arguments.report is not None:
        attack.report.write(arguments.report)
    print(attack.report, flush=True)
    return 1 if attack.report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
