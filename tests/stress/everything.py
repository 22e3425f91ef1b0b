"""All attacks, one after another, each in a process of its own: some minutes with ``--scale 1``.

The reports of the attacks are written beside that of all: NAME.json and NAME.txt.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.processes import ROOT
from tests.stress.harness import Attack

__all__ = ["Everything"]

_ATTACKS = {  # numbers are scaled
    "calls": "--calls 4000",
    "messages": "--messages 500_000",
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
    "signals": "--calls 1000",
    "interrupts": "--over mpi --stride 0 --signals 50",
    "endurance": "--calls 20_000 --communicators 300",
    "stopped": "--rounds 2",
    "strangers": "--connections 40_000",
    "soak": "--no-network --minutes 1",
    "lost": "--runs 2",
}


class Everything(Attack):
    options = (("scale", 1.0, "by which all numbers are multiplied"),)

    def run(self) -> None:
        """Run all attacks."""
        with tempfile.TemporaryDirectory(prefix="sparsecomm-stress-") as temporary:
            folder = Path(temporary) if self.given.report is None else self.given.report.resolve().parent
            for name, options in _ATTACKS.items():
                words = [name.split()[0], "--seed", str(self.report.seed)]
                for word in options.replace("BUILD", f"{temporary}/sanitized").split():
                    number = word[0].isdigit() and max(word != "0", round(int(word) * self.given.scale))
                    words.append(word if number is False else str(number))
                file = folder / f"{name.replace(' ', '-')}.json"
                file.unlink(missing_ok=True)
                command = [sys.executable, "-m", "tests.stress", *words]
                subprocess.run([*command, "--report", str(file)], cwd=ROOT, check=False)
                if file.exists():
                    self.report.add(json.loads(file.read_text()), f"{name}: ")
                else:
                    self.report.failures.append((f"{name} ended without a report", shlex.join(command[1:])))
