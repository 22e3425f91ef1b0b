"""What local steps ask of a `Reducer` where their user asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, cast

from sparsecomm.algorithms import AlgorithmName, find, name_of
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.tuning.equal_loss import TRAINED, nats, relative_steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DEFAULTS", "auto", "with_defaults"]

_FEWEST_BYTES, _BEST_LOSS = "split:2", "allgather"  # each wins where bytes cost much, or trips and loss
DEFAULTS: Final[ReducerOptions] = {
    "scope": "chunk",
    "algorithm": "auto",
    "op": "mean_of_contributors",
    "decay": 0.8,
    "wire": "packed_int2",
    "bucket_bytes": 1 << 40,  # a fragment's tensors are ready at once: a call for all of them takes the fewest trips
}


def auto(sync_every: int) -> AlgorithmName:
    """Return what "auto" stands for in rounds of so many local steps: what takes fewest seconds to equal loss.

    `_BEST_LOSS` trains better in equally many rounds, so the time of `_FEWEST_BYTES` counts as many times as it takes
    more rounds to the same loss: in the trainings of docs/reports/local-steps.md. Only exchanges are weighed, which is
    in favour of fewer bytes.
    """
    H = min(sync_every, TRAINED[_FEWEST_BYTES][-1][0])
    more = round(relative_steps(nats(_FEWEST_BYTES, H)) / relative_steps(nats(_BEST_LOSS, H)), 2)
    weight = f"*{more:g}" if more > 1 else ""
    return cast("AlgorithmName", f"{_FEWEST_BYTES}{weight}|{_BEST_LOSS}")


def with_defaults(specs: Iterable[TensorSpec], sync_every: int, **options: Unpack[ReducerOptions]) -> ReducerOptions:
    """Return options of a `Reducer`, with those that trained best where there are none (docs/reports/local-steps.md).

    A default gives way where what was asked for excludes it: contributors cannot be counted by every algorithm, nothing
    decays where nothing is kept, and values of float64 sums travel as they are. "auto" becomes `auto`: fewer entries
    than that in the result would make a call faster, and trainings of few rounds worse.

    Raises:
        InvalidInputError: there is no such algorithm.
    """
    name = name_of(options.get("algorithm", DEFAULTS["algorithm"]))
    name = auto(sync_every) if isinstance(name, str) and name == "auto" else name
    algorithm = find(name)  # None: one that fits is taken of several
    fitting: ReducerOptions = {}
    if algorithm is not None and algorithm.contributors_unknown:
        fitting["op"] = "mean"
    if name == "dense":
        fitting["decay"] = 1.0
    if any(spec.accumulator.itemsize == 8 for spec in specs):
        fitting["wire"] = "auto"
    return {**DEFAULTS, **fitting, **options, "algorithm": name}
