"""DLPack capsules that describe memory truly, or not at all as they should."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.tensors.capsules import DELETER, DLTensor, Unversioned, Versioned, new_capsule

__all__ = ["Exporter", "exporter"]

_ITEMS = 64  # elements of 8 bytes that there really are
_HUGE = 2**60  # elements that no machine has

_DLPACK_TYPES = ((2, 16), (4, 16), (2, 32), (2, 64))  # code, bits: what the library takes


_alive: set[Exporter] = set()  # a capsule's memory must outlive whoever has taken it


@dataclass(eq=False)
class Exporter:
    """An object with ``__dlpack__``.

    Attributes:
        usable: whether it describes contiguous memory of a float type on the CPU, and truly so.
        deletes: whether it wants to know when its memory is given back.
        deleted: how often it was.
    """

    answer: Any = None  # what `__dlpack__` returns, if it is no capsule
    device: Any = (1, 0)
    old: bool = False  # knows no keywords
    usable: bool = False
    deletes: bool = False
    deleted: int = 0
    _kept: list[Any] = field(default_factory=list)

    def __dlpack__(self, **asked: Any) -> Any:
        if self.old and asked:
            raise TypeError("__dlpack__() takes no keywords")
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def __dlpack_device__(self) -> Any:
        return self.device

    @property
    def consumed(self) -> bool:
        """Whether a reader has taken the capsule, and so has to give the memory back."""
        return "used_dltensor" in repr(self.answer) and self._kept[3] in (b"dltensor", b"dltensor_versioned")

    def free(self) -> None:
        """Free the memory, which nobody uses any more."""
        _alive.discard(self)

    def _delete(self, _: int | None) -> None:
        self.deleted += 1


def exporter(rng: np.random.Generator) -> Exporter:
    """Return an exporter: a third are usable, the others wrong in one respect or more."""
    made = Exporter(old=bool(rng.random() < 0.3))
    if rng.random() < 0.05:
        made.answer = [None, 3, b"dltensor", object(), RuntimeError("no"), MemoryError()][rng.integers(6)]
        return made
    memory = np.zeros(_ITEMS + 1)
    t = DLTensor(memory.ctypes.data + (-memory.ctypes.data) % 16, 1, 0, 1, 2, 32, 1, None, None, 0)
    t.code, t.bits = _DLPACK_TYPES[rng.integers(len(_DLPACK_TYPES))]
    shape = _shape(rng)
    strides = _contiguous(shape) if rng.random() < 0.5 else None
    name, version = b"dltensor_versioned", (1, int(rng.integers(0, 3)))
    if rng.random() < 0.4:
        name = b"dltensor"
    while rng.random() < 0.5:
        wrong = rng.integers(12)
        if wrong == 0:
            shape, strides = [3, int(rng.choice([-1, -(2**62), -7]))], None
        elif wrong == 1:
            shape = [3, 1, *[[_HUGE], [2**32, 2**32], [2**62, 4], [2**63 - 1, 2**63 - 1]][rng.integers(4)]]
            strides = None
        elif wrong == 2:
            shape, strides = [2, 3], [[3, 2], [1, 2], [0, 0], [-3, -1], [2**62, 1]][rng.integers(5)]
        elif wrong == 3:
            t.data = memory.ctypes.data + 1
            shape, strides = [3], None
        elif wrong == 4:
            t.device_type, t.device_id = int(rng.choice([0, 4, 8, 10, 2**31 - 1, -1])), int(rng.integers(-1, 3))
        elif wrong == 5:
            odd = [(0, 32, 1), (2, 32, 2), (2, 8, 1), (5, 64, 1), (255, 255, 65535)]
            t.code, t.bits, t.lanes = odd[rng.integers(len(odd))]
        elif wrong == 6:
            name, version = b"dltensor_versioned", (int(rng.choice([2, 3, 2**32 - 1])), 0)
        elif wrong == 7:
            name = [b"used_dltensor", b"used_dltensor_versioned", b"", b"other", None][rng.integers(5)]
        elif wrong == 8:
            made.device = [None, (), ([], 0), (1,), ("cpu", 0), 7][rng.integers(6)]
        elif wrong == 9:
            shape, t.ndim = None, int(rng.choice([-1, -(2**31)]))
        elif wrong == 10:
            shape, t.ndim = None, 1
        else:
            t.data, shape, strides = None, [3], None
    if shape is not None:
        t.ndim = len(shape)
        t.shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        if strides is not None:
            t.strides = (ctypes.c_int64 * max(1, len(strides)))(*strides)
    made.usable = (
        name in ((b"dltensor",) if version[0] > 1 else (b"dltensor", b"dltensor_versioned"))
        and t.device_type == 1
        and (t.code, t.bits, t.lanes) in {(*each, 1) for each in _DLPACK_TYPES}
        and shape is not None
        and min(shape, default=0) >= 0
        and math.prod(shape) <= _ITEMS
        and (0 in shape or _fits(shape, strides))
        and (0 in shape or (t.data is not None and t.data % (t.bits // 8) == 0))
    )
    deleter = DELETER(made._delete) if rng.random() < 0.9 else DELETER()
    made.deletes = bool(deleter)
    if name is not None and b"versioned" in name:
        managed: Any = Versioned(*version, None, deleter, 0, t)
    else:
        managed = Unversioned(t, None, deleter)
    _alive.add(made)
    made._kept += [memory, managed, deleter, name, t]
    made.answer = new_capsule(ctypes.addressof(managed), name, None)
    return made


def _fits(shape: list[int], strides: list[int] | None) -> bool:
    pairs = zip(shape, strides or _contiguous(shape), _contiguous(shape), strict=True)
    return all(extent == 1 or stride == dense for extent, stride, dense in pairs)


def _shape(rng: np.random.Generator) -> list[int]:
    return [[], [0], [1], [5], [_ITEMS], [3, 4], [2, 0, 2**40], [1] * 70, [4, 1, 4]][rng.integers(9)]


def _contiguous(shape: list[int]) -> list[int]:
    strides, run = [], 1
    for size in reversed(shape):
        strides.insert(0, run)
        run *= max(size, 1)
    return strides
