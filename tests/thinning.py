"""The part of a product of parameters that `make test` runs: see tests/README.md."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest


def covering_array(rows: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """Return the positions of a few rows that cover the others, in ascending order.

    With ``strength`` 1, every value of every column is in one of them; with 2, every pair of values of two columns
    (pairwise testing), and so on. The greedy choice is the same in every run.
    """
    holds = [set(combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing, chosen = set().union(*holds), []
    while missing:
        gains = [len(covered & missing) for covered in holds]
        best = gains.index(max(gains))
        chosen.append(best)
        missing -= holds[best]
    return sorted(chosen)


def exhaustive(*values: object) -> Any:
    """Return a set of a parameter's values that runs in `make test-all` only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def one_in(count: int, number: int) -> Any:
    """Return the marks of case ``number``: `make test` runs one case in ``count``, `make test-all` runs all."""
    return pytest.mark.exhaustive if number % count else ()
