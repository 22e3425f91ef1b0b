"""The tensors of a reducer, and the layout that assigns them to buckets."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sparsecomm.checks import check_choice, number, shown
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType
from sparsecomm.tensors.interop import Tensor

__all__ = ["FILLED", "NamedTensors", "TensorSpec", "check_layout", "layout", "specs_of"]

NamedTensors: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]]"
FILLED = ("bucket", "chunk")  # scopes whose buckets have a size in bytes
SCOPES = ("tensor", "bucket", "model", "chunk")


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and device of a tensor, and the dtype in which its gradients are summed.

    Attributes:
        size: number of elements.
    """

    name: str
    shape: tuple[int, ...]
    accumulator: DType
    device: interop.Device
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self.size * self.accumulator.itemsize

    def tensor(self, obj: object, name: str, *, writable: bool = False) -> Tensor:
        """Import an array that must match this spec: a gradient, an output or the tensor itself.

        Args:
            obj: the array.
            name: its name in error messages.
            writable: require that it can be written.

        Raises:
            InvalidInputError: it does not match, or cannot be written.
        """
        t = interop.tensor(obj, name, writable=writable)
        if (t.shape, t.device, t.dtype.accumulator) != (self.shape, self.device, self.accumulator.accumulator):
            raise InvalidInputError(
                f"{name}: got shape {t.shape}, {t.dtype} on {t.device}; expected shape {self.shape} with sums in "
                f"{self.accumulator} on {self.device}, as at the beginning. If the model has changed, make a new object"
            )
        return t


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


def check_layout(scope: str, dense_below: int, scopes: Sequence[str] = SCOPES) -> int:
    """Check the options of `layout`, and return ``dense_below`` as an int.

    Raises:
        InvalidInputError: ``scope`` is not one of ``scopes``, or ``dense_below`` is not a number of elements.
    """
    check_choice("scope", scope, scopes)
    elements = number(dense_below)
    if not (elements >= 0 and elements.is_integer()):
        raise InvalidInputError(f"dense_below={shown(dense_below)}: must be a number of elements, at least 0")
    return int(elements)


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
