"""Checks of arguments, which may be any objects: to print, to compare or to convert one may raise."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np

from sparsecomm.errors import InvalidInputError, did_you_mean

__all__ = ["FAULTS", "MAX_SIZE", "check_choice", "is_real", "quote", "to_bool", "to_float", "to_int"]

# What an object raises that is asked for what it has not. Others may be of a signal handler, and are let through.
FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
MAX_SIZE = 2**63 - 1  # elements, of which indices are int64
_MAX_SHOWN = 100


def quote(value: object) -> str:
    """Return the text of an object for a message: on one line, and cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except FAULTS:  # also of an int with too many digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def is_real(value: object) -> bool:
    """Return whether a value is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def to_float(value: Any) -> float:
    """Return a real number as a float; NaN for what is none, and for what is larger than every float."""
    if type(value) is float:  # the common case, before what takes longer
        return value
    if is_real(value):
        with suppress(*FAULTS):
            return float(value)
    return math.nan


def to_int(value: Any, min_value: int = 0, max_value: int = MAX_SIZE) -> int | None:
    """Return a whole number, of Python or of NumPy; ``None`` for what is none, for a bool, and out of range."""
    if type(value) is int:
        return value if min_value <= value <= max_value else None
    if isinstance(value, numbers.Integral) and is_real(value):
        with suppress(*FAULTS):
            found = operator.index(value)
            return found if min_value <= found <= max_value else None
    return None


def to_bool(name: str, value: object) -> bool:
    """Return the truth of an argument.

    Raises:
        InvalidInputError: it has none.
    """
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except FAULTS as error:
        raise InvalidInputError(f"{name}={quote(value)}: expected True or False") from error


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Check that an argument is one of some names.

    Raises:
        InvalidInputError: it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise InvalidInputError(
            f"{name}={quote(value)}: expected one of {', '.join(known)}{did_you_mean(value, known)}"
        )
