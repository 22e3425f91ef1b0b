"""Damaged profiles and DLPack capsules: each is taken, or refused by an error of the library.

A profile that is taken must predict times. The memory of a capsule must be given back once.
"""

from __future__ import annotations

import ctypes
import gc
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.primitives.costs import Problem
from sparsecomm.transport import simulated
from sparsecomm.tuning import profile
from tests.stress.harness import SANITIZED, Numbered, numbered
from tests.stress.mutations import damaged, damaged_text
from tests.tensors.capsules import DELETER, DLTensor, Unversioned, Versioned, new_capsule


def use_profile(rng: np.random.Generator) -> None:
    text = profile.Profile("Open MPI 5.0", 4, 2, profile.DEFAULT).as_json()
    if rng.random() < 0.2:
        (raw,) = damaged(np.frombuffer(text.encode(), np.uint8), 1, 0, [], rng)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.json"
            file.write_bytes(raw.tobytes())
            made = profile.read(file)
    else:
        made = profile.Profile.from_json(damaged_text(text, rng))
    problem = Problem(4, 1000, 10, 8.0, 4, 2, True)
    for algorithm in sc.algorithms().values():
        assert algorithm.predicted_time(problem, made.costs) >= 0, "a time of at least zero"
    assert profile.Profile.from_json(made.as_json()) == made, "a profile that can be written and read"


# -- capsules ---------------------------------------------------------------------------------------------------------

ITEMS = 64  # elements of 8 bytes in the memory of a capsule
HUGE = 2**60  # elements that no machine has
TYPES = ((2, 16), (4, 16), (2, 32), (2, 64))  # code and bits of the dtypes that the library takes
SHAPES = ([], [0], [1], [5], [ITEMS], [3, 4], [2, 0, 2**40], [1] * 70, [4, 1, 4])
alive: set[Exporter] = set()  # a capsule's memory must outlive whoever has taken it


@dataclass(eq=False)
class Exporter:
    """An object with ``__dlpack__``, which returns a capsule."""

    answer: Any = None
    device: Any = (1, 0)
    old: bool = False  # `__dlpack__` takes no keywords
    usable: bool = False  # it describes contiguous memory of a float type on the CPU, and truly so
    deletes: bool = False  # it wants to know when its memory is given back
    deleted: int = 0  # how often it was
    kept: list[Any] = field(default_factory=list)

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
        return "used_dltensor" in repr(self.answer) and self.kept[3] in (b"dltensor", b"dltensor_versioned")

    def delete(self, _: int | None) -> None:
        self.deleted += 1


def exporter(rng: np.random.Generator) -> Exporter:
    """Return an exporter: a third are usable, the others wrong in one respect or more."""
    made = Exporter(old=bool(rng.random() < 0.3))
    if rng.random() < 0.05:
        made.answer = [None, 3, b"dltensor", object(), RuntimeError("no"), MemoryError()][rng.integers(6)]
        return made
    memory = np.zeros(ITEMS + 1)
    t = DLTensor(memory.ctypes.data + (-memory.ctypes.data) % 16, 1, 0, 1, 2, 32, 1, None, None, 0)
    t.code, t.bits = TYPES[rng.integers(len(TYPES))]
    shape: list[int] | None = SHAPES[rng.integers(len(SHAPES))]
    strides = contiguous(shape) if rng.random() < 0.5 else None
    name, version = b"dltensor_versioned", (1, int(rng.integers(0, 3)))
    if rng.random() < 0.4:
        name = b"dltensor"
    while rng.random() < 0.5:
        wrong = rng.integers(12)
        if wrong == 0:
            shape, strides = [3, int(rng.choice([-1, -(2**62), -7]))], None
        elif wrong == 1:
            shape = [3, 1, *[[HUGE], [2**32, 2**32], [2**62, 4], [2**63 - 1, 2**63 - 1]][rng.integers(4)]]
            strides = None
        elif wrong == 2:
            shape, strides = [2, 3], [[3, 2], [1, 2], [0, 0], [-3, -1], [2**62, 1]][rng.integers(5)]
        elif wrong == 3:
            t.data, shape, strides = memory.ctypes.data + 1, [3], None
        elif wrong == 4:
            t.device_type, t.device_id = int(rng.choice([0, 4, 8, 10, 2**31 - 1, -1])), int(rng.integers(-1, 3))
        elif wrong == 5:
            types = [(0, 32, 1), (2, 32, 2), (2, 8, 1), (5, 64, 1), (255, 255, 65535)]
            t.code, t.bits, t.lanes = types[rng.integers(len(types))]
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
        and (t.code, t.bits, t.lanes) in {(*each, 1) for each in TYPES}
        and shape is not None
        and min(shape, default=0) >= 0
        and math.prod(shape) <= ITEMS
        and (0 in shape or fits(shape, strides))
        and (0 in shape or (t.data is not None and t.data % (t.bits // 8) == 0))
    )
    deleter = DELETER(made.delete) if rng.random() < 0.9 else DELETER()
    made.deletes = bool(deleter)
    versioned = name is not None and b"versioned" in name
    managed: Any = Versioned(*version, None, deleter, 0, t) if versioned else Unversioned(t, None, deleter)
    alive.add(made)
    made.kept += [memory, managed, deleter, name, t]
    made.answer = new_capsule(ctypes.addressof(managed), name, None)
    return made


def contiguous(shape: list[int]) -> list[int]:
    strides, run = [], 1
    for size in reversed(shape):
        strides.insert(0, run)
        run *= max(size, 1)
    return strides


def fits(shape: list[int], strides: list[int] | None) -> bool:
    dense = contiguous(shape)
    return all(extent == 1 or stride == d for extent, stride, d in zip(shape, strides or dense, dense, strict=True))


def take_capsule(rng: np.random.Generator) -> None:
    made = exporter(rng)
    calls: tuple[Callable[[], object], ...] = (
        lambda: sc.topk(made, 1.0),
        lambda: sc.threshold(made, 0.0),
        lambda: sc.SparseVector(np.arange(2), np.ones(2), 5).to_dense(out=made),
        lambda: sc.topk(np.ones(5, np.float32), 2, residual=made),
        lambda: simulated.run(1, lambda transport: sc.sparse_allreduce(made, 1.0, comm=transport)),
    )
    which = rng.integers(len(calls))
    try:
        calls[which]()
        refused = ""
    except sc.InvalidInputError as error:
        refused = str(error)
    assert refused or made.usable, "memory that does not describe itself well was taken"
    needs_a_shape = which in (2, 3)
    assert not refused or not made.usable or needs_a_shape, f"memory that describes itself well was refused: {refused}"
    if made.deletes:
        if made.deleted < made.consumed:
            gc.collect()  # an exception may have held it
        assert made.deleted == made.consumed, f"memory was given back {made.deleted} times"
    alive.discard(made)
    if refused:
        raise sc.InvalidInputError(refused)


class Inputs(Numbered):
    unit, chunk = "inputs", 16_000
    options = (*numbered(unit, 100_000), SANITIZED)

    def check(self, number: int) -> None:
        rng, name = np.random.default_rng([self.report.seed, number]), ("profiles", "capsules")[number % 2]
        try:
            with np.errstate(all="ignore"):
                (take_capsule if number % 2 else use_profile)(rng)
            self.counts[f"{name} taken"] += 1
        except sc.SparseCommError:
            self.counts[f"{name} refused"] += 1
