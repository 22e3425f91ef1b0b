"""Damaged copies of bytes and of states: nested dictionaries, lists, arrays, tensors and plain values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXTRA = 24  # bytes by which a copy may be longer
EDITS = 3  # per copy, at most
NUMBERS = (0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**60, 2**61, 2**62, 2**63, 2**64 - 1)
ERRORS: tuple[type[BaseException], ...] = (
    OSError, MemoryError, OverflowError, AttributeError, RecursionError, KeyError, IndexError, TypeError, ValueError,
    RuntimeError, AssertionError, StopIteration, EOFError, UnicodeError, ArithmeticError, KeyboardInterrupt,
)  # fmt: skip
METHODS = (
    "__array__", "__dlpack__", "__len__", "__iter__", "__eq__", "__bool__", "__str__", "__repr__", "__hash__",
    "__getattr__", "__index__", "__float__", "__contains__", "__getitem__", "__lt__", "__ge__", "__class_getitem__",
)  # fmt: skip


def damaged(
    original: NDArray[np.uint8], copies: int, safe: int, numbers: list[int], rng: np.random.Generator
) -> Iterator[NDArray[np.uint8]]:
    """Yield damaged copies of ``original``, each a new array of its exact size.

    Most have up to three edits: a byte, a bit, or an aligned word that becomes one of ``numbers`` or `NUMBERS`. A few
    are shorter or longer, some have a random end, and one in a hundred is random throughout. Most copies keep the
    first ``safe`` bytes, since a reader that finds them wrong looks no further.
    """
    length = len(original)
    room = -(-(length + EXTRA) // 8) * 8
    rows = rng.integers(0, 256, (copies, room), np.uint8)
    rows[:, :length] = original
    words = rows.view("<u8")
    interesting = np.array([*NUMBERS, *numbers], np.uint64)
    every = np.arange(copies)
    for _ in range(EDITS):
        kind = rng.integers(0, 6, copies)  # 3 to 5: no edit
        begin = np.where(rng.random(copies) < 0.03, 0, min(safe, length - 1))
        end = np.where(rng.random(copies) < 0.5, np.minimum(length, begin + 64), length)
        at = rng.integers(begin, end)
        chosen = every[kind == 0]
        rows[chosen, at[chosen]] = rng.integers(0, 256, len(chosen), np.uint8)
        chosen = every[kind == 1]
        rows[chosen, at[chosen]] ^= np.uint8(1) << rng.integers(0, 8, len(chosen), np.uint8)
        chosen = every[kind == 2]
        words[chosen, at[chosen] // 8] = rng.choice(interesting, len(chosen))
    lengths = np.full(copies, length)
    chosen = every[rng.random(copies) < 0.15]
    lengths[chosen] = rng.integers(0, room + 1, len(chosen))
    for begin, part in ((min(safe + 32, length), 0.05), (safe, 0.03), (0, 0.01)):
        chosen = every[rng.random(copies) < part]
        rows[chosen, begin:] = rng.integers(0, 256, (len(chosen), room - begin), np.uint8)
    for row, end in zip(rows, lengths.tolist(), strict=True):
        yield row[:end].copy()


# -- states -----------------------------------------------------------------------------------------------------------


class Failing(Mapping[Any, Any]):
    """A mapping that reads an item when it is accessed, and fails to read one of them."""

    def __init__(self, of: Mapping[Any, Any], key: object, error: type[BaseException]) -> None:
        self._of, self._key, self._error = of, key, error

    def __getitem__(self, key: Any) -> Any:
        if key == self._key:
            raise self._error("Input/output error")
        return self._of[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __deepcopy__(self, memo: object) -> Failing:
        return self


class Hostile:
    """An object one of whose methods raises."""

    def __init__(self, method: str, error: type[BaseException]) -> None:
        def fails(self: object, *arguments: object, **options: object) -> Any:
            raise error("\ud800 no text")

        self.__class__ = type("Hostile", (Hostile,), {method: fails})


def _nested(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


def _unexpected(rng: np.random.Generator) -> Any:
    kind = rng.integers(6)
    if kind == 0:
        return Hostile(str(rng.choice(METHODS)), ERRORS[rng.integers(len(ERRORS))])
    if kind == 1:
        return int(rng.choice(np.array(NUMBERS, object)))
    if kind == 2:
        return _nested(int(rng.choice([3, 40, 100, sys.getrecursionlimit() * 3])))
    loop: list[Any] = []
    loop.append(loop)
    values: tuple[Any, ...] = (
        None, "", "a", "\ud800", [], {}, (), float("nan"), float("inf"), -1, 2**70, -(2**70), True, b"x", 1.5,
        [[1, 2], [3]], {"a": None}, {3: 1}, loop, object(), 1j, range(3), np.zeros(3, object), np.array(["x", "y"]),
        np.zeros((3, 2), complex), np.zeros(0), np.float32(1), np.int64(2), np.datetime64("2026-01-01"), Ellipsis,
    )  # fmt: skip
    return values[rng.integers(len(values))]


def _other_array(array: Any, rng: np.random.Generator) -> Any:
    a = np.array(array)
    changed = a.reshape(-1).copy()
    if changed.size:
        changed[rng.integers(changed.size)] += 1
    others: list[Any] = [
        a.reshape(-1)[:-1], a[None], a.astype(object), a.astype(str), a.astype(int), a.astype(complex), a.tolist(),
        a.astype(np.longdouble), np.full(a.shape, np.longdouble("1e4000")), np.full_like(a, np.nan),
        np.full_like(a, np.inf), a.astype(np.float16), a.astype(">f8"), np.asfortranarray(a),
        a[..., ::-1] if a.ndim else a,
        np.repeat(a.reshape(-1), 2)[::2].reshape(a.shape), changed.reshape(a.shape), np.broadcast_to(a, (2, *a.shape)),
    ]  # fmt: skip
    other = others[rng.integers(len(others))]
    if not isinstance(array, np.ndarray) and isinstance(other, np.ndarray) and rng.random() < 0.7:
        import torch

        try:
            return torch.from_numpy(np.ascontiguousarray(other))
        except TypeError:
            return other
    return other


def damaged_state(state: Any, rng: np.random.Generator, within: str | None = None) -> Any:
    """Return a copy in which one to three values, at any depth, are replaced, missing, doubled, or raise when read.

    ``within``: the only key of the state that is damaged; ``None``: any.
    """
    result = copy.deepcopy(state)
    if within is not None:
        return result | {within: damaged_state(result[within], rng)}
    if rng.random() < 0.03:
        return _unexpected(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        result = _edited(result, rng)
    return result


def _edited(value: Any, rng: np.random.Generator) -> Any:
    """Return a value with one change. Containers are changed in place."""
    if isinstance(value, Hostile):
        return _unexpected(rng)
    if isinstance(value, dict) and value:
        key = list(value)[rng.integers(len(value))]
        if rng.random() < 0.65:
            value[key] = _edited(value[key], rng)
            return value
        what = rng.integers(5)
        if what == 0:
            del value[key]
        elif what == 1:
            value[["b", "z", 3, None, ("a",)][rng.integers(5)]] = value.pop(key)
        elif what == 2:
            return Failing(value, key, ERRORS[rng.integers(len(ERRORS))])
        else:
            value["foreign" if what == 3 else key] = _unexpected(rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = int(rng.integers(len(value)))
        what = rng.integers(6)
        if what == 0:
            del value[at]
        elif what == 1:
            value.append(value[at])
        elif what == 2:
            value.reverse()
        else:
            inner = _edited(value[at], rng)
            if at < len(value):  # the list may contain itself, and have become shorter
                value[at] = inner
        return value
    if (isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")) and rng.random() < 0.8:
        try:
            return _other_array(value, rng)
        except (TypeError, ValueError):  # an earlier change damaged it
            return None
    if type(value) in (int, float) and rng.random() < 0.6:
        others = (value + 1, value - 1, -value, float(value), str(value), np.float64(value), [value], 0)
        return others[rng.integers(len(others))]
    return _unexpected(rng)
