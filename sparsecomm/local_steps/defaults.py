"""What local steps ask of a `Reducer` where their user asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sparsecomm.algorithms import find, name_of
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import ReducerOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AUTO", "DEFAULTS", "with_defaults"]

# What "auto" stands for here: "split:2", and whatever trains at least as well in equally many rounds, by
# docs/reports/local-steps.md. Each wins where bytes cost much, or trips.
AUTO: Final = "split:2|allgather"
DEFAULTS: Final[ReducerOptions] = {
    "scope": "chunk",
    "algorithm": "auto",
    "op": "mean_of_contributors",
    "decay": 0.8,
    "wire": "packed_int2",
    "reorder": False,
    "bucket_bytes": 1 << 40,  # a fragment's tensors are ready at once: a call for all of them takes the fewest trips
}


def with_defaults(specs: Iterable[TensorSpec], **options: Unpack[ReducerOptions]) -> ReducerOptions:
    """Return options of a `Reducer`, with those that trained best where there are none (docs/reports/local-steps.md).

    A default gives way where what was asked for excludes it: contributors cannot be counted by every algorithm, nothing
    decays where nothing is kept, and values of float64 sums travel as they are. "auto" becomes `AUTO`: fewer entries
    than that in the result would make a call faster, and trainings of few rounds worse.

    Raises:
        InvalidInputError: there is no such algorithm.
    """
    name = name_of(options.get("algorithm", DEFAULTS["algorithm"]))
    name = AUTO if isinstance(name, str) and name == "auto" else name
    algorithm = find(name)  # None: one that fits is taken of several
    fitting: ReducerOptions = {}
    if algorithm is not None and algorithm.contributors_unknown:
        fitting["op"] = "mean"
    if name == "dense":
        fitting["decay"] = 1.0
    if any(spec.accumulator.itemsize == 8 for spec in specs):
        fitting["wire"] = "auto"
    return {**DEFAULTS, **fitting, **options, "algorithm": name}
