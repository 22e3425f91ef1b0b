"""One pass over several gradients and their residual selects what adding first and selecting then does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsecomm.backends import CpuBackend
from sparsecomm.contribution import Contribution, Segment, ThresholdHint
from sparsecomm.tensors import interop
from tests import data

BACKEND = CpuBackend(2)


def made(gradients: list[np.ndarray] | None, residual: np.ndarray, threshold: float = 0.0) -> Contribution:
    """Of gradients that are still to be added; or of a residual alone."""
    whole = interop.tensor(residual, "r", writable=True)
    if gradients is None:
        return Contribution(BACKEND, [Segment(None, whole)], whole, whole.shape, whole.size)
    offsets = np.cumsum([0, *map(len, gradients)]).tolist()
    parts = [whole.part(begin, end) for begin, end in pairwise(offsets)]
    segments = [Segment(interop.tensor(g, "g"), *place) for g, *place in zip(gradients, parts, offsets, strict=False)]
    hint = ThresholdHint()
    hint.threshold = threshold
    return Contribution(BACKEND, segments, whole, whole.shape, whole.size, hint=hint)


@given(
    kinds=st.lists(data.kinds, min_size=1, max_size=4),
    dtype=st.sampled_from(sorted(data.DTYPES)),
    n=st.integers(1, 3000),
    fraction=st.floats(0.0005, 1),
    seed=data.seeds,
    threshold=st.sampled_from([0.0, 1e-3, 1.0, 3.0, 1e30]),
)
def test_selects_the_same(kinds: list[str], dtype: str, n: int, fraction: float, seed: int, threshold: float) -> None:
    with np.errstate(all="ignore"):
        gradients = [data.gradient(kind, n + 3 * i, dtype, seed + i) for i, kind in enumerate(kinds)]
        accumulator = "float64" if dtype == "float64" else "float32"
        ours = data.gradient("normal", sum(map(len, gradients)), accumulator, seed + 77)
        plain = ours.copy()
        adding = made(gradients, plain)
        adding.rollback()
        contribution, k = made(gradients, ours, threshold), max(1, round(fraction * len(ours)))
        found, right = contribution.topk(k), made(None, plain).topk(k)
    assert data.same_bits(found.indices, right.indices)
    assert data.same_bits(found.values, right.values)
    np.testing.assert_array_equal(ours, plain)
    if len(kinds) > 1 and contribution._hint.threshold:
        assert right.nnz == k
        assert 0 < contribution._hint.threshold < 2 * np.abs(right.values).min()


@pytest.mark.parametrize("threshold", [0.0, 1.0, 1e30])
@pytest.mark.parametrize("selected", [False, True])
def test_rollback_keeps_all(selected: bool, threshold: float) -> None:
    gradients = [data.integers(500, "float32", 1), data.integers(300, "float16", 2)]
    residual = data.integers(800, "float32", 3)
    expected = residual + np.concatenate([g.astype(np.float32) for g in gradients])
    contribution = made(gradients, residual, threshold)
    if selected:
        assert contribution.topk(10).nnz == 10
    contribution.rollback()
    assert data.same_bits(residual, expected)


def test_the_threshold_of_a_step_serves_the_next() -> None:
    """Once steps are alike, the first pass finds all of the top-k, and not much else."""
    n, k, threshold, factor, reached = 20_000, 100, 0.0, 0.9, []
    residual = np.zeros(n, np.float32)
    for step in range(60):
        gradient = np.random.default_rng(step).standard_normal(n).astype(np.float32)
        reached.append(int((np.abs(residual + gradient) >= threshold).sum()))
        contribution = made([gradient[: n // 2], gradient[n // 2 :]], residual, threshold)
        contribution._hint.factor = factor
        contribution.topk(k)
        threshold, factor = contribution._hint.threshold, contribution._hint.factor
    assert k <= np.median(reached[-20:]) < 4 * k
    assert np.count_nonzero(np.array(reached[-20:]) < k) < 5
