"""Numbers and units: how options give them, and how whatever is printed for people shows them.

K, M, G and T are decimal, Ki, Mi, Gi and Ti binary; so it is for counts and for bytes, in every command.
"""

from __future__ import annotations

import math
import re

from sparsecomm.errors import InvalidInputError

__all__ = [
    "bytes_text",
    "count",
    "nbytes",
    "number_text",
    "percent_text",
    "rate",
    "rate_text",
    "seconds",
    "size_text",
    "time_text",
]

_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNTS: dict[str, float] = {**_DECIMAL, **_BINARY}
_RATES: dict[str, float] = {f"{prefix}bit": scale for prefix, scale in _DECIMAL.items()}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_MAX = 2**53  # above, floats are no longer whole numbers


def count(option: str, text: str) -> int:
    """Return a whole number of things, such as 4096, 64K or 25.6M.

    Raises:
        InvalidInputError: it is none, or below 1.
    """
    found = _measure(text, "((?:[kmgt]i?)?)", _COUNTS)
    if not 1 <= found < _MAX:
        raise InvalidInputError(f"{option} {text}: expected a number from 1 on, such as 4096, 64K (64,000) or 25.6M")
    return round(found)


def nbytes(option: str, text: str) -> int:
    """Return a number of bytes, such as 4096, 64K, 64KiB or 1.5M.

    Raises:
        InvalidInputError: it is none.
    """
    found = _measure(text, "((?:[kmgt]i?)?)b?", _COUNTS)
    if not 0 <= found < _MAX:
        raise InvalidInputError(
            f"{option} {text}: expected bytes, such as 4096, 64K (64,000), 64Ki (65,536), 1.5M or 2Gi"
        )
    return int(found)


def rate(option: str, text: str) -> float:
    """Return the bits per second of a rate as ``tc`` writes it.

    Raises:
        InvalidInputError: it is none, or zero.
    """
    found = _measure(text, r"([kmgt]?bit)(?:/s|ps)?", _RATES)
    if not 0 < found < math.inf:
        raise InvalidInputError(f"{option} {text}: expected a number above 0 and a unit, such as 1gbit or 100mbit")
    return found


def seconds(option: str, text: str) -> float:
    """Return the seconds of a time with a unit.

    Raises:
        InvalidInputError: it is none.
    """
    found = _measure(text.replace("\N{MICRO SIGN}", "u"), r"([num]?s)", _TIMES)
    if not 0 <= found < math.inf:
        raise InvalidInputError(f"{option} {text}: expected a number and a unit, such as 100us, 20ms or 1s")
    return found


def _measure(text: str, unit: str, scales: dict[str, float]) -> float:
    """Return a number with a unit, of which ``unit`` matches the key of ``scales``; NaN if it is not that."""
    found = re.fullmatch(_NUMBER + r"\s*" + unit, text.strip().lower())
    return float(found[1]) * scales[found[2]] if found else math.nan


def number_text(value: float, digits: int = 3) -> str:
    """Return a number as people write it: never with an exponent, thousands apart, without zeros at the end.

    ``digits`` count from the first that is not zero. Those before the point are all there, however many they are.
    """
    if not math.isfinite(value):
        return f"{value}"
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent_text(part: float, digits: int = 3) -> str:
    """Return a part of 1 in percent."""
    return f"{number_text(100 * part, digits)} %"


def bytes_text(size: float) -> str:
    """Return an amount of bytes in decimal units."""
    number, unit = _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))
    return f"{number_text(number, 4)} {unit}"


def size_text(size: float) -> str:
    """Return a size that was chosen, in the units, decimal or binary, in which it is the shorter."""
    binary, unit = _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    decimal, _ = _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))
    return f"{number_text(binary, 4)} {unit}" if len(f"{binary:g}") < len(f"{decimal:g}") else bytes_text(size)


def rate_text(rate: float) -> str:
    """Return a rate in bits per second with a decimal unit."""
    number, unit = _scaled(rate, 1000, ("bit/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"))
    return f"{number_text(number)} {unit}"


def time_text(length: float) -> str:
    """Return a time in seconds, milliseconds, microseconds or nanoseconds."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if length >= scale * 0.9999:
            return f"{number_text(length / scale, 4)} {unit}"
    return f"{number_text(length * 1e9, 4)} ns"


def _scaled(size: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    power = 0
    while size >= base * 0.9999 and power < len(units) - 1:
        size, power = size / base, power + 1
    return size, units[power]
