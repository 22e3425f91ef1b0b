"""Damaged copies of states: of any nesting of dictionaries, lists, arrays, tensors and plain values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.stress.mutations import NUMBERS

__all__ = ["damaged"]

_ERRORS: tuple[type[BaseException], ...] = (
    OSError, MemoryError, OverflowError, AttributeError, RecursionError, KeyError, IndexError, TypeError, ValueError,
    RuntimeError, AssertionError, StopIteration, EOFError, UnicodeError, ArithmeticError, KeyboardInterrupt,
)  # fmt: skip


class Failing(Mapping[Any, Any]):
    """A checkpoint that is read when it is looked at, one part of which cannot be read."""

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


_METHODS = (
    "__array__", "__dlpack__", "__len__", "__iter__", "__eq__", "__bool__", "__str__", "__repr__", "__hash__",
    "__getattr__", "__index__", "__float__", "__contains__", "__getitem__", "__lt__", "__ge__", "__class_getitem__",
)  # fmt: skip


def _deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


def _odd(rng: np.random.Generator) -> Any:
    """Return something that is hardly ever what is expected."""
    kind = rng.integers(6)
    if kind == 0:
        return Hostile(str(rng.choice(_METHODS)), _ERRORS[rng.integers(len(_ERRORS))])
    if kind == 1:
        return int(rng.choice(np.array(NUMBERS, object)))
    if kind == 2:
        return _deep(int(rng.choice([3, 40, 100, sys.getrecursionlimit() * 3])))
    loop: list[Any] = []
    loop.append(loop)
    odd: tuple[Any, ...] = (
        None, "", "a", "\ud800", [], {}, (), float("nan"), float("inf"), -1, 2**70, -(2**70), True, b"x", 1.5,
        [[1, 2], [3]], {"a": None}, {3: 1}, loop, object(), 1j, range(3), np.zeros(3, object), np.array(["x", "y"]),
        np.zeros((3, 2), complex), np.zeros(0), np.float32(1), np.int64(2), np.datetime64("2026-01-01"), Ellipsis,
    )  # fmt: skip
    return odd[rng.integers(len(odd))]


def _array(array: Any, rng: np.random.Generator) -> Any:
    """Return another array in the place of one."""
    tensor = not isinstance(array, np.ndarray)
    a = np.array(array)
    changed = a.reshape(-1).copy()
    if changed.size:
        changed[rng.integers(changed.size)] += 1
    kinds: list[Any] = [
        a.reshape(-1)[:-1], a[None], a.astype(object), a.astype(str), a.astype(int), a.astype(complex), a.tolist(),
        a.astype(np.longdouble), np.full(a.shape, np.longdouble("1e4000")), np.full_like(a, np.nan),
        np.full_like(a, np.inf), a.astype(np.float16), a.astype(">f8"), np.asfortranarray(a),
        a[..., ::-1] if a.ndim else a,
        np.repeat(a.reshape(-1), 2)[::2].reshape(a.shape), changed.reshape(a.shape), np.broadcast_to(a, (2, *a.shape)),
    ]  # fmt: skip
    made = kinds[rng.integers(len(kinds))]
    if tensor and isinstance(made, np.ndarray) and rng.random() < 0.7:
        import torch

        try:
            return torch.from_numpy(np.ascontiguousarray(made))
        except TypeError:
            return made
    return made


def _number(value: Any, rng: np.random.Generator) -> Any:
    others: tuple[Any, ...] = (value + 1, value - 1, -value, float(value), str(value), np.float64(value), [value], 0)
    return others[rng.integers(len(others))]


def damaged(state: Any, rng: np.random.Generator, within: str | None = None) -> Any:
    """Return a copy in which one to three things, at any depth, are others, missing, doubled, or raise when read.

    Args:
        within: the only key of the state that is damaged; ``None``: anything is.
    """
    made = copy.deepcopy(state)
    if within is not None:
        return made | {within: damaged(made[within], rng)}
    if rng.random() < 0.03:
        return _odd(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        made = _edited(made, rng)
    return made


def _edited(value: Any, rng: np.random.Generator) -> Any:
    """Return a value, in which something was changed; containers are changed in place."""
    if isinstance(value, Hostile):
        return _odd(rng)
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
            return Failing(value, key, _ERRORS[rng.integers(len(_ERRORS))])
        elif what == 3:
            value["foreign"] = _odd(rng)
        else:
            value[key] = _odd(rng)
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
            if at < len(value):  # otherwise this list, which holds itself, was what has become shorter
                value[at] = inner
        return value
    if (isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")) and rng.random() < 0.8:
        try:
            return _array(value, rng)
        except (TypeError, ValueError):  # it was damaged before
            return None
    if type(value) in (int, float) and rng.random() < 0.6:
        return _number(value, rng)
    return _odd(rng)
