"""What `sparsecomm plan` expects of a cell."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sparsecomm.local_steps.defaults import DEFAULTS

__all__ = ["planned"]

_DENSITY = 64 / 4096  # of local steps


def planned(row: dict[str, Any], setting: dict[str, Any]) -> float | None:
    """Return the utilisation to expect, ``None`` where there are no links, or nothing expects any.

    Args:
        row: network and method, as `bench.utilisation` has them.
        setting: ranks, elements, and the seconds of a step.
    """
    if not row["rate"] or find_spec("sparsecomm.tuning.utilisation") is None:
        return None
    model: Any = import_module("sparsecomm.tuning.utilisation")
    if row["kind"] == "dense":
        exchange = model.Exchange(sync_every=row["H"])
    elif row["kind"] == "local":
        delay = row.get("options", {}).get("fragment_sync_delay", 0)
        exchange = model.Exchange(DEFAULTS["algorithm"], DEFAULTS["wire"], _DENSITY, row["H"], delay)
    else:
        exchange = model.Exchange("auto", density=row["density"])
    network = model.Network(row["rate"], row["rtt"], row["loss"])
    training = model.Training(setting["ranks"], setting["elements"], setting["step"])
    return float(model.predict(training, network, exchange).utilisation)
