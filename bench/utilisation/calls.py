"""Times of single exchanges on links with a delay, beside those of another checkout.

    python -m bench.utilisation.calls                       # as root; some minutes
    python -m bench.utilisation.calls --against FOLDER      # the library in FOLDER, too, in turn; built in place

Each rank is behind its own link. An exchange begins on all ranks at the same moment of the machine's clock, and ends
when the last rank has the result. The time includes selection, the residual and the dense result, but no barrier.
Between two exchanges, connections are idle for a second, as between rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import report
from bench.utilisation import grid
from bench.utilisation.grid import Network
from sparsecomm.quantities import number_text

HERE, WORKER = Path(__file__).parents[2], Path(__file__).with_name("worker.py")
ROUND = "a round of local steps"


Place = tuple[Network, int]  # and the elements of the model
PLACES: list[Place] = [
    (Network(200e6, 0.08), 2_500_000),
    (Network(200e6, 0.02), 2_500_000),
    (Network(1e9, 0.08, 0.001), 25_600_000),
]
EXCHANGES: dict[str, dict[str, Any]] = {
    "the first call": {"kind": "first", "density": 0.001},
    "per-step 0.001": {"kind": "per-step", "density": 0.001},
    "per-step 0.01": {"kind": "per-step", "density": 0.01},
    "double 0.001": {"kind": "single", "density": 0.001, "options": {"algorithm": "double", "wire": "packed"}},
    "allgather 0.001": {"kind": "single", "density": 0.001, "options": {"algorithm": "allgather", "wire": "packed"}},
    "SparseAdamW": {"kind": "adamw"},
    ROUND: {"kind": "local"},
    "a round, split:2": {"kind": "local", "options": {"algorithm": "split:2"}},
    "a round, allgather": {"kind": "local", "options": {"algorithm": "allgather"}},
    "dense, gloo": {"kind": "dense"},
}


def main() -> int:
    options = _parser().parse_args()
    folders = {"this": HERE} | ({"that": options.against.resolve()} if options.against else {})
    cells = [{"name": name, "times": options.times, **EXCHANGES[name]} for name in options.exchanges]
    sites = [(network, n) for network, n in PLACES if not options.elements or n in options.elements]
    sites = [place for place in sites if not options.rtts or 1e3 * place[0].rtt in options.rtts]
    if options.no_network:
        sites = [(grid.HERE, n) for n in options.elements or (2_500_000,)]
    times: dict[tuple[Place, str, str], list[float]] = {}
    sent: dict[tuple[Place, str], int] = {}
    for place in sites:
        for _ in range(options.turns):
            for which, folder in reversed(folders.items()):
                for row in _turn(place, cells, options, folder):
                    times.setdefault((place, which, row["name"]), []).extend(row["seconds"])
                    sent[place, row["name"]] = row["sent"]
    rows = list(_rows(times, sent, sites, options.exchanges))
    columns: list[report.Column] = [
        ("link", lambda row: row["link"]),
        ("elements", lambda row: f"{row['n'] / 1e6:g}M"),
        ("exchange", lambda row: row["exchange"]),
        *(
            (f"{which} checkout, ms: median (minimum - maximum)", lambda row, which=which: _text(row.get(which)))
            for which in reversed(folders)
        ),
        ("sent by rank 0, kB", lambda row: row["sent"] and f"{row['sent'] / 1e3:.1f}"),
    ]
    run = report.about("-m bench.utilisation.calls", sys.argv[1:], threads=1)
    table = report.table(rows, columns, title="an exchange: median (least - most)", title_justify="left")
    page = [[head for head, _ in columns], *(["" if (text := cell(row)) is None else str(text) for _, cell in columns]
                                            for row in rows)]  # fmt: skip
    report.publish(options.write, report.head(run), [table], {"run": run, "calls": rows, "pages": {"slow_calls": page}})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__, prog="python -m bench.utilisation.calls")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--exchanges", nargs="+", choices=EXCHANGES, default=list(EXCHANGES), metavar="NAME",
                        help=f"of: {', '.join(EXCHANGES)} (all)")  # fmt: skip
    parser.add_argument("--elements", nargs="+", type=int, metavar="N", help="2500000 or 25600000 (both)")
    parser.add_argument("--rtts", nargs="+", type=float, metavar="MS", help="20 or 80 (both)")
    parser.add_argument("--ranks", type=int, default=grid.RANKS, metavar="P", help="(%(default)s)")
    parser.add_argument("--no-network", action="store_true", help="between processes of this machine: a trial")
    parser.add_argument("--times", type=int, default=5, help="exchanges of a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each checkout (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    return parser


def _turn(place: Place, cells: list[dict[str, Any]], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure the exchanges once, with the library in a folder."""
    with tempfile.TemporaryDirectory(prefix="bench-calls.") as temporary:
        plan, results = Path(temporary, "plan.json"), Path(temporary, "results.jsonl")
        network, n = place
        content = {"shapes": {"parameters": n}, "ahead": network.ahead, "cells": cells}
        plan.write_text(json.dumps(content))
        results.touch()
        more = {"PYTHONPATH": str(folder)}
        status = grid.run(network, options.ranks, [str(WORKER), str(plan), str(results)], more=more)
        if status:
            raise SystemExit(f"bench.utilisation.calls: the ranks ended with status {status}")
        return [json.loads(line) for line in results.read_text().splitlines()]


def _rows(
    times: dict[tuple[Place, str, str], list[float]],
    sent: dict[tuple[Place, str], int],
    sites: list[Place],
    names: list[str],
) -> Iterator[dict[str, Any]]:
    for place in sites:
        for name in names:
            row: dict[str, Any] = {"link": str(place[0]), "n": place[1], "exchange": name}
            for which in ("that", "this"):
                if seconds := times.get((place, which, name)):
                    row[which] = [1e3 * of(seconds) for of in (statistics.median, min, max)]
            row["sent"] = sent[place, name] or None
            yield row


def _text(times: list[float] | None) -> str | None:
    return times and "{} ({} - {})".format(*(number_text(ms) for ms in times))


if __name__ == "__main__":
    raise SystemExit(main())
