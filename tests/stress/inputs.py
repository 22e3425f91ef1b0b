"""Damaged profiles and DLPack capsules: each is accepted, or refused by an error of the library.

An accepted profile must predict times. A capsule's memory must be released once.
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
            loaded = profile.read(file)
    else:
        loaded = profile.Profile.from_json(damaged_text(text, rng))
    problem = Problem(4, 1000, 10, 8.0, 4, 2, True)
    for algorithm in sc.algorithms().values():
        assert algorithm.predicted_time(problem, loaded.costs) >= 0, "a time of at least zero"
    assert profile.Profile.from_json(loaded.as_json()) == loaded, "a profile that can be written and read"


# -- capsules ---------------------------------------------------------------------------------------------------------

ITEMS = 64  # elements of 8 bytes in the memory of a capsule
HUGE = 2**60  # more elements than any machine has
TYPES = ((2, 16), (4, 16), (2, 32), (2, 64))  # code and bits of the accepted dtypes
SHAPES = ([], [0], [1], [5], [ITEMS], [3, 4], [2, 0, 2**40], [1] * 70, [4, 1, 4])
alive: set[Exporter] = set()  # keeps the memory of capsules alive


@dataclass(eq=False)
class Exporter:
    """An object with ``__dlpack__``, which returns a capsule."""

    answer: Any = None
    device: Any = (1, 0)
    old: bool = False  # `__dlpack__` takes no keywords
    usable: bool = False  # correctly describes contiguous CPU memory of a float dtype
    deletes: bool = False  # has a deleter
    deleted: int = 0  # calls of the deleter
    parts: list[Any] = field(default_factory=list)

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
        return "used_dltensor" in repr(self.answer) and self.parts[3] in (b"dltensor", b"dltensor_versioned")

    def delete(self, _: int | None) -> None:
        self.deleted += 1


def exporter(rng: np.random.Generator) -> Exporter:
    """Return an exporter. A third are usable, the others have one or more faults."""
    exported = Exporter(old=bool(rng.random() < 0.3))
    if rng.random() < 0.05:
        exported.answer = [None, 3, b"dltensor", object(), RuntimeError("no"), MemoryError()][rng.integers(6)]
        return exported
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
            exported.device = [None, (), ([], 0), (1,), ("cpu", 0), 7][rng.integers(6)]
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
    exported.usable = (
        name in ((b"dltensor",) if version[0] > 1 else (b"dltensor", b"dltensor_versioned"))
        and t.device_type == 1
        and (t.code, t.bits, t.lanes) in {(*kind, 1) for kind in TYPES}
        and shape is not None
        and min(shape, default=0) >= 0
        and math.prod(shape) <= ITEMS
        and (0 in shape or fits(shape, strides))
        and (0 in shape or (t.data is not None and t.data % (t.bits // 8) == 0))
    )
    deleter = DELETER(exported.delete) if rng.random() < 0.9 else DELETER()
    exported.deletes = bool(deleter)
    versioned = name is not None and b"versioned" in name
    managed: Any = Versioned(*version, None, deleter, 0, t) if versioned else Unversioned(t, None, deleter)
    alive.add(exported)
    exported.parts += [memory, managed, deleter, name, t]
    exported.answer = new_capsule(ctypes.addressof(managed), name, None)
    return exported


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
    exported = exporter(rng)
    calls: tuple[Callable[[], object], ...] = (
        lambda: sc.topk(exported, 1.0),
        lambda: sc.threshold(exported, 0.0),
        lambda: sc.SparseVector(np.arange(2), np.ones(2), 5).to_dense(out=exported),
        lambda: sc.topk(np.ones(5, np.float32), 2, residual=exported),
        lambda: simulated.run(1, lambda transport: sc.sparse_allreduce(exported, 1.0, comm=transport)),
    )
    number = rng.integers(len(calls))
    try:
        calls[number]()
        refused = ""
    except sc.InvalidInputError as error:
        refused = str(error)
    assert refused or exported.usable, "unusable memory was accepted"
    needs_a_shape = number in (2, 3)
    assert not refused or not exported.usable or needs_a_shape, f"usable memory was refused: {refused}"
    if exported.deletes:
        if exported.deleted < exported.consumed:
            gc.collect()  # an exception may hold the memory
        assert exported.deleted == exported.consumed, f"memory was given back {exported.deleted} times"
    alive.discard(exported)
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
