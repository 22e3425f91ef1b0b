"""Read what SPARSECOMM_TRACE made the ranks write: who waited for whom, which rank is to blame, and one timeline.

  SPARSECOMM_TRACE=trace.json mpirun -n 4 python train.py
  sparsecomm trace trace.*.json --output timeline.json

Each rank writes a file, as its calls are made, also if one fails or the rank is killed. Columns of the table:

  calls        that the rank made
  select ...   seconds in each part of them
  late         seconds in which it waited for ranks that had not begun to send
  made late    seconds in which others waited so for this one: it computed, was stuck, or was late itself
  clock        by how much its clock was ahead of the first rank's, and how sure that is

The clocks of nodes are set right by the messages between them. The output opens in https://ui.perfetto.dev and in
chrome://tracing: a row for each rank and communicator, and an arrow for each message. The file of one rank opens there
as well. The command exits with status 1 if a call did not end well.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsecomm.cli import options
from sparsecomm.cli.outputs import Column, table_head, table_line
from sparsecomm.cli.trace.verdict import verdicts
from sparsecomm.errors import InvalidInputError
from sparsecomm.quantities import bytes_text, number_text
from sparsecomm.tracing.events import Message, Rank, clock_offsets, messages, read
from sparsecomm.tracing.observers import PARTS
from sparsecomm.tuning.clocks import Offset

__all__ = ["HELP", "add_arguments", "run", "waits"]

HELP = "read what SPARSECOMM_TRACE wrote: who waited for whom, which rank is to blame, one timeline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one of each rank")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the timeline of all ranks to this file")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the verdicts, and write the timeline; return 1 if a call did not end well, else 0."""
    if arguments.output is not None:
        options.check_writable(arguments.output)
        if any(_same_file(arguments.output, path) for path in arguments.files):
            raise InvalidInputError(f"--output {arguments.output}: is one of the files to be read; name another")
    ranks = read(arguments.files)
    ahead = clock_offsets(ranks)
    sent = list(messages(ranks))
    late = waits(sent, ahead)
    rows = [_row(rank, ahead[number], late) for number, rank in ranks.items()]
    columns = _columns(rows)
    print(table_head({}, columns))
    for row in rows:
        print(table_line(row, columns))
    said = verdicts(ranks)
    print("\n" + ("\n\n".join(said) if said else "All calls ended well."))
    if arguments.output is not None:
        events = [*_aligned(ranks, ahead), *_arrows(ranks, sent, ahead)]
        with options.writing(arguments.output):
            arguments.output.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
        print(f"\nThe timeline is in {arguments.output}: open it in https://ui.perfetto.dev")
    return 1 if said else 0


def _same_file(a: Path, b: Path) -> bool:
    """Return whether two names lead to one file, by links of any kind."""
    try:
        return a.samefile(b)
    except OSError:  # one of them does not exist
        return False


# -- the table --------------------------------------------------------------------------------------------------------


def waits(sent: list[Message], ahead: Mapping[int, Offset]) -> Counter[tuple[int, int]]:
    """Return the seconds in which a rank, the first of a pair, waited for another that had not begun to send.

    Scalasca calls that "late sender". Of an exchange with several, the last one counts.
    """
    last: dict[int, tuple[float, int, int]] = {}
    for message in sent:
        exchange = message.received
        begun = message.sent.start - ahead[message.sender].seconds
        start, end = (t - ahead[message.receiver].seconds for t in (exchange.start, exchange.end))
        late = min(begun, end) - start
        if late > max(0.0, last.get(id(exchange), (0.0,))[0]):
            last[id(exchange)] = late, message.receiver, message.sender
    found: Counter[tuple[int, int]] = Counter()
    for late, receiver, sender in last.values():
        found[receiver, sender] += late  # type: ignore[assignment]
    return found


def _row(rank: Rank, ahead: Offset, late: Mapping[tuple[int, int], float]) -> dict[str, str]:
    calls = [call for its in rank.calls.values() for call in its]
    seconds = dict.fromkeys(PARTS, 0.0)
    for call in calls:
        for part in call.parts:
            seconds[part.name] += part.end - part.start
    clock = "" if math.isinf(ahead.bound) else f"{number_text(1e3 * ahead.seconds)} ± {number_text(1e3 * ahead.bound)}"
    return {
        "rank": str(rank.number),
        "host": rank.host,
        "calls": str(len(calls)),
        **{name: number_text(value) for name, value in seconds.items()},
        "late": number_text(sum(value for (who, _), value in late.items() if who == rank.number)),
        "made late": number_text(sum(value for (_, whom), value in late.items() if whom == rank.number)),
        "sent": bytes_text(sum(call.sent for call in calls)),
        "clock": clock or "unknown",
    }


def _columns(rows: list[dict[str, str]]) -> list[Column]:
    """Return the columns of a table, as wide as what is in them; of parts, those in which some time was spent."""

    def column(name: str, unit: str = "") -> Column:
        width = max(len(name), len(unit), *(len(row[name]) for row in rows)) + 2
        return Column(name, unit, width, lambda row: row[name])

    parts = [part for part in PARTS if any(row[part] != "0" for row in rows)]
    return [
        column("rank"),
        column("host"),
        column("calls"),
        *(column(name, "[s]") for name in [*parts, "late", "made late"]),
        column("sent"),
        column("clock", "[ms]"),
    ]


# -- the timeline -----------------------------------------------------------------------------------------------------


def _aligned(ranks: Mapping[int, Rank], ahead: Mapping[int, Offset]) -> list[dict[str, Any]]:
    """Return all events, by the clock of the first rank."""
    return [
        {**event, "ts": event["ts"] - 1e6 * ahead[number].seconds} if "ts" in event else event
        for number, rank in ranks.items()
        for event in rank.events
    ]


def _arrows(ranks: Mapping[int, Rank], sent: list[Message], ahead: Mapping[int, Offset]) -> list[dict[str, Any]]:
    """Return two events for each message: an arrow from the exchange that sends it to that which receives it."""
    threads = {
        id(exchange): thread
        for rank in ranks.values()
        for thread, calls in enumerate(rank.calls.values(), 1)
        for call in calls
        for exchange in call.exchanges
    }
    events = []
    for number, message in enumerate(sent, 1):
        ends = [("s", message.sender, message.sent, message.sent.start)]
        ends.append(("f", message.receiver, message.received, message.received.end))
        for kind, rank, exchange, seconds in ends:
            events.append(
                {
                    "name": f"{message.nbytes} bytes",
                    "cat": "message",
                    "ph": kind,
                    "id": number,
                    "ts": 1e6 * (seconds - ahead[rank].seconds),
                    "pid": rank,
                    "tid": threads[id(exchange)],
                    **({"bp": "e"} if kind == "f" else {}),
                }
            )
    return events
