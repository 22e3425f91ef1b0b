"""The options that local steps and their adapters share, and the defaults for the options of a `Reducer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, cast

from sparsecomm.algorithms import AlgorithmName, find, name_of
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.tuning.equal_loss import TRAINED, nats, relative_steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DEFAULTS", "LocalStepsOptions", "auto", "with_defaults"]

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


def auto(sync_every: int) -> AlgorithmName:
    """Return the algorithm that "auto" means: the faster of two to equal loss, in rounds of so many local steps.

    `_BEST_LOSS` trains better in equally many rounds. So the time of `_FEWEST_BYTES` is multiplied by how many more
    rounds it takes to the same loss (docs/reports/local-steps.md). Only exchanges count, which favours fewer bytes.
    """
    H = min(sync_every, TRAINED[_FEWEST_BYTES][-1][0])
    more = round(relative_steps(nats(_FEWEST_BYTES, H)) / relative_steps(nats(_BEST_LOSS, H)), 2)
    weight = f"*{more:g}" if more > 1 else ""
    return cast("AlgorithmName", f"{_FEWEST_BYTES}{weight}|{_BEST_LOSS}")


def with_defaults(specs: Iterable[TensorSpec], sync_every: int, **options: Unpack[ReducerOptions]) -> ReducerOptions:
    """Return options of a `Reducer`, with the defaults that trained best and fit the other options.

    Not every algorithm counts contributors, a dense sum leaves no residual to decay, and float64 sums are sent exactly.
    """
    name = name_of(options.get("algorithm", DEFAULTS["algorithm"]))
    name = auto(sync_every) if isinstance(name, str) and name == "auto" else name
    algorithm = find(name)  # None for a choice of several: one that counts contributors is taken
    fitting: ReducerOptions = {}
    if algorithm is not None and algorithm.contributors_unknown:
        fitting["op"] = "mean"
    if name == "dense":
        fitting["decay"] = 1.0
    if any(spec.accumulator.itemsize == 8 for spec in specs):
        fitting["wire"] = "auto"
    return {**DEFAULTS, **fitting, **options, "algorithm": name}
