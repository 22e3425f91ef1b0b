"""Predictions of the model behind `sparsecomm plan` for measured cells, on cores that ranks share.

Cells on links without delay and losses calibrate the work: their CPU time says how much longer the measured version
worked than the model assumes. All other cells are held out: nothing is fitted to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sparsecomm.local_steps.defaults import DEFAULTS, auto
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.tuning.utilisation import Exchange, Network, Prediction, Training, predict

Row = dict[str, Any]
_DENSITY = 64 / 4096  # of local steps
_PARTS = 8  # a slept step changes a part of the parameters, by `bench.utilisation.worker`: one of 8 at most
_MIN_QUEUE = 0.032  # seconds that a packet may wait in front of an emulated link: the round trip, but at least this


def is_held_out(row: Row) -> bool:
    """Return whether a cell is on a link with delay or losses, so that nothing is fitted to it."""
    return bool(row["rtt"] or row["loss"])


def predictions(rows: Iterable[Row], setting: Row) -> list[float | None]:
    """Return the predicted utilisation of each cell; ``None`` where there are no links.

    Args:
        rows: cells of `bench.utilisation`.
        setting: ranks, elements, the seconds of a step, and the cores on which the ranks are.
    """
    rows = list(rows)
    factors: dict[str, list[float]] = {}
    for row in rows:
        if row["rate"] and not is_held_out(row) and row["kind"] != "dense":
            factors.setdefault(_work_of(row), []).append(_worked(row, setting) / _prediction(row, setting, 1.0).work)
    slower = {work: statistics.median(each) for work, each in factors.items()}
    return [
        _prediction(row, setting, slower.get(_work_of(row), 1.0)).utilisation if row["rate"] else None for row in rows
    ]


def _work_of(row: Row) -> str:
    return "local" if row["kind"] == "local" else str(row["method"])


def _worked(row: Row, setting: Row) -> float:
    """Return the CPU seconds of a rank in a round, without those of the steps."""
    steps = min(1.0, row["H"] / _PARTS) * DEFAULT.add * setting["elements"]
    return float(row["busy"] * row["round_s"] * setting["cores"] / setting["ranks"] - steps)


def _prediction(row: Row, setting: Row, slower: float) -> Prediction:
    """Return the prediction for a cell, with work that takes ``slower`` times as long as the model assumes."""
    if row["kind"] == "dense":
        exchange = Exchange(sync_every=row["H"])
    elif row["kind"] == "local":
        delay = row.get("options", {}).get("fragment_sync_delay", 0)
        exchange = Exchange(auto(row["H"]), DEFAULTS["wire"], _DENSITY, row["H"], delay)
    else:
        exchange = Exchange("fastest", density=row["density"])
    cores = setting["cores"] / setting["ranks"]
    training = Training(setting["ranks"], setting["elements"], setting["step"], min(1.0, cores))
    costs = replace(DEFAULT, **{name: slower * getattr(DEFAULT, name) for name in ("select", "merge", "codec", "add")})
    network = Network(row["rate"], row["rtt"], row["loss"], queue=max(row["rtt"], _MIN_QUEUE))
    return predict(training, network, exchange, costs)
