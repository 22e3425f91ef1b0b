"""The division of a model into fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsecomm.checks import is_real, quote, to_int
from sparsecomm.errors import InvalidInputError, did_you_mean, listed

__all__ = ["split_by_size", "split_names"]


def split_names(sizes: Mapping[str, int], fragments: object) -> tuple[tuple[str, ...], ...]:
    """Return the names of each fragment.

    Args:
        sizes: number of elements of each tensor, by name.
        fragments: the number of fragments, or the names of each.

    Raises:
        InvalidInputError: the number exceeds that of the tensors, or the names do not list each tensor exactly once.
    """
    if is_real(fragments):
        if (count := to_int(fragments, 1, len(sizes))) is None:
            raise InvalidInputError(f"fragments={quote(fragments)}: must be from 1 to {len(sizes)}, one tensor in each")
        return split_by_size(sizes, count)
    if not isinstance(fragments, Sequence) or isinstance(fragments, str) or not fragments:
        raise InvalidInputError(f"fragments={quote(fragments)}: expected a number, or lists of names")
    seen: set[str] = set()
    for number, names in enumerate(fragments):
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise InvalidInputError(f"fragments[{number}]={quote(names)}: expected a list of at least one name")
        for name in names:
            if not isinstance(name, str) or name not in sizes:
                raise InvalidInputError(
                    f"fragments[{number}]: {quote(name)} is not one of the {len(sizes)} tensors, {listed(sizes)}"
                    f"{did_you_mean(name, sizes)}"
                )
            if name in seen:
                raise InvalidInputError(f"fragments[{number}]: {name!r} appears twice; list each tensor exactly once")
            seen.add(name)
    if missing := [name for name in sizes if name not in seen]:
        raise InvalidInputError(f"fragments: {listed(missing)} missing; list each tensor exactly once")
    return tuple(tuple(names) for names in fragments)


def split_by_size(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Split names into ``count`` runs of neighbours, each with at least one name and about equally many elements."""
    names, total = list(sizes), sum(sizes.values())
    parts: list[list[str]] = [[]]
    done = 0
    for position, name in enumerate(names):
        after, left = count - len(parts), len(names) - position
        middle = done + sizes[name] / 2
        if parts[-1] and after and (left <= after or middle * count >= len(parts) * total):
            parts.append([])
        parts[-1].append(name)
        done += sizes[name]
    return tuple(map(tuple, parts))
