"""What `sparsecomm plan` expects of a cell, where several ranks share a core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsecomm.local_steps.defaults import DEFAULTS, auto
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.tuning.utilisation import Exchange, Network, Training, predict

__all__ = ["planned"]

_DENSITY = 64 / 4096  # of local steps


def planned(row: dict[str, Any], setting: dict[str, Any]) -> float | None:
    """Return the utilisation to expect, ``None`` where there are no links.

    Args:
        row: network and method, as `bench.utilisation` has them.
        setting: ranks, elements, the seconds of a step, and the cores on which the ranks are.
    """
    if not row["rate"]:
        return None
    if row["kind"] == "dense":
        exchange = Exchange(sync_every=row["H"])
    elif row["kind"] == "local":
        delay = row.get("options", {}).get("fragment_sync_delay", 0)
        exchange = Exchange(auto(row["H"]), DEFAULTS["wire"], _DENSITY, row["H"], delay)
    else:
        exchange = Exchange("auto", density=row["density"])
    training = Training(setting["ranks"], setting["elements"], setting["step"])
    per_core = max(1.0, setting["ranks"] / setting["cores"])
    work = {name: per_core * getattr(DEFAULT, name) for name in ("select", "merge", "codec", "add", "call")}
    network = Network(row["rate"], row["rtt"], row["loss"])
    return predict(training, network, exchange, replace(DEFAULT, **work)).utilisation
