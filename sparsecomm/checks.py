"""Checks of arguments. An argument may be any object, so printing, comparing or converting it may raise."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np

from sparsecomm.errors import InvalidInputError, did_you_mean

# Errors that an operation on an unsuitable object raises. Signal handlers may raise other ones, which must propagate.
ARGUMENT_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
MAX_SIZE = 2**63 - 1  # elements: indices are int64
_MAX_LENGTH = 100


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
            number = operator.index(value)
            return number if min_value <= number <= max_value else None
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
