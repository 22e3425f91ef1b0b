"""One pass over several gradients and their residual selects what adding first and selecting then does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsecomm.backends import CpuBackend
from sparsecomm.feedback import Accumulated
from sparsecomm.reducer.pieces import Edge, Piece, Pieces
from sparsecomm.tensors import interop
from tests import data

OPS = CpuBackend(2)


def pieces_of(gradients: list[np.ndarray], residual: np.ndarray) -> list[Piece]:
    begins = np.cumsum([0, *map(len, gradients)])
    return [
        Piece(interop.tensor(g, "g"), interop.tensor(residual[begin : begin + len(g)], "r", writable=True), int(begin))
        for g, begin in zip(gradients, begins[:-1], strict=True)
    ]


def both(
    kinds: list[str], dtype: str, n: int, seed: int, edge: float
) -> tuple[Pieces, np.ndarray, Accumulated, np.ndarray, Edge]:
    gradients = [data.gradient(kind, n + 3 * i, dtype, seed + i) for i, kind in enumerate(kinds)]
    accumulator = np.float64 if dtype == "float64" else np.float32
    residual = data.gradient("normal", sum(map(len, gradients)), str(np.dtype(accumulator)), seed + 77)
    ours, plain = residual.copy(), residual.copy()
    for piece in pieces_of(gradients, plain):
        OPS.add_into(piece.gradient, piece.residual)
    known = Edge(edge)
    made = Pieces(OPS, interop.tensor(ours, "r", writable=True), pieces_of(gradients, ours), known)
    return made, ours, Accumulated(OPS, interop.tensor(plain, "r", writable=True)), plain, known


@given(
    kinds=st.lists(data.kinds, min_size=1, max_size=4),
    dtype=st.sampled_from(sorted(data.DTYPES)),
    n=st.integers(1, 3000),
    share=st.floats(0.0005, 1),
    seed=data.seeds,
    edge=st.sampled_from([0.0, 1e-3, 1.0, 3.0, 1e30]),
)
def test_selects_the_same(kinds: list[str], dtype: str, n: int, share: float, seed: int, edge: float) -> None:
    with np.errstate(all="ignore"):
        made, ours, expected, plain, known = both(kinds, dtype, n, seed, edge)
        k = max(1, round(share * len(ours)))
        found, right = made.topk(k), expected.topk(k)
    assert data.same_bits(found.indices, right.indices)
    assert data.same_bits(found.values, right.values)
    np.testing.assert_array_equal(ours, plain)
    if known.magnitude:
        assert right.nnz == k
        assert 0 < known.magnitude < 2 * np.abs(right.values).min()


@pytest.mark.parametrize("edge", [0.0, 1.0])
@pytest.mark.parametrize("selected", [False, True])
def test_rollback_keeps_all(selected: bool, edge: float) -> None:
    gradients = [data.integers(500, "float32", 1), data.integers(300, "float16", 2)]
    residual = data.integers(800, "float32", 3)
    expected = residual + np.concatenate([g.astype(np.float32) for g in gradients])
    made = Pieces(OPS, interop.tensor(residual, "r", writable=True), pieces_of(gradients, residual), Edge(edge))
    if selected:
        assert made.topk(10).nnz == 10
    made.rollback()
    assert data.same_bits(residual, expected)


def test_the_whole() -> None:
    gradients = [data.integers(500, "float32", 1), data.integers(300, "float32", 2)]
    residual = data.integers(800, "float32", 3)
    expected = residual + np.concatenate(gradients)
    made = Pieces(OPS, interop.tensor(residual, "r", writable=True), pieces_of(gradients, residual), Edge(2.0))
    assert data.same_bits(made.whole(), expected)
    made.commit()
    assert not residual.any()


def test_the_edge_of_a_step_serves_the_next() -> None:
    """Once steps are alike, the first pass finds all of the top-k, and not much else."""
    n, k, known, reached = 20_000, 100, Edge(), []
    residual = np.zeros(n, np.float32)
    for step in range(60):
        gradient = np.random.default_rng(step).standard_normal(n).astype(np.float32)
        reached.append(int((np.abs(residual + gradient) >= known.magnitude).sum()))
        Pieces(OPS, interop.tensor(residual, "r", writable=True), pieces_of([gradient], residual), known).topk(k)
    assert k <= np.median(reached[-20:]) < 4 * k
    assert np.count_nonzero(np.array(reached[-20:]) < k) < 5
