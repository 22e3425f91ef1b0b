"""Random attacks, of any length: ``python -m tests.stress calls --cases 1000 --seed 7``.

Case N of an attack is ``check(seed, N)`` of its module, which returns the kind of outcome, and raises an exception if
the case fails. Each failure is printed with a command that repeats it; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

from tests import sanitizers
from tests.processes import LIMIT, ROOT

# Name of an attack: (cases by default, cases per process, cases with sanitizers). If a process crashes, its cases are
# lost, and the crash is a failure.
ATTACKS = {"calls": (8000, 1000, 300), "messages": (1000, 100, 100), "lives": (60, 20, 0)}
CASE_LIMIT = 300  # seconds, after which a case counts as hanging
PROGRESS = 30.0  # seconds between two lines about progress


def check_here(attack: str, seed: int, cases: range) -> dict[str, Any]:
    """Check cases in this process. Return the counts of outcomes, and the failures."""
    check, counts, failures = import_module(f"tests.stress.{attack}").check, Counter[str](), []
    for number in cases:
        faulthandler.dump_traceback_later(CASE_LIMIT, exit=True)
        try:
            counts[check(seed, number)] += 1
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip() or repr(error)}"
            failures.append(f"{text}\n  repeat: {' '.join(command(attack, seed, range(number, number + 1)))}")
    faulthandler.cancel_dump_traceback_later()
    return {"counts": counts, "failures": failures}


def command(attack: str, seed: int, cases: range) -> list[str]:
    numbers = {"seed": seed, "first": cases.start, "cases": len(cases), "jobs": 0}
    return ["-m", "tests.stress", attack, *(f"--{name}={value}" for name, value in numbers.items())]


def check_in_processes(attack: str, seed: int, cases: range, jobs: int, sanitized: str = "") -> dict[str, Any]:
    """Check cases in several processes. ``sanitized``: see `tests.sanitizers.build`."""
    root, environment, counts, failures = ROOT, {}, Counter[str](), list[str]()
    if sanitized:
        root, environment = Path(sanitized).resolve(), sanitizers.environment()
        assert sanitizers.build(root), "the sanitizers do not see a write behind the end of an array"
    began = reported = time.monotonic()
    done, per_process = 0, ATTACKS[attack][1]

    def check_part(part: range) -> tuple[range, dict[str, Any]]:
        words = [sys.executable, *command(attack, seed, part)]
        environ = os.environ | {"PYTHONPATH": str(root)} | environment
        ran = subprocess.run(words, cwd=root, env=environ, capture_output=True, text=True, timeout=LIMIT)
        _, _, last = ran.stdout.rstrip().rpartition("\n")
        if ran.returncode in (0, 1) and last.startswith("{"):
            return part, json.loads(last)
        what = f"a process ended with status {ran.returncode}: {ran.stderr[-4000:]}"
        return part, {"counts": {}, "failures": [f"{what}\n  repeat: {' '.join(words[1:])}"]}

    with ThreadPoolExecutor(jobs) as pool:
        parts = [cases[i : i + per_process] for i in range(0, len(cases), per_process)]
        for future in as_completed([pool.submit(check_part, part) for part in parts]):
            part, report = future.result()
            counts.update(report["counts"])
            failures += report["failures"]
            done += len(part)
            if time.monotonic() - reported > PROGRESS:
                reported = time.monotonic()
                print(f"{attack}: {done:,} of {len(cases):,}", file=sys.stderr, flush=True)
    return {"seed": seed, "seconds": round(time.monotonic() - began, 1), "counts": counts, "failures": failures}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("attack", choices=[*ATTACKS, "all"], help="all: one after another, also with sanitizers")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of all choices (a new one)")
    parser.add_argument("--cases", type=int, help="how many; with all, a multiple of the usual numbers")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; 0: only this one")
    parser.add_argument("--sanitized", default="", metavar="FOLDER", help="build and use sanitizers in this folder")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write outcomes to this file, as JSON")
    arguments = parser.parse_args(argv)
    attack, seed, jobs = arguments.attack, arguments.seed, arguments.jobs
    cases = arguments.cases or (1 if attack == "all" else ATTACKS[attack][0])
    if not jobs:
        report = check_here(attack, seed, range(arguments.first, arguments.first + cases))
        print(*report["failures"], sep="\n", file=sys.stderr, flush=True)
        print(json.dumps(report), flush=True)
        return int(bool(report["failures"]))
    with tempfile.TemporaryDirectory(prefix="sparsecomm-stress-") as folder:
        runs = [(attack, range(arguments.first, arguments.first + cases), arguments.sanitized)]
        if attack == "all":
            runs = [(name, range(number * cases), "") for name, (number, _, _) in ATTACKS.items()]
            runs += [(name, range(n * cases), f"{folder}/build") for name, (_, _, n) in ATTACKS.items() if n]
        reports = {}
        for name, numbers, sanitized in runs:
            report = check_in_processes(name, seed, numbers, jobs, sanitized)
            title = f"{name}{' with sanitizers' if sanitized else ''}"
            reports[title] = report
            print(f"{title}: seed {seed}, {report['seconds']} s, {len(report['failures'])} failures")
            print(*(f"{n:>12,} {what}" for what, n in sorted(report["counts"].items())), *report["failures"], sep="\n")
            sys.stdout.flush()
    if arguments.report is not None:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(reports, indent=1) + "\n")
    return int(any(report["failures"] for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
