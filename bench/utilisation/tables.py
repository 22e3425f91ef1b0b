"""The tables and heat maps of `bench.utilisation`, and the predictions of `sparsecomm plan` for its cells.

Cells on links without delay and losses calibrate the work: their CPU time says how much longer the measured version
worked than the model assumes. All other cells are held out: nothing is fitted to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from rich.table import Table

from bench import report
from bench.utilisation.grid import EXCHANGE, PUBLISHED, STEP, Cell, Network, key
from sparsecomm.local_steps.defaults import DEFAULTS, auto_algorithm
from sparsecomm.quantities import bytes_text, number_text, percent_text, rate_text
from sparsecomm.tools.outputs import pyplot
from sparsecomm.tuning import utilisation as model
from sparsecomm.tuning.profile import DEFAULT

Row = dict[str, Any]
Cells = dict[Cell, Row]
LOCAL = ("dense", "blocking", "delayed")
STEPS = ("per-step 0.01", "per-step 0.001")
GOOD = 5.0  # points by which a plan may be off


def by_cell(rows: Iterable[Row]) -> Cells:
    """Return the results by cell."""
    return {key(row): row for row in rows}


def percent(value: float | None) -> str:
    """Return a utilisation as the page shows it: a tenth of a point where it is small."""
    if value is None:
        return "-"
    return f"{100 * value:.2f}" if value < 0.00995 else f"{100 * value:.1f}" if value < 0.0995 else f"{100 * value:.0f}"


def cells_table(rows: list[Row]) -> Table:
    """Return a line for each cell."""
    columns: list[report.Column] = [
        ("rate", lambda row: rate_text(row["rate"])),
        ("RTT, ms", lambda row: f"{1e3 * row['rtt']:g}"),
        ("loss", lambda row: percent_text(row["loss"])),
        ("method", lambda row: row["method"]),
        ("H", lambda row: row["H"]),
        ("utilisation, %", lambda row: percent(row["utilisation"])),
        ("planned", lambda row: percent(row.get("planned"))),
        ("held out", lambda row: "yes" if is_held_out(row) else "no"),
        ("points off", lambda row: None if row.get("planned") is None else f"{_off(row):+.1f}"),
        ("round, s", lambda row: number_text(row["round_s"])),
        ("exchange, s", lambda row: number_text(max(0.0, row["exchange_s"]))),
        ("rounds", lambda row: row["rounds"]),
        ("sent, rank 0", lambda row: bytes_text(row["sent"]) if "sent" in row else None),
        ("cores busy", lambda row: f"{row['busy']:.0%}"),
        ("load before", lambda row: f"{row['load']:.1f}"),
    ]
    order = sorted(rows, key=lambda row: (row["loss"], row["rtt"], -row["rate"], row["method"], row["H"]))
    return report.table(order, columns, title="compute time / wall time", title_justify="left")


def _off(row: Row) -> float:
    """Return by how many points a plan is above what was measured."""
    return 100 * float(row["planned"] - row["utilisation"])


def _published_rows(cells: Cells) -> list[list[str]]:
    """Dense cells without delay and losses beside those published.

    The published utilisation counts steps of 26 ms, and at H = 128 one exchange in 180 steps. Its exchanges, in whole
    rounds with steps of ours, are the fair comparison.
    """
    rows = []
    for H, rate in PUBLISHED:
        row = cells.get(Cell(Network(rate), "dense", H))
        if row is None:
            continue
        fair = H * STEP / (H * STEP + EXCHANGE[H, rate])
        rows.append([
            str(H), rate_text(rate), percent(row["utilisation"]), percent(PUBLISHED[H, rate]), percent(fair),
            f"{row['utilisation'] / fair:.2f}", number_text(row["exchange_s"]), number_text(EXCHANGE[H, rate]),
        ])  # fmt: skip
    return rows


PUBLISHED_HEAD = [
    "H",
    "link",
    "measured here, %",
    "published, %",
    "from the published exchange and 30 ms steps, %",
    "measured here / from the published exchange",
    "exchange here, s",
    "published exchange, s",
]


def tables(rows: list[Row]) -> list[Table]:
    """Return all cells, the dense cells beside those published, and the errors of plans by method and by link."""
    published = [PUBLISHED_HEAD, *_published_rows(by_cell(rows))]
    plans = [_plans(rows, "method", _method), _plans(rows, "link", lambda row: str(key(row).network))]
    return [
        cells_table(rows),
        report.table_of_cells(published, "dense local steps, no delay, nothing lost"),
        *(report.table_of_cells(cells, "`sparsecomm plan` against cells held out") for cells in plans),
    ]


def pages(rows: list[Row]) -> dict[str, list[list[str]]]:
    """Return the tables of the page, as lists of cells, the heading first."""
    cells = by_cell(rows)
    result = {
        "utilisation_published": [PUBLISHED_HEAD, *_published_rows(cells)],
        "utilisation_local": _by_network(cells, LOCAL, sorted({cell.H for cell in cells})),
        "utilisation_steps": _by_network(cells, STEPS, [1]),
        "utilisation_plan": _plans(rows, "method", _method),
    }
    return {name: table for name, table in result.items() if len(table) > 1}


def _by_network(cells: Cells, methods: tuple[str, ...], every: list[int]) -> list[list[str]]:
    """Return a row for each delay, loss and H, a column for each rate; in each cell the methods beside each other."""
    rates = sorted({cell.network.rate for cell in cells})
    heads = [f"{rate_text(rate)}: {' / '.join(methods)}" for rate in rates]
    table = [["round trip, ms", "packet loss", *(["H"] if len(every) > 1 else []), *heads]]
    for loss, rtt in sorted({(cell.network.loss, cell.network.rtt) for cell in cells}):
        for H in every:
            lines = [[cells.get(Cell(Network(rate, rtt, loss), method, H)) for method in methods] for rate in rates]
            if any(row for group in lines for row in group):
                texts = [" / ".join(percent(row and row["utilisation"]) for row in group) for group in lines]
                table.append([f"{1e3 * rtt:g}", percent_text(loss), *([str(H)] if len(every) > 1 else []), *texts])
    return table


def _method(row: Row) -> str:
    return str(row["method"])


def _plans(rows: list[Row], name: str, group: Callable[[Row], str]) -> list[list[str]]:
    """Return the errors of plans of cells held out, by group, of all of them, and of the cells that calibrate."""
    errors = ["median error, points", "largest error, points", "cell with the largest error"]
    table = [[name, "cells", f"cells within {GOOD:g} points", *errors]]
    rows = [row for row in rows if row.get("planned") is not None]
    groups: dict[str, list[Row]] = {}
    for row in filter(is_held_out, rows):
        groups.setdefault(group(row), []).append(row)
    groups["all held out"] = list(filter(is_held_out, rows))
    groups["not held out"] = [row for row in rows if not is_held_out(row)]
    for label, rows_of_group in groups.items():
        if rows_of_group:
            worst = max(rows_of_group, key=lambda row: abs(_off(row)))
            off = [abs(_off(row)) for row in rows_of_group]
            at = f"{key(worst).network}, {worst['method']}, H = {worst['H']}"
            within, median = sum(difference <= GOOD for difference in off), f"{statistics.median(off):.1f}"
            table.append([label, str(len(rows_of_group)), str(within), median, f"{_off(worst):+.1f}", at])
    return table


_DENSITY = 64 / 4096  # of local steps
_PARTS = 8  # a slept step changes a part of the parameters, by `bench.utilisation.worker`: one of 8 at most
_MIN_QUEUE = 0.032  # seconds that a packet may wait in front of an emulated link: the round trip, but at least this


def is_held_out(row: Row) -> bool:
    """Return whether a cell is on a link with delay or losses, so that nothing is fitted to it."""
    return bool(row["rtt"] or row["loss"])


def predictions(rows: Iterable[Row], setting: Row) -> list[float | None]:
    """Return the predicted utilisation of each cell; ``None`` where there are no links."""
    rows = list(rows)
    factors: dict[str, list[float]] = {}
    for row in rows:
        if row["rate"] and not is_held_out(row) and row["kind"] != "dense":
            steps = min(1.0, row["H"] / _PARTS) * DEFAULT.add * setting["elements"]  # CPU seconds of the slept steps
            worked = row["busy"] * row["round_s"] * setting["cores"] / setting["ranks"] - steps
            factors.setdefault(_work_of(row), []).append(worked / _prediction(row, setting, 1.0).work)
    slower = {work: statistics.median(values) for work, values in factors.items()}
    return [
        _prediction(row, setting, slower.get(_work_of(row), 1.0)).utilisation if row["rate"] else None for row in rows
    ]


def _work_of(row: Row) -> str:
    return "local" if row["kind"] == "local" else str(row["method"])


def _prediction(row: Row, setting: Row, slower: float) -> model.Prediction:
    """Return the prediction for a cell, with work that takes ``slower`` times as long as the model assumes."""
    if row["kind"] == "dense":
        exchange = model.Exchange(sync_every=row["H"])
    elif row["kind"] == "local":
        delay = row.get("options", {}).get("fragment_sync_delay", 0)
        exchange = model.Exchange(auto_algorithm(row["H"]), DEFAULTS["wire"], _DENSITY, row["H"], delay)
    else:
        exchange = model.Exchange("fastest", density=row["density"])
    cores = setting["cores"] / setting["ranks"]
    training = model.Training(setting["ranks"], setting["elements"], setting["step"], min(1.0, cores))
    costs = replace(DEFAULT, **{name: slower * getattr(DEFAULT, name) for name in ("select", "merge", "codec", "add")})
    network = model.Network(row["rate"], row["rtt"], row["loss"], queue=max(row["rtt"], _MIN_QUEUE))
    return model.predict(training, network, exchange, costs)


TITLES = {"dense": "dense local steps", "blocking": "sparse local steps", "delayed": "sparse local steps, delayed"}


def heat_maps(cells: Cells) -> Any:
    """Return heat maps of utilisation, H against rate: a panel for each method, delay and loss with several cells."""
    methods = [method for method in LOCAL if any(cell.method == method for cell in cells)]
    sites = sorted({(cell.network.loss, cell.network.rtt) for cell in cells})
    every, rates = sorted({cell.H for cell in cells}), sorted({cell.network.rate for cell in cells})
    size = (1.2 + (0.62 * len(rates) + 0.35) * len(sites), 0.9 + (0.36 * len(every) + 0.55) * len(methods))
    figure, grid = pyplot().subplots(
        len(methods), len(sites), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for method, line in zip(methods, grid, strict=True):
        for (loss, rtt), axes in zip(sites, line, strict=True):
            maps = [[cells.get(Cell(Network(rate, rtt, loss), method, H)) for rate in rates] for H in every]
            values = np.array([[np.nan if row is None else 100 * row["utilisation"] for row in rows] for rows in maps])
            axes.set_visible(np.isfinite(values).sum() > 1)
            axes.set_facecolor("0.92")  # not measured
            drawn = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto", origin="lower")
            for i, rows in enumerate(maps):
                for j, row in enumerate(rows):
                    if row is not None:
                        dark = row["utilisation"] < 0.55
                        style = {"color": "white" if dark else "black", "fontsize": 8}
                        axes.text(j, i, percent(row["utilisation"]), ha="center", va="center", **style)
            axes.set_xticks(range(len(rates)), [rate_text(rate) for rate in rates], fontsize=7, rotation=30)
            axes.set_yticks(range(len(every)), [str(H) for H in every], fontsize=8)
            where = f"round trip {1e3 * rtt:g} ms, {percent_text(loss)} lost"
            axes.set_title(f"{TITLES[method]}\n{where}", fontsize=7.5)
        line[0].set_ylabel("H: local steps per round", fontsize=8)
    figure.supxlabel("rate of a link (grey: not measured)", fontsize=8)
    label = "utilisation: compute time / wall time, %"
    figure.colorbar(drawn, ax=grid, label=label, shrink=0.6)
    return figure
