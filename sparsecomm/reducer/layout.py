"""The tensors of a reducer, and their layout in buckets: which of them one call sends, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from sparsecomm.checks import check_choice, quote, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import FILLED, SCOPES
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType

__all__ = ["NamedTensors", "check_layout", "layout", "specs_of"]

NamedTensors: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]]"


def specs_of(tensors: NamedTensors) -> dict[str, TensorSpec]:
    """Return the specs of named tensors, by name, in their order. A `TensorSpec` stands for a tensor.

    Raises:
        InvalidInputError: names are no texts or not unique, a tensor cannot be used, or there is none.
    """
    found: dict[str, TensorSpec] = {}
    for name, tensor in interop.named(tensors):
        if name in found:
            raise InvalidInputError(f"tensors: the name {name!r} is there twice; expected each once")
        if isinstance(tensor, TensorSpec):
            found[name] = tensor
            continue
        t = interop.tensor(tensor, name)
        found[name] = TensorSpec(name, t.shape, FLOAT64 if t.dtype.itemsize == 8 else FLOAT32, t.device)
    if not found:
        raise InvalidInputError("tensors: there are none; expected one at least")
    return found


def check_layout(scope: str, dense_below: int, scopes: Sequence[str] = SCOPES) -> int:
    """Check the settings of `layout`, and return ``dense_below`` as an int.

    Raises:
        InvalidInputError: ``scope`` is none of ``scopes``, or ``dense_below`` is no number of elements.
    """
    check_choice("scope", scope, scopes)
    elements = to_float(dense_below)
    if not (elements >= 0 and elements.is_integer()):
        raise InvalidInputError(f"dense_below={quote(dense_below)}: expected a number of elements, an int from 0 on")
    return int(elements)


def layout(
    tensors: Sequence[TensorSpec], scope: str, dense_below: int, bucket_bytes: int = sys.maxsize
) -> list[tuple[list[int], bool]]:
    """Distribute tensors over buckets.

    Tensors of fewer than ``dense_below`` elements share dense buckets, which come last. Of the others, scope "tensor"
    has a bucket for each, "bucket" and "chunk" fill one until it holds ``bucket_bytes``, and "model" has one for all.
    Tensors of different devices or accumulators never share a bucket.

    Returns:
        The buckets in the order in which they become complete, if the tensors do so in the order given: positions in
        ``tensors``, and whether the bucket is dense.
    """
    buckets: list[tuple[list[int], bool]] = []
    filling: dict[tuple[interop.Device, DType, bool], list[int]] = {}
    filled: dict[tuple[interop.Device, DType, bool], int] = {}  # bytes
    for i, spec in enumerate(tensors):
        dense = spec.size < dense_below
        key = spec.device, spec.accumulator, dense
        filling.setdefault(key, []).append(i)
        filled[key] = filled.get(key, 0) + spec.nbytes
        full = scope == "tensor" or (scope in FILLED and filled[key] >= bucket_bytes)
        if full and not dense:
            buckets.append((filling.pop(key), dense))
            del filled[key]
    buckets += [(members, dense) for (_, _, dense), members in filling.items()]
    return sorted(buckets, key=lambda bucket: (bucket[1], bucket[0][-1]))
