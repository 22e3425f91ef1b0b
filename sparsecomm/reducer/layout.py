"""Which tensors are sent by one call, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType

__all__ = ["SCOPES", "Group", "Spec", "layout", "specs_of"]

SCOPES = ("tensor", "bucket", "model")


@dataclass(frozen=True)
class Spec:
    """A tensor, as far as its gradients have to fit."""

    name: str
    shape: tuple[int, ...]
    accumulator: DType  # in which its sums are carried
    device: interop.Device

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.accumulator.itemsize

    def fits(self, t: interop.Tensor) -> bool:
        """Whether it may be a gradient of this tensor, or where a sum goes."""
        return (t.shape, t.device, t.dtype.accumulator) == (self.shape, self.device, self.accumulator.accumulator)


@dataclass(frozen=True)
class Group:
    """Tensors that one call sends, one after another in one vector."""

    specs: tuple[Spec, ...]
    dense: bool  # sent whole


def specs_of(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Spec]:
    """
    Raises:
        InvalidInputError: names are no texts or not unique, a tensor cannot be used, or there is none.
    """
    found: dict[str, Spec] = {}
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(name, str):
            raise InvalidInputError(f"tensors: got the name {name!r}; expected texts, as named_parameters() gives")
        if name in found:
            raise InvalidInputError(f"tensors: the name {name!r} is there twice; expected each once")
        t = interop.tensor(tensor, name)
        found[name] = Spec(name, t.shape, FLOAT64 if t.dtype.itemsize == 8 else FLOAT32, t.device)
    if not found:
        raise InvalidInputError("tensors: there are none; expected one at least")
    return found


def layout(specs: Sequence[Spec], scope: str, bucket_bytes: int, dense_below: int) -> list[Group]:
    """Groups of tensors in the order in which they become complete, if the tensors do so in the order given.

    Small tensors, of less than ``dense_below`` elements, come last, dense. Of the others, "tensor" has a group for
    each; "bucket" fills one until it holds ``bucket_bytes``; "model" has one for all. Different devices and carriers
    never share a group.
    """
    groups: list[tuple[int, Group]] = []
    open_groups: dict[tuple[interop.Device, DType, bool], list[Spec]] = {}

    def close(key: tuple[interop.Device, DType, bool], place: int) -> None:
        groups.append((place + (len(specs) if key[2] else 0), Group(tuple(open_groups.pop(key)), key[2])))

    for place, spec in enumerate(specs):
        if not spec.size:
            continue
        key = spec.device, spec.accumulator, spec.size < dense_below
        members = open_groups.setdefault(key, [])
        members.append(spec)
        full = scope == "tensor" or (scope == "bucket" and sum(s.nbytes for s in members) >= bucket_bytes)
        if full and not key[2]:
            close(key, place)
    for key, members in list(open_groups.items()):
        close(key, specs.index(members[-1]))
    return [group for _, group in sorted(groups, key=lambda item: item[0])]
