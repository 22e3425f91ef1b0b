"""`Label`: names and values that the calls of all ranks must share. `difference` names the first one that differs.

Calls that match compare only a checksum. After a mismatch, two ranks exchange the names and values: see `Call`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeAlias

from sparsecomm.transport.base import MAX_CONTENTS_BYTES

Pairs: TypeAlias = Iterable[tuple[str, object]]  # names and values
_MAX_UNPACKED = 1 << 24  # bytes
_MAX_TEXT = 1000  # characters of a name or a value that are compared
_MAX_EXCERPT = 100  # characters of a name or a value in an error


class Label:
    """Names and values that all ranks of a call must share. Messages carry their checksum; 0: none."""

    __slots__ = ("checksum", "pairs")

    def __init__(self, compared: object, pairs: Callable[[], Pairs]) -> None:
        """``compared``: plain values whose ``repr`` is equal if the calls match.

        ``pairs`` returns the names and values, the most telling ones first. It is called only after a mismatch.
        """
        self.checksum, self.pairs = zlib.crc32(repr(compared).encode()) or 1, pairs

    @classmethod
    def of(cls, *pairs: tuple[str, object]) -> Label:
        """Return a label that compares all of these names and values."""
        return cls(pairs, lambda: pairs)

    def __add__(self, other: Label) -> Label:
        return Label((self.checksum, other.checksum), lambda: [*self.pairs(), *other.pairs()])


UNLABELLED = Label.of(("call", "sparse_allreduce"), ("label", "''"))
UNLABELLED.checksum = 0


def by_name(option: str, values: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the values of an option by tensor, or one pair if they are equal."""
    if len({str(value) for value in values.values()}) == 1:
        return [(option, next(iter(values.values())))]
    return [(f"{option} of {name}", value) for name, value in values.items()]


def pack(pairs: Pairs) -> bytes:
    """Return names and values as bytes for another rank. If there are too many, the last ones are left out."""
    texts = [str(item).replace("\n", " ")[:_MAX_TEXT] for pair in pairs for item in pair]
    while True:
        unpacked = "\n".join(texts).encode(errors="backslashreplace")
        if len(unpacked) <= _MAX_UNPACKED and len(packed := zlib.compress(unpacked)) <= MAX_CONTENTS_BYTES:
            return packed
        texts = [*texts[: len(texts) // 4 * 2], ""]  # an odd number of texts: some are left out


def difference(packed: Mapping[int, bytes]) -> str:
    """Return the first difference between two ranks, lower rank first, and what to do; "" if there is none.

    ``packed``: the packed names and values by rank. Bytes that cannot be unpacked stand for unknown ones.
    """
    low, high = sorted(packed)
    (low_pairs, low_complete), (high_pairs, high_complete) = _unpack(packed[low]), _unpack(packed[high])
    low_pairs, high_pairs = _aligned(low_pairs, high_pairs), _aligned(high_pairs, low_pairs)
    low_names, high_names = dict(low_pairs), dict(high_pairs)
    for i, pairs in enumerate(zip_longest(low_pairs, high_pairs, fillvalue=("", "")), 1):
        (name, low_value), (other, high_value) = pairs
        if name == other:
            title, texts = name, (low_value, high_value)
        elif name and name not in high_names and high_complete:
            title, texts = name, (low_value, "missing")
        elif other and other not in low_names and low_complete:
            title, texts = other, ("missing", high_value)
        elif not name or not other:
            return ""
        else:
            title, texts = f"number {i} in the order", (name, other)
        if texts[0] != texts[1]:
            (name,), values = _excerpts(title), _excerpts(*texts)
            advice = _advice(name, values)
            if name == "call":
                return f"rank {low} is in {values[0]}, and rank {high} in {values[1]}: {advice}"
            return f"{name} is {values[0]} on rank {low} and {values[1]} on rank {high}: {advice}"
    return ""


def _advice(name: str, values: list[str]) -> str:
    functions = [value.partition("(")[0] for value in values if name == "call" and "(" in value]
    if len(functions) == 1:
        return f"call {functions[0]}() on all ranks"
    if name == "call" and any(value == "comparison of nodes" for value in values):
        return "pass groups as nodes= on all ranks, or on none"
    if name == "measured costs" or (name == "call" and any(value.startswith("measurement") for value in values)):
        return "give all ranks the same profile (SPARSECOMM_PROFILE), or none, so that they measure together"
    if name == "call":
        return "make the same calls in the same order on all ranks"
    skipped, advice = "one of them has skipped a step", "use the same settings and tensors on all ranks"
    if name.startswith(("step", "optimizer steps")):
        return skipped
    return f"{advice}; or {skipped}" if name.startswith(("lr", "learning_rate")) else advice


def _unpack(packed: bytes) -> tuple[list[tuple[str, str]], bool]:
    """Return the names and values, and whether none were left out."""
    try:
        texts = zlib.decompressobj().decompress(packed, _MAX_UNPACKED).decode(errors="replace").split("\n")
    except zlib.error:
        return [], False
    return list(zip(texts[::2], texts[1::2], strict=False)), len(texts) % 2 == 0


def _aligned(pairs: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Expand an option that all tensors share to a pair per tensor if ``others`` have these: see `by_name`."""
    by_option: dict[str, list[str]] = {}
    for name, _ in others:
        by_option.setdefault(name.partition(" of ")[0], []).append(name)
    by_option |= {name: [name] for name, _ in others}
    return [(expanded, value) for name, value in pairs for expanded in by_option.get(name, [name])]


def _excerpts(*texts: str) -> list[str]:
    """Return printable excerpts of texts, which begin shortly before the first difference if that is far behind."""
    differing = (i for i, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1)
    begin = max(0, next(differing, 0) - _MAX_EXCERPT // 2)
    excerpts = (text[begin : begin + _MAX_EXCERPT] for text in texts)
    return ["".join(c if c.isprintable() else " " for c in ("..." if begin else "") + text) for text in excerpts]
