"""`make test` leaves out repetitions: it still tests each value, or each pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.thinning import covering_array

PRODUCT = list(product(range(7), "abcd", [False, True], range(3)))


@pytest.mark.parametrize(("strength", "fewest", "maximum"), [(1, 7, 7), (2, 28, 36), (3, 84, 110)])
def test_each_combination_is_in_one_of_few_rows(strength: int, fewest: int, maximum: int) -> None:
    chosen = covering_array(PRODUCT, strength)

    def combinations_in(rows: list[tuple[object, ...]]) -> set[object]:
        return {some for row in rows for some in combinations(enumerate(row), strength)}

    assert combinations_in([PRODUCT[i] for i in chosen]) == combinations_in(PRODUCT)
    assert fewest <= len(chosen) <= maximum
    assert chosen == sorted(set(chosen)) == covering_array(PRODUCT, strength)
