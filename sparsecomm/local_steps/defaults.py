"""What local steps ask of a `Reducer` where their user asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sparsecomm.algorithms import find, name_of
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import ReducerOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DEFAULTS", "with_defaults"]

DEFAULTS: Final[ReducerOptions] = {
    "scope": "chunk",
    "algorithm": "split:2",
    "op": "mean_of_contributors",
    "decay": 0.8,
    "wire": "packed_int2",
    "reorder": False,
}


def with_defaults(specs: Iterable[TensorSpec], **options: Unpack[ReducerOptions]) -> ReducerOptions:
    """Return options of a `Reducer`, with those that trained best where there are none (docs/reports/local-steps.md).

    A default gives way where what was asked for excludes it: contributors cannot be counted by every algorithm, nothing
    decays where nothing is kept, and values of float64 sums travel as they are.

    Raises:
        InvalidInputError: there is no such algorithm.
    """
    name = name_of(options.get("algorithm", DEFAULTS["algorithm"]))
    algorithm = find(name)  # None: "auto", which takes one that fits
    fitting: ReducerOptions = {}
    if algorithm is not None and algorithm.contributors_unknown:
        fitting["op"] = "mean"
    if name == "dense":
        fitting["decay"] = 1.0
    if any(spec.accumulator.itemsize == 8 for spec in specs):
        fitting["wire"] = "auto"
    return {**DEFAULTS, **fitting, **options, "algorithm": name}
