"""Options of calls: selection by chunk, residuals that decay, and means over contributors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data, reference
from tests.ranks import allreduce, run

CONTRIBUTORS = "mean_of_contributors"
COUNTING = [name for name, algorithm in sc.algorithms().items() if not algorithm.cannot_count_contributors]
OTHERS = [name for name in sc.algorithms() if name not in COUNTING]


@pytest.mark.parametrize("decays", [(0.5, 0.25), (1.0, 0.5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_may_differ_in_decay(decays: tuple[float, float], dtype: str) -> None:
    xs = [data.integers(90, dtype, rank) for rank in range(2)]
    residuals = [4 * data.integers(90, dtype, 9 + rank) for rank in range(2)]
    decayed = sum(reference.widened(r) * d for r, d in zip(residuals, decays, strict=True))

    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        options = {"comm": transport, "residual": residuals[transport.rank], "decay": decays[transport.rank]}
        return sc.isparse_allreduce(xs[transport.rank], 2, chunk=10, **options).wait()

    result = run(2, program)[0]
    left = sum(reference.widened(r) for r in residuals) + result.to_dense()
    np.testing.assert_array_equal(left, decayed + sum(map(reference.widened, xs)))


def test_residuals_also_decay_where_auto_takes_a_dense_sum() -> None:
    n, P = 100_000, 4

    def program(transport: simulated.SimulatedTransport) -> tuple[str, float, float]:
        x, residual = np.full(n, 1.0, np.float32), np.full(n, 4.0, np.float32)
        result = sc.sparse_allreduce(x, 1.0, comm=transport, residual=residual, decay=0.5, wire="plain")
        best = sc.explain(n, 1.0, comm=transport, wire="plain").candidates[0].algorithm.name
        return best, float(result.to_dense().min()), float(residual.max())

    assert run(P, program, range(P), alpha=1e-6, beta=8e-9) == [("dense", P * 3.0, 0.0)] * P


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_residuals_decay_once_in_a_call_that_fails(decay: float) -> None:
    xs = [data.integers(40, "float32", rank) for rank in range(3)]
    residuals = [2 * data.integers(40, "float32", 9 + rank) for rank in range(3)]
    before = [reference.accumulated(x, r, decay) for x, r in zip(xs, residuals, strict=True)]

    def program(transport: simulated.SimulatedTransport) -> None:
        options = {"residual": residuals[transport.rank], "decay": decay, "algorithm": "split"}
        chunk = 20 if transport.rank == 1 else 10  # the total number of entries is the same
        with pytest.raises(sc.CollectiveMismatchError, match=r"chunk is \d0 on rank \d and \d0 on rank"):
            sc.sparse_allreduce(xs[transport.rank], chunk // 5, comm=transport, chunk=chunk, **options)

    run(3, program)
    for residual, expected in zip(residuals, before, strict=True):
        np.testing.assert_array_equal(residual, expected)


def test_topk_of_chunks_and_densities() -> None:
    x, r = data.gradient("normal", 1000, "float32"), data.gradient("normal", 1000, "float32", 1)
    acc = reference.accumulated(x, r)
    for k, count in ((7, 7), (0.1, 10), (1e-9, 1), (1.0, 96), (np.int64(96), 96)):
        residual = r.copy()
        entries = sc.topk(x, k, residual=residual, chunk=96)
        np.testing.assert_array_equal(entries.indices, reference.topk_by_chunk(acc, count, 96)[0])
        np.testing.assert_array_equal(residual + entries.to_dense(), acc)
    assert sc.topk(x[:3], 5, chunk=10**12).nnz == 3
    assert sc.topk(x[:0], 5, chunk=8).nnz == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"chunk": 0}, "chunk=0: expected a number of elements, an int of at least 1"),
        ({"chunk": 2.5}, r"chunk=2\.5: expected a number"),
        ({"chunk": True}, "chunk=True: expected a number"),
        ({"chunk": "all"}, "chunk='all': expected a number"),
        ({"chunk": 4}, r"k=5: expected an int from 1 to 4 \(the elements of a chunk\)"),
        ({"chunk": 8, "k": 1.5}, r"k=1\.5: expected an int from 1 to 8"),
        ({"chunk": 8, "algorithm": "double"}, "chunk is not supported with algorithm='double', which selects from"),
        ({"decay": 0}, r"decay=0: expected a number in \(0, 1\]"),
        ({"decay": float("nan")}, "decay=nan: expected"),
        ({"decay": "most"}, "decay='most': expected"),
        ({"decay": 0.5, "residual": None}, r"decay=0\.5 without a residual"),
        ({"decay": 0.5, "algorithm": "dense"}, r"decay=0\.5 with algorithm='dense'"),
        ({"decay": 0.5, "algorithm": sc.algorithms()["dense"]}, r"decay=0\.5 with algorithm='dense'"),
        *(({"algorithm": name, "op": CONTRIBUTORS}, f"'{name}', which .* auto or one of") for name in OTHERS),
        ({"algorithm": "hierarchical:allgather", "op": CONTRIBUTORS}, "'hierarchical:allgather', which"),
    ],
)
def test_unsupported_options_are_refused_and_change_nothing(wrong: dict[str, Any], why: str) -> None:
    x, residual = np.ones(20, np.float32), np.full(20, 3, np.float32)
    options = {"k": 5, "residual": residual, "decay": 1.0} | wrong
    with pytest.raises(sc.InvalidInputError, match=why):
        run(1, lambda transport: sc.sparse_allreduce(x, comm=transport, **options))
    if "chunk" in wrong and "algorithm" not in wrong:
        with pytest.raises(sc.InvalidInputError, match=why):
            sc.topk(x, options["k"], chunk=options["chunk"])
    assert (residual == 3).all()


@pytest.mark.parametrize("k", [3, 18])
@pytest.mark.parametrize("P", [2, 5, 8])
def test_the_first_of_equal_means_win_however_many_they_are(P: int, k: int) -> None:
    """All keys that an owner sends may equal the k-th."""
    for union in range(k, P * k + 1):
        xs = [np.zeros(union, np.float32) for _ in range(P)]
        for rank, x in enumerate(xs):
            begin = rank * (union - k) // (P - 1)
            x[begin : begin + k] = np.nan
        for result in allreduce(xs, k, algorithm="split", wire="plain", op=CONTRIBUTORS):
            assert result.indices.tolist() == list(range(k))


def test_auto_chooses_among_algorithms_that_count_contributors() -> None:
    def program(transport: simulated.SimulatedTransport) -> set[str]:
        return {
            candidate.algorithm.name
            for candidate in sc.explain(10**6, 0.01, comm=transport, op=CONTRIBUTORS).candidates
        }

    assert set(COUNTING) == {"split", "allgather", "ssar_split_allgather"}
    assert simulated.run(4, program, node_of_rank=[0, 0, 1, 1])[0].value == {"split"}
