"""The options that local steps and their adapters share, and the defaults for the options of a `Reducer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

from sparsecomm.algorithms import AlgorithmName, find, name_of
from sparsecomm.checks import Unpack
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.tensors.interop import TensorSpec
from sparsecomm.tuning.equal_loss import TRAINED, nats, relative_steps

_FEWEST_BYTES, _BEST_LOSS = "split:2", "allgather"
DEFAULTS: Final[ReducerOptions] = {
    "scope": "chunk",
    "algorithm": "auto",
    "op": "mean_of_contributors",
    "decay": 0.8,
    "wire": "packed_int2",
    "bucket_bytes": 1 << 40,  # one call for all tensors of a fragment: they are ready together
}


class LocalStepsOptions(ReducerOptions, total=False):
    """Keyword arguments that `sparsecomm.LocalSteps` and its adapters share. `LocalSteps` documents them."""

    sync_every: int
    by_speed: bool
    deadline: float | None
    fragment_sync_delay: int
    fragment_update_alpha: float
    skip_nonfinite: bool


def auto_algorithm(sync_every: int) -> AlgorithmName:
    """Return the choice that "auto" stands for: of two algorithms, the one that reaches the same loss in less time.

    `_FEWEST_BYTES` needs more rounds than `_BEST_LOSS`, so its predicted time is multiplied by the ratio of rounds
    (docs/reports/local-steps.md). The time of local steps is not counted, which favours `_FEWEST_BYTES`.
    """
    H = min(sync_every, TRAINED[_FEWEST_BYTES][-1][0])
    more = round(relative_steps(nats(_FEWEST_BYTES, H)) / relative_steps(nats(_BEST_LOSS, H)), 2)
    weight = f"*{more:g}" if more > 1 else ""
    return cast("AlgorithmName", f"{_FEWEST_BYTES}{weight}|{_BEST_LOSS}")


def with_defaults(specs: Iterable[TensorSpec], sync_every: int, **options: Unpack[ReducerOptions]) -> ReducerOptions:
    """Return options of a `Reducer`, with `DEFAULTS` adapted to the other options.

    Not every algorithm counts contributors, a dense sum leaves no residual to decay, and float64 sums are sent exactly.
    """
    name = name_of(options.get("algorithm", DEFAULTS["algorithm"]))
    name = auto_algorithm(sync_every) if isinstance(name, str) and name == "auto" else name
    algorithm = find(name)  # None for a choice of several; then one that counts contributors is chosen
    fitting: ReducerOptions = {}
    if algorithm is not None and algorithm.cannot_count_contributors:
        fitting["op"] = "mean"
    if name == "dense":
        fitting["decay"] = 1.0
    if any(spec.accumulator.itemsize == 8 for spec in specs):
        fitting["wire"] = "auto"
    return {**DEFAULTS, **fitting, **options, "algorithm": name}
