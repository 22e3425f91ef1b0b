"""The benchmark of patches, with small weights."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
from bench import patches


def test_patches_need_fewer_bits_than_other_formats() -> None:
    row = patches.counted(*patches.simulated(1e-6, 1, n=300_000))
    assert 0.005 < row["changed"] < 0.03
    assert row["floor"] < row["patch"] < row["others"]


def test_the_entropy_of_changes() -> None:
    changed = np.arange(16) % 4 == 0  # 4 of 16
    position = -(12 * np.log2(12 / 16) + 4 * np.log2(4 / 16)) / 4
    assert patches.entropy(changed, np.array([1, 1, -1, -1]), np.zeros(16, int)) == pytest.approx(position + 1)
    assert patches.entropy(changed, np.array([1, 1, -1, -1]), np.arange(16) % 4) == pytest.approx(1)
