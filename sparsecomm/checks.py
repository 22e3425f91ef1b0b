"""Checks of arguments. An argument may be any object, so printing, comparing or converting it may raise."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sparsecomm.errors import InvalidInputError, did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = Any  # only type checkers read ``**options: Unpack[...]``

# Errors that an operation on an unsuitable object raises. Signal handlers may raise other ones, which must propagate.
ARGUMENT_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
MAX_SIZE = 2**63 - 1  # elements: indices are int64
_MAX_LENGTH = 100
_F = TypeVar("_F", bound=Callable[..., Any])


def quote(value: object) -> str:
    """Return the repr of an object for a message: on one line and at most 100 characters long."""
    try:
        text = " ".join(repr(value).split())
    except ARGUMENT_ERRORS:  # also for an int with too many digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def is_real(value: object) -> bool:
    """Return whether a value is a real number and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def to_float(value: Any) -> float:
    """Return a real number as a float, or NaN if it is no real number or too large for a float."""
    if type(value) is float:  # fast path
        return value
    if is_real(value):
        with suppress(*ARGUMENT_ERRORS):
            return float(value)
    return math.nan


def to_int(value: Any, min_value: int = 0, max_value: int = MAX_SIZE) -> int | None:
    """Return an integer of Python or NumPy as an int, or None if it is no integer, a bool, or out of range."""
    if type(value) is int:
        return value if min_value <= value <= max_value else None
    if isinstance(value, numbers.Integral) and is_real(value):
        with suppress(*ARGUMENT_ERRORS):
            found = operator.index(value)
            return found if min_value <= found <= max_value else None
    return None


def to_bool(name: str, value: object) -> bool:
    """Return the truth value of an argument; raise `InvalidInputError` if it has none."""
    try:
        return bool(value)
    except ARGUMENT_ERRORS as error:
        raise InvalidInputError(f"{name}={quote(value)}: expected True or False") from error


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Raise `InvalidInputError` if an argument is not a known name."""
    if not isinstance(value, str) or value not in known:
        expected = f"expected one of {', '.join(known)}"
        raise InvalidInputError(f"{name}={quote(value)}: {expected}{did_you_mean(value, known)}")


def check_options(function: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` if ``options`` are not all keyword arguments of ``function``, which the user called."""
    known = inspect.signature(function).parameters
    for name in sorted(options.keys() - known.keys()):
        meant = did_you_mean({"k": "density", "warmup": "dense_steps"}.get(name, name), known)
        expected = f"expected some of {', '.join(known)}{meant}"
        raise InvalidInputError(f"{name} is not an option of {function.__name__}; {expected}")


def with_options(options: type, declared: Callable[..., object], **defaults: object) -> Callable[[_F], _F]:
    """Return a decorator that replaces ``**options`` in a function's signature with the single keyword arguments.

    `help`, notebooks and the documentation show this signature. Type checkers use ``**options: Unpack[...]`` instead.
    The TypedDict ``options`` names the arguments. Their annotations and defaults are those of the function
    ``declared``, except ``defaults``.
    """
    parameters = inspect.signature(declared).parameters
    keywords = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in parameters.items()
        if name in options.__annotations__
    ]

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=own + keywords)  # type: ignore[attr-defined]
        return function

    return decorate
