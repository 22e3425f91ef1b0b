"""Assertions about the values of all ranks: they are the same, and nothing was lost between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from sparsecomm import backends
from sparsecomm.quantities import number_text
from sparsecomm.tensors.arrays import Array, TensorLike
from sparsecomm.tensors.interop import content, tensor, to_host
from sparsecomm.tensors.sparse import SparseVector

# An array or tensor of NumPy, PyTorch, JAX or CuPy, a sum, or any nesting of mappings, lists and tuples of these.
Values: TypeAlias = TensorLike | SparseVector | Mapping[str, "Values"] | Sequence["Values"]


def assert_same_on_all_ranks(values: Sequence[Values]) -> None:
    """Raise an `AssertionError` unless all ranks have the same values, bit for bit.

        testing.assert_same_on_all_ranks([result.value for result in testing.run(4, train)])

    Args:
        values: of each rank: an array or tensor of any library, a `SparseVector`, or mappings and lists of these, such
            as ``model.state_dict()``.

    Raises:
        AssertionError: the text names the first value that differs, the rank, and the first element.
    """
    if not values:
        raise AssertionError("there are no values; expected those of at least one rank")
    first = dict(_leaves(values[0]))
    for rank, other in enumerate(values[1:], 1):
        others = dict(_leaves(other))
        if first.keys() != others.keys():
            name = min(first.keys() ^ others.keys())
            raise AssertionError(f"{_described(name)} is on rank {0 if name in first else rank} only")
        for name, value in first.items():
            (kind, mine), (theirs_kind, theirs) = content(value, name or "values"), content(others[name], name)
            if kind != theirs_kind:
                raise AssertionError(f"{_described(name)}: rank 0 has {kind}, and rank {rank} has {theirs_kind}")
            if (different := np.flatnonzero(mine != theirs)).size:
                raise AssertionError(f"{_described(name)}: {_difference(kind, mine, theirs, different, rank)}")


def assert_nothing_lost(
    contributed: Iterable[Values],
    applied: Iterable[Values],
    residuals: Iterable[Values],
    *,
    divisor: int = 1,
    rtol: float = 1e-5,
) -> None:
    """Raise an `AssertionError` unless contributions = divisor * results + residuals, summed over ranks and steps.

        testing.assert_nothing_lost(gradients, sums, residuals, divisor=P)  # of op="mean"

    This holds after any number of steps for calls with a residual, and for a `Reducer` without ``momentum`` and with
    ``decay=1``. A sum counts once, not once for each rank.

    Args:
        contributed: all gradients of all ranks.
        applied: the results of all calls.
        residuals: of all ranks, after the last call.
        divisor: the number of ranks if the results are means.
        rtol: the tolerance for rounding, relative to the sum of the magnitudes of what was contributed to an element.
            Allow more for residuals of 16 bits.
    """
    totals: dict[str, Array] = {}
    magnitudes: dict[str, Array] = {}
    for factor, trees in ((1, contributed), (-divisor, applied), (-1, residuals)):
        for name, value in (leaf for tree in trees for leaf in _leaves(tree)):
            values = _dense(value, name)
            totals[name] = totals.get(name, 0) + factor * values
            if factor == 1:
                magnitudes[name] = magnitudes.get(name, 0) + np.abs(values)
    if not magnitudes:
        raise AssertionError("nothing was contributed; expected at least one gradient")
    for name, total in totals.items():
        lost = np.flatnonzero(~(np.abs(total) <= rtol * magnitudes.get(name, np.zeros(1))))  # true for NaN
        if lost.size:
            raise AssertionError(
                f"{_described(name)}: {lost.size} of {total.size} elements of what was contributed are neither in the "
                f"results nor in the residuals; the first, element {lost[0]}, lacks {number_text(total[lost[0]], 6)}"
            )


def _leaves(values: Values, name: str = "") -> Iterator[tuple[str, TensorLike]]:
    """Yield the arrays in nested values, with names such as "layers.0.weight"."""
    if isinstance(values, SparseVector):
        pairs: Iterable[tuple[object, Values]] = [("indices", values.indices), ("values", values.values)]
    elif isinstance(values, Mapping):
        pairs = values.items()
    elif isinstance(values, (list, tuple)):
        pairs = enumerate(values)
    else:
        array = values if hasattr(values, "__dlpack__") else np.asarray(values)  # a number
        yield name, array
        return
    for key, value in pairs:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _dense(value: TensorLike, name: str) -> Array:
    """Return the elements of a tensor as flat float64 in host memory."""
    t = tensor(value, name or "values")
    return to_host(backends.of(t.device).accumulate(t, None)).astype(np.float64)


def _described(name: str) -> str:
    return repr(name) if name else "the value"


def _difference(kind: str, mine: Array, theirs: Array, different: Array, rank: int) -> str:
    """Return the text of a difference; ``different``: the numbers of the bytes that differ."""
    try:
        dtype = np.dtype(kind.split()[0])
    except TypeError:  # NumPy does not know the type
        return f"ranks 0 and {rank} differ"
    elements = np.unique(different // dtype.itemsize)
    at = elements[0]
    values = [data.view(dtype)[at].item() for data in (mine, theirs)]
    return (
        f"{elements.size} of {mine.size // dtype.itemsize} elements differ; the first, element {at}, is {values[0]!r} "
        f"on rank 0 and {values[1]!r} on rank {rank}"
    )
