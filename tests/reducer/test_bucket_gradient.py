"""One pass over several gradients and their residual selects what adding first and selecting then does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsecomm.backends import CpuBackend
from sparsecomm.contribution import Accumulated
from sparsecomm.reducer.bucket_gradient import BucketGradient, Segment, ThresholdHint
from sparsecomm.tensors import interop
from tests import data

BACKEND = CpuBackend(2)


def segments_of(gradients: list[np.ndarray], residual: np.ndarray) -> list[Segment]:
    offsets = np.cumsum([0, *map(len, gradients)])
    return [
        Segment(
            interop.tensor(g, "g"), interop.tensor(residual[offset : offset + len(g)], "r", writable=True), int(offset)
        )
        for g, offset in zip(gradients, offsets[:-1], strict=True)
    ]


def both(
    kinds: list[str], dtype: str, n: int, seed: int, threshold: float
) -> tuple[BucketGradient, np.ndarray, Accumulated, np.ndarray, ThresholdHint]:
    gradients = [data.gradient(kind, n + 3 * i, dtype, seed + i) for i, kind in enumerate(kinds)]
    accumulator = np.float64 if dtype == "float64" else np.float32
    residual = data.gradient("normal", sum(map(len, gradients)), str(np.dtype(accumulator)), seed + 77)
    ours, plain = residual.copy(), residual.copy()
    for segment in segments_of(gradients, plain):
        BACKEND.add_into(segment.gradient, segment.residual)
    known = ThresholdHint(threshold)
    made = BucketGradient(BACKEND, interop.tensor(ours, "r", writable=True), segments_of(gradients, ours), known)
    return made, ours, Accumulated(BACKEND, interop.tensor(plain, "r", writable=True)), plain, known


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
        made, ours, expected, plain, known = both(kinds, dtype, n, seed, threshold)
        k = max(1, round(fraction * len(ours)))
        found, right = made.topk(k), expected.topk(k)
    assert data.same_bits(found.indices, right.indices)
    assert data.same_bits(found.values, right.values)
    np.testing.assert_array_equal(ours, plain)
    if known.threshold:
        assert right.nnz == k
        assert 0 < known.threshold < 2 * np.abs(right.values).min()


@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("selected", [False, True])
def test_rollback_keeps_all(selected: bool, threshold: float) -> None:
    gradients = [data.integers(500, "float32", 1), data.integers(300, "float16", 2)]
    residual = data.integers(800, "float32", 3)
    expected = residual + np.concatenate([g.astype(np.float32) for g in gradients])
    made = BucketGradient(
        BACKEND,
        interop.tensor(residual, "r", writable=True),
        segments_of(gradients, residual),
        ThresholdHint(threshold),
    )
    if selected:
        assert made.topk(10).nnz == 10
    made.rollback()
    assert data.same_bits(residual, expected)


def test_the_whole() -> None:
    gradients = [data.integers(500, "float32", 1), data.integers(300, "float32", 2)]
    residual = data.integers(800, "float32", 3)
    expected = residual + np.concatenate(gradients)
    made = BucketGradient(
        BACKEND, interop.tensor(residual, "r", writable=True), segments_of(gradients, residual), ThresholdHint(2.0)
    )
    assert data.same_bits(made.whole(), expected)
    made.commit(BACKEND.nonzeros(expected, (800,)), rejects=False)
    assert not residual.any()


def test_the_threshold_of_a_step_serves_the_next() -> None:
    """Once steps are alike, the first pass finds all of the top-k, and not much else."""
    n, k, known, reached = 20_000, 100, ThresholdHint(), []
    residual = np.zeros(n, np.float32)
    for step in range(60):
        gradient = np.random.default_rng(step).standard_normal(n).astype(np.float32)
        reached.append(int((np.abs(residual + gradient) >= known.threshold).sum()))
        BucketGradient(
            BACKEND, interop.tensor(residual, "r", writable=True), segments_of([gradient], residual), known
        ).topk(k)
    assert k <= np.median(reached[-20:]) < 4 * k
    assert np.count_nonzero(np.array(reached[-20:]) < k) < 5
