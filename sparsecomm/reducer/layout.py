"""The tensors of a reducer, and the layout that assigns them to buckets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import FILLED
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType

__all__ = ["NamedTensors", "layout", "specs_of"]

NamedTensors: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]]"


def specs_of(tensors: NamedTensors) -> dict[str, TensorSpec]:
    """Return the specs of named tensors by name, in their order. A `TensorSpec` may take a tensor's place.

    Raises:
        InvalidInputError: a name is not a string or not unique, a tensor is not supported, or there are no tensors.
    """
    specs: dict[str, TensorSpec] = {}
    for name, tensor in interop.named(tensors):
        if name in specs:
            raise InvalidInputError(f"tensors: the name {name!r} appears twice; names must be unique")
        if isinstance(tensor, TensorSpec):
            specs[name] = tensor
            continue
        t = interop.tensor(tensor, name)
        specs[name] = TensorSpec(name, t.shape, FLOAT64 if t.dtype.itemsize == 8 else FLOAT32, t.device)
    if not specs:
        raise InvalidInputError("tensors: must contain at least one tensor")
    return specs


def layout(
    tensors: Sequence[TensorSpec], scope: str, dense_below: int, bucket_bytes: int = sys.maxsize
) -> list[tuple[list[int], bool]]:
    """Assign tensors to buckets.

    Tensors of fewer than ``dense_below`` elements share dense buckets, which come last. The other tensors get a bucket
    each with scope "tensor", and share one with "model"; with "bucket" and "chunk" a bucket is complete when it holds
    ``bucket_bytes``. Tensors of different devices or accumulator dtypes never share a bucket.

    Returns:
        For each bucket, positions in ``tensors`` and whether it is dense. Buckets are in the order in which they
        become complete if gradients become ready in the order of ``tensors``.
    """
    buckets: list[tuple[list[int], bool]] = []
    open_buckets: dict[tuple[interop.Device, DType, bool], list[int]] = {}
    nbytes: dict[tuple[interop.Device, DType, bool], int] = {}
    for i, spec in enumerate(tensors):
        dense = spec.size < dense_below
        key = spec.device, spec.accumulator, dense
        open_buckets.setdefault(key, []).append(i)
        nbytes[key] = nbytes.get(key, 0) + spec.nbytes
        full = scope == "tensor" or (scope in FILLED and nbytes[key] >= bucket_bytes)
        if full and not dense:
            buckets.append((open_buckets.pop(key), dense))
            del nbytes[key]
    buckets += [(positions, dense) for (_, _, dense), positions in open_buckets.items()]
    return sorted(buckets, key=lambda bucket: (bucket[1], bucket[0][-1]))
