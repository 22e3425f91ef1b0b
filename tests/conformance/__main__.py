"""``python -m tests.conformance``: run tests of other projects with this library, and print a table of outcomes."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path

from tests.conformance.outcomes import Outcome, table

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- written by python -m tests.conformance --write -->", "<!-- end -->"
SUITES = ("adamw", "ddp", "accelerate_scripts", "optax_tests")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="the part that CI runs")
    parser.add_argument("--json", type=Path, help="write outcomes to this file")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}, with all suites")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}; expected some of {', '.join(SUITES)}")
    outcomes: list[Outcome] = []
    for name in options.suites or SUITES:
        suite = importlib.import_module(f"tests.conformance.{name}")
        began = time.monotonic()
        for outcome in suite.outcomes(quick=options.quick):
            outcomes.append(outcome)
            now = time.monotonic()
            print(f"{now - began:6.1f} s  {outcome.result:14}  {name}: {outcome.case}", file=sys.stderr, flush=True)
            began = now
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))
    print(table(outcomes))
    for failure in (outcome for outcome in outcomes if outcome.result == "failed"):
        print(f"\n== {failure.suite}: {failure.case}\n{failure.reason}")
    if options.write:
        before, begin, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{begin}\n\n{table(outcomes)}\n\n{END}{rest.partition(END)[2]}")
    return int(any(outcome.result == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
