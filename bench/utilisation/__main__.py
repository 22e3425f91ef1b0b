"""Measure compute time / wall time of training over links with a rate, a delay and losses, by local steps H.

    python -m bench.utilisation                        # as root; all cells: hours
    python -m bench.utilisation --quick                # three networks, two H: minutes
    python -m bench.utilisation --rates 50mbit --rtts 0 80 --losses 0 --methods blocking delayed --H 32
    python -m bench.utilisation --report               # measure nothing: tables, heat maps, plans of what there is

Four ranks, each behind its own link (`bench.slow_network`), train a model of 30.8 million parameters in steps of 30 ms,
as a published measurement of dense sums did. Steps only sleep, which leaves the cores to the exchange. Methods:
``dense`` (local steps by gloo); `sparsecomm.LocalSteps` with its defaults (``blocking``) and with a
``fragment_sync_delay`` of half a round (``delayed``); and with H = 1 sparse means by a `Reducer` (``per-step``).

Results are written to OUT.json one by one, and cells in it are not measured again. OUT.txt has the tables, and
OUT.png the heat maps; docs/reports/slow-links.md has them, after ``python docs/tables.py --write``.

The tables compare each cell with the prediction of `sparsecomm plan` of this checkout. Cells without delay and losses
calibrate how much CPU time the work takes; the other cells are held out, and the tables count how many of these are
within 5 points. Measure cells on links of your own with ``--out``, among them some with ``--rtts 0 --losses 0``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import report
from bench.slow_network.network import parse_rate
from bench.utilisation import grid, tables
from bench.utilisation.grid import Cell, Network
from sparsecomm.tools.outputs import json_text, save

ALL, QUICK = (3.0, 60.0), (1.0, 20.0)  # seconds that the rounds of a cell take at least, and at most
WORKER = Path(__file__).with_name("worker.py")


def main() -> int:
    parser = report.parser(__doc__, prog="python -m bench.utilisation")
    parser.add_argument("--quick", action="store_true", help="some cells, and fewer rounds of each")
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="of each link (1gbit 200mbit 50mbit)")
    parser.add_argument("--rtts", nargs="+", type=float, metavar="MS", help="round trips (0 20 80)")
    parser.add_argument("--losses", nargs="+", type=float, metavar="PERCENT", help="of the packets (0 0.1)")
    parser.add_argument("--methods", nargs="+", choices=grid.METHODS, default=list(grid.METHODS), metavar="METHOD",
                        help=f"of {', '.join(grid.METHODS)} (all)")  # fmt: skip
    parser.add_argument("--H", nargs="+", type=int, metavar="STEPS", help="of a round (1 8 32 128)")
    parser.add_argument("--seconds", nargs=2, type=float, metavar=("LEAST", "MOST"), help="for the rounds (3 60)")
    parser.add_argument("--ranks", type=int, default=grid.RANKS, help="(%(default)s)")
    parser.add_argument("--elements", type=int, metavar="N", help="parameters, in one tensor, instead of the model's")
    parser.add_argument("--step", type=float, default=grid.STEP, help="seconds of a local step (%(default)s)")
    parser.add_argument("--no-network", action="store_true", help="between processes of this machine: a trial")
    parser.add_argument("--out", type=Path, default=Path("bench/results/utilisation"), help="(%(default)s)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    store = Store(options.out, options.ranks, options.elements, options.step)
    failed = [] if options.report else measure(options, store)
    rows = store.rows
    if not rows:
        print(f"bench.utilisation: {store.file} has no results", file=sys.stderr)
        return 1
    store.update()
    run = store.data["runs"][-1]
    report.publish(options.out, report.head(run), tables.tables(rows), store.data)
    if importlib.util.find_spec("matplotlib") is not None and {"dense", "blocking"} & {row["method"] for row in rows}:
        save(tables.heat_maps(tables.by_cell(rows)), options.out.with_name(options.out.name + ".png"), 130)
    for network in failed:
        _say(f"{network}: not measured, see above; start the command again to continue")
    return 1 if failed else 0


class Store:
    """The results in a file, which is replaced atomically."""

    def __init__(self, out: Path, ranks: int, elements: int | None, step: float) -> None:
        self.file = out.with_name(out.name + ".json")
        self.shapes = {"parameters": elements} if elements else grid.SHAPES
        setting = {"ranks": ranks, "elements": sum(self.shapes.values()), "step": step, "cores": os.cpu_count() or 1}
        self.data: dict[str, Any] = {"setting": setting, "runs": [], "rows": [], "pages": {}}
        if self.file.exists():
            self.data = json.loads(self.file.read_text())
            if self.data["setting"] != setting:
                raise SystemExit(f"bench.utilisation: {self.file} is of {self.data['setting']}, not {setting}: --out")
        self.rows: list[dict[str, Any]] = self.data["rows"]  # a result for each cell

    def update(self) -> None:
        """Make plans and the tables of the page anew, and write the file."""
        for row, planned in zip(self.rows, tables.predictions(self.rows, self.data["setting"]), strict=True):
            row["planned"] = planned
        self.data["pages"] = tables.pages(self.rows)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".json.new")
        new.write_text(json_text(report.finite(self.data)))
        new.replace(self.file)


def measure(options: argparse.Namespace, store: Store) -> list[Network]:
    """Measure what is missing, network by network; return the networks on which that failed."""
    if options.no_network:
        wanted = [grid.HERE]
    elif options.quick and not (options.rates or options.rtts or options.losses):
        wanted = grid.QUICK
    else:
        rates = [parse_rate(text) for text in options.rates or ("1gbit", "200mbit", "50mbit")]
        rtts = options.rtts if options.rtts is not None else (0, 20, 80)
        losses = options.losses if options.losses is not None else (0, 0.1)
        wanted = grid.networks(rates, [ms / 1e3 for ms in rtts], [percent / 100 for percent in losses])
    every = options.H or ((8, 32) if options.quick else (1, 8, 32, 128))
    done = {grid.key(row) for row in store.rows}
    missing = {n: [cell for cell in grid.cells(n, options.methods, every) if cell not in done] for n in wanted}
    missing = {network: cells for network, cells in missing.items() if cells}
    _say(f"{sum(map(len, missing.values()))} cells on {len(missing)} networks")
    if missing:
        store.data["runs"].append(report.about("-m bench.utilisation", sys.argv[1:], threads=1))
    failed = []
    for network, cells in missing.items():
        _say(f"{network}: {len(cells)} cells")
        if not on_network(options, store, network, cells):
            failed.append(network)
    return failed


def on_network(options: argparse.Namespace, store: Store, network: Network, cells: list[Cell]) -> bool:
    """Measure cells on one network, and keep the results, also if it is interrupted. Return whether all are there."""
    times = options.seconds or (QUICK if options.quick else ALL)
    with tempfile.TemporaryDirectory(prefix="bench-utilisation.") as folder:
        plan, results, link = (Path(folder, name) for name in ("plan.json", "results.jsonl", "link.json"))
        content = {"shapes": store.shapes, "step": options.step, "seconds": times, "ahead": network.ahead}
        content["cells"] = [cell.plan for cell in cells]
        plan.write_text(json.dumps(content))
        results.touch()
        try:
            status = grid.run(network, options.ranks, [str(WORKER), str(plan), str(results)], link)
        finally:
            rows = [json.loads(line) for line in results.read_text().splitlines()]
            measured = json.loads(link.read_text()) if link.exists() else None
            where = {"rate": network.rate, "rtt": network.rtt, "loss": network.loss}
            where |= {"link": measured, "run": len(store.data["runs"]) - 1}
            store.rows.extend(row | where for row in rows)
            store.update()
    return status == 0 and len(rows) == len(cells)


def _say(text: str) -> None:
    print(f"bench.utilisation: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
    raise SystemExit(130)
