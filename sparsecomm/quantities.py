"""Numbers with units, as text for people."""

from __future__ import annotations

import math


def number_text(value: float, digits: int = 3) -> str:
    """Return a number rounded to significant digits, without an exponent, with commas between thousands."""
    if not math.isfinite(value):
        return f"{value}"
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent_text(fraction: float, digits: int = 3) -> str:
    """Return a fraction as a percentage."""
    return f"{number_text(100 * fraction, digits)} %"


def bytes_text(size: float) -> str:
    """Return a number of bytes in decimal units."""
    number, unit = _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))
    return f"{number_text(number, 4)} {unit}"


def size_text(size: float) -> str:
    """Return a number of bytes in decimal or binary units, whichever text is shorter."""
    binary, unit = _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    decimal, _ = _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))
    return f"{number_text(binary, 4)} {unit}" if len(f"{binary:g}") < len(f"{decimal:g}") else bytes_text(size)


def rate_text(rate: float) -> str:
    """Return a number of bits per second in a decimal unit."""
    number, unit = _scaled(rate, 1000, ("bit/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"))
    return f"{number_text(number)} {unit}"


def time_text(seconds: float) -> str:
    """Return a number of seconds in s, ms, us or ns."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale * 0.9999:
            return f"{number_text(seconds / scale, 4)} {unit}"
    return f"{number_text(seconds * 1e9, 4)} ns"


def _scaled(size: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    power = 0
    while size >= base * 0.9999 and power < len(units) - 1:
        size, power = size / base, power + 1
    return size, units[power]
