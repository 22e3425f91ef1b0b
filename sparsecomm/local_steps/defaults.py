"""What local steps ask of a `Reducer` where their user asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sparsecomm.algorithms import find
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.wire import MEAN_OF_CONTRIBUTORS

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["with_defaults"]


def with_defaults(specs: Iterable[TensorSpec], **options: Unpack[ReducerOptions]) -> ReducerOptions:
    """Return options of a `Reducer`, with those that trained best where there are none (docs/reports/local-steps.md).

    A default gives way where what was asked for excludes it: contributors cannot be counted by every algorithm, nothing
    decays where nothing is kept, and values of float64 sums travel as they are.

    Raises:
        InvalidInputError: there is no such algorithm.
    """
    name = options.get("algorithm", "split:2")
    algorithm = find(name)  # None: "auto", which takes one that fits
    counts = (algorithm is None or not algorithm.contributors_unknown) and not options.get("complete")
    narrow = all(spec.accumulator.itemsize == 4 for spec in specs)
    defaults: ReducerOptions = {
        "scope": "chunk",
        "algorithm": name,
        "op": MEAN_OF_CONTRIBUTORS if counts else "mean",
        "decay": 1.0 if name == "dense" else 0.8,
        "wire": "packed_int2" if narrow else "auto",
        "reorder": False,
    }
    return {**defaults, **options}
