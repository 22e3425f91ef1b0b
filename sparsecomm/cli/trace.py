"""Read the files of SPARSECOMM_TRACE: who waited for whom, which rank caused a failure, and one timeline of all ranks.

  SPARSECOMM_TRACE=trace.json mpirun -n 4 python train.py
  sparsecomm trace trace.*.json --output timeline.json

Each rank writes a file while its calls are made, even if a call fails or the rank is killed. Columns of the table:

  calls        number of calls that the rank made
  select ...   seconds in each part of its calls
  late         seconds in which it waited for ranks that had not begun to send
  to nodes     bytes sent to other nodes, if nodes have several ranks
  made late    seconds in which other ranks waited for this one: it computed, was stuck, or was late itself
  clock        milliseconds by which its clock was ahead of the first rank's, and the maximum error

Messages between nodes are used to align the nodes' clocks. Open the output, or the file of a single rank, in
https://ui.perfetto.dev or chrome://tracing: it has a row for each rank and communicator, and an arrow for each message.
The command exits with status 1 if a call failed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from sparsecomm.errors import InvalidInputError
from sparsecomm.quantities import bytes_text, number_text
from sparsecomm.tools import options
from sparsecomm.tools.outputs import Column, table_head, table_line
from sparsecomm.tracing.events import Message, Rank, clock_offsets, late_senders, messages, read, verdicts
from sparsecomm.tracing.observers import PARTS
from sparsecomm.tuning.clocks import Offset

HELP = "read the files of SPARSECOMM_TRACE: who waited for whom, which rank caused a failure, one timeline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one file per rank")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the timeline of all ranks to this file")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the verdicts, and write the timeline; return 1 if a call failed, else 0."""
    output: Path | None = arguments.output
    if output is not None:
        options.check_writable(output)
        if output.exists() and any(path.exists() and output.samefile(path) for path in arguments.files):
            raise InvalidInputError(f"--output {output}: is one of the files to be read; name another")
    ranks = read(arguments.files)
    ahead, sent = clock_offsets(ranks), list(messages(ranks))
    late = late_senders(sent, ahead)
    to_nodes = bytes_out(ranks, sent)
    rows = [_row(rank, ahead[number], late, to_nodes) for number, rank in ranks.items()]
    columns = [_column(name, rows) for name in rows[0] if name not in PARTS or any(row[name] != "0" for row in rows)]
    print(table_head({}, columns))
    for row in rows:
        print(table_line(row, columns))
    failures = verdicts(ranks)
    print("\n" + ("\n\n".join(failures) if failures else "All calls ended well."))
    if output is not None:
        with options.writing(output):
            output.write_text("[\n" + ",\n".join(map(json.dumps, _timeline(ranks, sent, ahead))) + "\n]\n")
        print(f"\nThe timeline is in {output}: open it in https://ui.perfetto.dev")
    return 1 if failures else 0


def bytes_out(ranks: Mapping[int, Rank], sent: list[Message]) -> Mapping[int, int] | None:
    """Return the bytes that each rank has sent to other nodes; ``None`` for one node, or nodes of one rank each."""
    node = {number: rank.node for number, rank in ranks.items()}
    if not 1 < len(set(node.values())) < len(node):
        return None
    out = dict.fromkeys(node, 0)
    for message in sent:
        out[message.sender] += message.nbytes * (node[message.sender] != node[message.receiver])
    return out


def _row(
    rank: Rank, ahead: Offset, late: Mapping[tuple[int, int], float], to_nodes: Mapping[int, int] | None
) -> dict[str, str]:
    """Return the cells of a rank's row, by the names of the columns."""
    calls = [*chain.from_iterable(rank.calls.values())]
    seconds = dict.fromkeys(PARTS, 0.0)
    for call in calls:
        for part in call.parts:
            seconds[part.name] += part.end - part.start
    seconds["late"] = sum(value for (receiver, _), value in late.items() if receiver == rank.number)
    seconds["made late"] = sum(value for (_, sender), value in late.items() if sender == rank.number)
    clock = "unknown" if math.isinf(ahead.bound) else " ± ".join(number_text(1e3 * value) for value in ahead)
    return {
        "rank": str(rank.number),
        "host": rank.host,
        "calls": str(len(calls)),
        **{name: number_text(value) for name, value in seconds.items()},
        "sent": bytes_text(sum(call.sent for call in calls)),
        **({} if to_nodes is None else {"to nodes": bytes_text(to_nodes[rank.number])}),
        "clock": clock,
    }


def _column(name: str, rows: list[dict[str, str]]) -> Column:
    unit = "[s]" if name in (*PARTS, "late", "made late") else "[ms]" if name == "clock" else ""
    width = max(len(text) for text in (name, unit, *(row[name] for row in rows))) + 2
    return Column(name, unit, width, lambda row: row[name])


def _timeline(ranks: Mapping[int, Rank], sent: list[Message], ahead: Mapping[int, Offset]) -> list[dict[str, Any]]:
    """Return all events by the first rank's clock, with two more for each message: the ends of its arrow."""
    events = [
        {**event, "ts": event["ts"] - 1e6 * ahead[number].seconds} if "ts" in event else event
        for number, rank in ranks.items()
        for event in rank.events
    ]
    threads = {
        id(exchange): thread
        for rank in ranks.values()
        for thread, calls in enumerate(rank.calls.values(), 1)
        for call in calls
        for exchange in call.exchanges
    }
    for number, message in enumerate(sent, 1):
        ends = (
            ("s", message.sender, message.sent, message.sent.start),
            ("f", message.receiver, message.received, message.received.end),
        )
        for kind, rank, exchange, seconds in ends:
            event = {"name": f"{message.nbytes} bytes", "cat": "message", "ph": kind, "id": number, "bp": "e"}
            event |= {"ts": 1e6 * (seconds - ahead[rank].seconds), "pid": rank, "tid": threads[id(exchange)]}
            events.append(event)
    return events
