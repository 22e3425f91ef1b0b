"""Runs cases on ranks, classifies their outcomes, and makes a table of them.

Ranks are forks of a process that has imported PyTorch once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.processes import free_port

GRACE = 10  # seconds until other ranks are killed after one has failed
SKIPPED = "skipped because: "  # begins the line in which a rank reports why a test was skipped
Ended = tuple[list[int | None], list[str]]  # exit status of each rank (None: killed, it did not end), and its output


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case of a suite.

    Attributes:
        suite: the name of the suite, with the version of the package that ships it.
        case: the name of the test, script or configuration.
        result: "not applicable" also if an option was refused by name, as documented.
        reason: why it is not applicable, or the end of the output of a failure.
    """

    suite: str
    case: str
    result: Literal["passed", "not applicable", "failed"]
    reason: str = ""


# -- ranks ------------------------------------------------------------------------------------------------------------


def run_ranks(P: int, program: Callable[[int], None], seconds: float) -> Ended:
    """Run ``program(rank)`` in P processes, with the environment variables that torchrun sets."""
    with tempfile.TemporaryDirectory() as folder, free_port() as port:
        files = [Path(folder) / str(rank) for rank in range(P)]
        pids = [_fork(rank, P, port, program, files[rank]) for rank in range(P)]
        statuses: list[int | None] = [None] * P
        deadline = time.monotonic() + seconds
        while None in statuses and time.monotonic() < deadline:
            for rank, pid in enumerate(pids):
                if statuses[rank] is None:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        statuses[rank] = os.waitstatus_to_exitcode(status)
                        if statuses[rank]:
                            deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.01)
        for rank, pid in enumerate(pids):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # also the processes that a rank has started
            if statuses[rank] is None:
                os.waitpid(pid, 0)
        return statuses, [file.read_text(errors="replace") if file.exists() else "" for file in files]


def _fork(rank: int, P: int, port: int, program: Callable[[int], None], output: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(to, 1)
        os.dup2(to, 2)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": P, "LOCAL_WORLD_SIZE": P, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        program(rank)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def failed(ended: Ended) -> bool:
    return any(status != 0 for status in ended[0])


def outcome_of_runs(
    suite: str, case: str, run: Callable[[bool], Ended], explained: Mapping[str, str] = {}
) -> Outcome:  # fmt: skip
    """Return the outcome of a case that ``run(True)`` runs with the library, and ``run(False)`` without it.

    ``explained``: assertions of a case that no hook can satisfy.
    """
    ended = run(True)
    if not failed(ended):
        if "exchanged 0" in ended[1][0]:
            return Outcome(suite, case, "not applicable", "passes, but exchanges no gradient by our hook")
        return Outcome(suite, case, "passed")
    if failed(without := run(False)):
        return Outcome(suite, case, "not applicable", f"fails without our hook, too: {last_error(*without)}")
    if case in explained:
        return Outcome(suite, case, "not applicable", explained[case])
    return Outcome(suite, case, "failed", "\n".join(ended[1]))


def outcomes_of_ranks(suite: str, P: int, program: Callable[[int], None], seconds: float) -> Iterator[Outcome]:
    """Run a program whose ranks `report` each case. A case fails if it fails on any rank."""
    ended = run_ranks(P, program, seconds)
    by_rank = [[json.loads(line) for line in output.splitlines() if line.startswith('["')] for output in ended[1]]
    for of_case in zip(*by_rank, strict=False):
        yield Outcome(suite, *next((reported for reported in of_case if reported[1] == "failed"), of_case[0]))
    if failed(ended):
        yield Outcome(suite, "the ranks", "failed", f"ended: {ended[0]}\n" + "\n".join(ended[1]))


def report(case: str, result: str, reason: str = "") -> None:
    print(json.dumps([case, result, reason]), flush=True)


# -- the table --------------------------------------------------------------------------------------------------------


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table with one row per suite, and below it lists of reasons and of failures."""
    suites: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        suites.setdefault(outcome.suite, []).append(outcome)
    lines = ["| suite | cases | ran | passed | failed | not applicable |", "|---|---|---|---|---|---|"]
    for suite, suite_outcomes in suites.items():
        count = Counter(outcome.result for outcome in suite_outcomes)
        ran = count["passed"] + count["failed"]
        numbers = (len(suite_outcomes), ran, count["passed"], count["failed"], count["not applicable"])
        lines.append(f"| {suite} | {' | '.join(map(str, numbers))} |")
    for result in ("not applicable", "failed"):
        for suite, suite_outcomes in suites.items():
            reasons: dict[str, list[str]] = {}
            for outcome in suite_outcomes:
                if outcome.result == result:
                    reason = last_error([1], [outcome.reason]) if "\n" in outcome.reason else outcome.reason
                    reasons.setdefault(reason, []).append(f"`{outcome.case}`")
            if reasons:
                lines += ["", f"{result.capitalize()}, {suite}:", ""]
            for reason, cases in reasons.items():
                text = f": {', '.join(cases)}"
                lines.append(f"- {reason} ({len(cases)}){text if len(text) < 1500 else ''}")
    return "\n".join(lines)


def last_error(statuses: Iterable[int | None], outputs: Iterable[str]) -> str:
    """Return the line that names the exception that ended a rank."""
    for status, output in zip(statuses, outputs, strict=True):
        if status is None:
            continue
        for line in reversed(output.splitlines()):
            if re.match(r"(\w+\.)*\w*(Error|Exception|Warning|Interrupt)\b", line):
                return line[:200]
    return "it hangs" if None in statuses else f"exit statuses {list(statuses)}"
