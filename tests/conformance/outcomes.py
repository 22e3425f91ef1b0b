"""The outcome of each case, and the table of all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Result = Literal["passed", "not applicable", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of one case of a suite.

    Attributes:
        suite: the name of the suite, with the version of the package that ships it.
        case: the name of the test, script or configuration.
        result: "not applicable" also if an option was refused by name, as documented.
        reason: why it is not applicable, or the end of the output of a failure.
    """

    suite: str
    case: str
    result: Result
    reason: str = ""


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table with one row per suite, and below it a list of reasons, and of failures."""
    suites: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        suites.setdefault(outcome.suite, []).append(outcome)
    lines = ["| suite | cases | ran | passed | failed | not applicable |", "|---|---|---|---|---|---|"]
    for suite, its in suites.items():
        count = Counter(outcome.result for outcome in its)
        ran = count["passed"] + count["failed"]
        numbers = (len(its), ran, count["passed"], count["failed"], count["not applicable"])
        lines.append(f"| {suite} | {' | '.join(map(str, numbers))} |")
    for result in ("not applicable", "failed"):
        for suite, its in suites.items():
            reasons: dict[str, list[str]] = {}
            for outcome in its:
                if outcome.result == result:
                    reasons.setdefault(_line(outcome.reason), []).append(outcome.case)
            if reasons:
                lines += ["", f"{result.capitalize()}, {suite}:", ""]
                lines += [f"- {reason} ({len(cases)}){_joined(cases)}" for reason, cases in reasons.items()]
    return "\n".join(lines)


def _joined(cases: list[str]) -> str:
    text = ": " + ", ".join(f"`{case}`" for case in cases)
    return text if len(text) < 1500 else ""


def _line(reason: str) -> str:
    """Return a reason of one line; of the output of a failure, the exception."""
    return last_error([1], [reason]) if "\n" in reason else reason


def last_error(statuses: Iterable[int | None], outputs: Iterable[str]) -> str:
    """Return the line that names the exception that has ended a rank."""
    for status, output in zip(statuses, outputs, strict=True):
        if status is None:
            continue
        for line in reversed(output.splitlines()):
            if re.match(r"(\w+\.)*\w*(Error|Exception|Warning|Interrupt)\b", line):
                return line[:200]
    return "it hangs" if None in statuses else f"exit statuses {list(statuses)}"
