"""Whether what was summed is right."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

COMM = MPI.COMM_WORLD
ORACLE = 4_000_000  # entries of all ranks together up to which the oracle, which is slow, merges them
SAMPLE = 97  # dense results are compared at every 97th place
Array = np.ndarray[Any, Any]
Entries = tuple[Array, Array]  # indices and values


class Inputs:
    """A gradient per rank, a residual and an output, which all contenders share."""

    def __init__(self, n: int, k: int, seed: int = 0) -> None:
        self.n, self.k = n, k
        self.x = np.random.default_rng([seed, COMM.rank]).standard_normal(n, dtype=np.float32)
        self.r, self.out = np.zeros_like(self.x), np.zeros_like(self.x)


def gathered(values: Array) -> Array:
    """The values of every rank, in rows."""
    rows = np.empty((COMM.size, len(values)), values.dtype)
    COMM.Allgather(np.ascontiguousarray(values), rows)
    return rows


def differs(found: Array, addends: Array, relative: float, absolute: float = 0) -> str | None:
    """``found`` should be the sum of the rows of ``addends``."""
    bound = relative * np.abs(addends).sum(axis=0) + absolute
    wrong = ~(np.abs(found - addends.sum(axis=0)) <= bound)
    if not wrong.any():
        return None
    first = int(np.flatnonzero(wrong)[0])
    return f"{wrong.sum()} of {len(wrong)} sampled sums, the first {found[first]!r}, not {addends[:, first].sum()!r}"


def wrong_sum(i: Inputs, relative: float, absolute: float = 0) -> str | None:
    """Whether ``out`` is not the dense sum (at sampled places), or not the same on all ranks."""
    sums = COMM.allgather(zlib.crc32(i.out))
    said = differs(i.out[::SAMPLE], np.array(gathered(i.x[::SAMPLE]), np.float64), relative, absolute)
    return said or (None if len(set(sums)) == 1 else f"the ranks differ: {sums}")


def wrong_selection(i: Inputs, mine: Entries) -> str | None:
    """Whether these are not k entries of x, none of which is smaller than one left out. Any of equal ones will do."""
    indices, values = mine
    if len(indices) != i.k or len(np.unique(indices)) != i.k or not np.array_equal(i.x[indices], values):
        return f"{len(indices)} entries selected that are not {i.k} entries of x"
    larger, least = 0, np.abs(values).min()
    for part in np.array_split(i.x, max(1, i.n >> 20)):
        larger += np.count_nonzero(np.abs(part) > least)
    chosen = np.count_nonzero(np.abs(values) > least)
    return (
        None if larger == chosen else f"{larger} entries are larger than the least selected, and {chosen} of these are"
    )


def wrong_entries(
    i: Inputs, mine: Entries, oracle: Callable[[list[Entries]], Entries] | None, relative: float = 0.0
) -> str | None:
    """Whether ``out`` differs between ranks, or is not what the oracle makes of all ranks' selections.

    To the bit if ``relative`` is 0. Beyond `ORACLE` entries, and without an oracle, only the former.
    """
    if len(set(sums := COMM.allgather(zlib.crc32(i.out)))) != 1:
        return f"the ranks differ: {sums}"
    if oracle is None or len(mine[0]) * COMM.size > ORACLE:
        return None
    order = np.argsort(mine[0])
    every = COMM.gather((mine[0][order], mine[1][order]))
    indices, values = COMM.bcast(oracle(every) if every is not None else None)
    if (count := np.count_nonzero(i.out)) != len(indices):
        return f"{count} entries instead of {len(indices)}"
    bound = relative * np.abs(values) + (relative and 1e-6)  # sums of several ranks may all but cancel
    wrong = ~(np.abs(i.out[indices] - values) <= bound)
    return f"{wrong.sum()} of {len(indices)} entries" if wrong.any() else None
