"""Damaged copies of bytes, many at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUMBERS", "damaged", "damaged_text"]

_EXTRA = 24  # bytes by which a copy may be longer
_EDITS = 3  # per copy, at most
NUMBERS = (0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**60, 2**61, 2**62, 2**63, 2**64 - 1)


def damaged(
    original: NDArray[np.uint8], copies: int, safe: int, numbers: list[int], rng: np.random.Generator
) -> Iterator[NDArray[np.uint8]]:
    """Yield damaged copies of ``original``, each a new array of its exact size.

    Most have up to three edits: a byte, a bit, or an aligned word that becomes a number that means something. A few
    are shorter or longer, some have a random end, and one in a hundred is random throughout.

    Args:
        safe: the first bytes, which most copies keep: a reader would look no further.
        numbers: what words become, besides `NUMBERS`.
    """
    length = len(original)
    room = -(-(length + _EXTRA) // 8) * 8
    rows = rng.integers(0, 256, (copies, room), np.uint8)
    rows[:, :length] = original
    words = rows.view("<u8")
    interesting = np.array([*NUMBERS, *numbers], np.uint64)
    every = np.arange(copies)
    for _ in range(_EDITS):
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
    for begin, share in ((min(safe + 32, length), 0.05), (safe, 0.03), (0, 0.01)):
        chosen = every[rng.random(copies) < share]
        rows[chosen, begin:] = rng.integers(0, 256, (len(chosen), room - begin), np.uint8)
    for row, its in zip(rows, lengths.tolist(), strict=True):
        yield row[:its].copy()


def damaged_text(text: str, rng: np.random.Generator) -> str:
    """Return ``text`` with a few characters or pieces changed, removed or doubled."""
    for _ in range(rng.integers(1, 3)):
        begin = int(rng.integers(0, len(text) + 1))
        end = begin + int(rng.integers(0, 6))
        piece = rng.choice(["", text[begin:end] * 2, "1e999", "-1", "NaN", "null", "[" * 5, '"', "\0", "{}", "9" * 400])
        text = text[:begin] + str(piece) + text[end:]
    return text
