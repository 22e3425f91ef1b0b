"""What `sparsecomm plan` expects of a cell."""

from __future__ import annotations

from typing import Any

from sparsecomm.local_steps.defaults import DEFAULTS, auto
from sparsecomm.tuning.utilisation import Exchange, Network, Training, predict

__all__ = ["planned"]

_DENSITY = 64 / 4096  # of local steps


def planned(row: dict[str, Any], setting: dict[str, Any]) -> float | None:
    """Return the utilisation to expect, ``None`` where there are no links.

    Args:
        row: network and method, as `bench.utilisation` has them.
        setting: ranks, elements, and the seconds of a step.
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
    return predict(training, Network(row["rate"], row["rtt"], row["loss"]), exchange).utilisation
