"""Selection by chunk, and residuals that decay, in calls on simulated ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.cli.oracles import oracle
from sparsecomm.transport import simulated
from sparsecomm.wire import WIRES
from tests import data, reference
from tests.ranks import allreduce, errors, nodes_of, run

ALGORITHMS = [*sc.algorithms(), "hierarchical:split"]
CHECK = settings(max_examples=8, phases=[Phase.generate])
DECAY = 0.5  # of which products are exact, as the sums of whole numbers are

sizes = pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def expected(algorithm: str, accumulated: list[np.ndarray], k: int, chunk: int) -> np.ndarray:
    """The dense result: the algorithm's own, of what is selected of each rank's vector."""
    n = accumulated[0].size
    if algorithm == "dense":
        return sum(accumulated)
    selected = [reference.dense(reference.topk_by_chunk(v, k, chunk), n) for v in accumulated]
    total = sum(min(k, len(range(begin, min(begin + chunk, n)))) for begin in range(0, n, chunk))
    return reference.dense(reference.allreduce(algorithm, selected, total, nodes_of(len(accumulated))), n)


@pytest.mark.covering(2)
@every_algorithm
@sizes
def test_sums_are_the_oracles_and_nothing_is_lost_but_what_decays(algorithm: str, P: int) -> None:
    decay = 1.0 if algorithm == "dense" else DECAY

    @CHECK
    @given(st.data(), st.integers(1, 300), data.seeds, st.sampled_from(list(WIRES)), st.booleans())
    def check(draw: st.DataObject, n: int, seed: int, wire: str, by_chunk: bool) -> None:
        by_chunk = by_chunk and sc.algorithms()[algorithm].by_chunk
        chunk = draw.draw(st.one_of(st.integers(1, 40), st.sampled_from([64, n, n + 1, 4096]))) if by_chunk else None
        k = draw.draw(st.integers(1, n if chunk is None else min(chunk, 40)))
        xs = [data.integers(n, "float32", seed + rank, 30) for rank in range(P)]
        residuals = [2 * data.integers(n, "float32", seed + P + rank, 9) for rank in range(P)]
        before = [reference.accumulated(x, r, decay) for x, r in zip(xs, residuals, strict=True)]
        results = allreduce(xs, k, residuals, decay=decay, algorithm=algorithm, wire=wire, chunk=chunk)
        sums = [result.to_dense() for result in results]
        assert all(data.same_bits(its, sums[0]) for its in sums)
        np.testing.assert_array_equal(sum(residuals) + sums[0], sum(before))
        if wire in ("plain", "packed"):
            wanted = (
                oracle(algorithm)(before, k, nodes_of(P)) if chunk is None else expected(algorithm, before, k, chunk)
            )
            np.testing.assert_array_equal(sums[0], wanted)

    check()


@pytest.mark.parametrize("decays", [(0.5, 0.5), (0.5, 0.25), (1.0, 0.5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_may_differ_in_decay(decays: tuple[float, float], dtype: str) -> None:
    xs = [data.integers(90, dtype, rank) for rank in range(2)]
    residuals = [4 * data.integers(90, dtype, 9 + rank) for rank in range(2)]
    kept = sum(reference.widened(r) * d for r, d in zip(residuals, decays, strict=True))

    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        options = {"comm": transport, "residual": residuals[transport.rank], "decay": decays[transport.rank]}
        return sc.isparse_allreduce(xs[transport.rank], 2, chunk=10, **options).wait()

    result = run(2, program)[0]
    left = sum(reference.widened(r) for r in residuals) + result.to_dense()
    np.testing.assert_array_equal(left, kept + sum(map(reference.widened, xs)))


@pytest.mark.parametrize(("chunks", "seen"), [((10, 20), ("chunks of 10", "chunks of 20")), ((10, None), ("chunk",))])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_ranks_that_differ_in_chunk_are_told_and_residuals_decay_once(
    chunks: tuple[int, int | None], seen: tuple[str, ...], decay: float
) -> None:
    xs = [data.integers(40, "float32", rank) for rank in range(3)]
    residuals = [2 * data.integers(40, "float32", 9 + rank) for rank in range(3)]
    before = [reference.accumulated(x, r, decay) for x, r in zip(xs, residuals, strict=True)]

    def program(transport: simulated.SimulatedTransport) -> None:
        chunk = chunks[transport.rank == 1]
        k = 8 if chunk is None else chunk // 5  # as many in all
        options = {"residual": residuals[transport.rank], "chunk": chunk, "decay": decay, "algorithm": "split"}
        sc.sparse_allreduce(xs[transport.rank], k, comm=transport, **options)

    raised = errors(3, program)
    assert {type(error) for error in raised} == {sc.CollectiveMismatchError}
    assert all(part in str(raised[1]) for part in ("differ in chunk", *seen))
    for residual, its in zip(residuals, before, strict=True):
        np.testing.assert_array_equal(residual, its)


def test_topk_of_chunks_and_densities() -> None:
    x, r = data.gradient("normal", 1000, "float32"), data.gradient("normal", 1000, "float32", 1)
    acc = reference.accumulated(x, r)
    for k, count in ((7, 7), (0.1, 10), (1e-9, 1), (1.0, 96), (np.int64(96), 96)):
        residual = r.copy()
        entries = sc.topk(x, k, residual=residual, chunk=96)
        np.testing.assert_array_equal(entries.indices, reference.topk_by_chunk(acc, count, 96)[0])
        np.testing.assert_array_equal(residual + entries.to_dense(), acc)
    assert sc.topk(x, 0.5, chunk=96).nnz == 10 * 48 + 40  # the last has 40
    assert sc.topk(x[:3], 5, chunk=10**12).nnz == 3
    assert sc.topk(x[:0], 5, chunk=8).nnz == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"chunk": 0}, "chunk=0: expected a number of elements, an int of at least 1"),
        ({"chunk": -5}, "chunk=-5: expected a number"),
        ({"chunk": 2.5}, r"chunk=2\.5: expected a number"),
        ({"chunk": True}, "chunk=True: expected a number"),
        ({"chunk": "all"}, "chunk='all': expected a number"),
        ({"chunk": 4}, r"k=5: expected an int from 1 to 4 \(the elements of a chunk\)"),
        ({"chunk": 8, "k": 1.5}, r"k=1\.5: expected an int from 1 to 8"),
        ({"chunk": 8, "algorithm": "double"}, "chunk is not supported with algorithm='double': double selects from"),
        ({"chunk": 8, "algorithm": "split|double"}, "double selects from its own ranges; leave chunk out"),
        ({"decay": 0}, r"decay=0: expected a number in \(0, 1\]"),
        ({"decay": 1.5}, r"decay=1\.5: expected"),
        ({"decay": float("nan")}, "decay=nan: expected"),
        ({"decay": "most"}, "decay='most': expected"),
        ({"decay": 0.5, "residual": None}, r"decay=0\.5 without a residual"),
        ({"decay": 0.5, "algorithm": "dense"}, r"decay=0\.5 with algorithm='dense'"),
        ({"decay": 0.5, "algorithm": sc.algorithms()["dense"]}, r"decay=0\.5 with algorithm='dense'"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(wrong: dict[str, Any], why: str) -> None:
    x, residual = np.ones(20, np.float32), np.full(20, 3, np.float32)
    options = {"k": 5, "residual": residual, "decay": 1.0} | wrong
    with pytest.raises(sc.InvalidInputError, match=why):
        run(1, lambda transport: sc.sparse_allreduce(x, comm=transport, **options))
    if "chunk" in wrong and "algorithm" not in wrong:
        with pytest.raises(sc.InvalidInputError, match=why):
            sc.topk(x, options["k"], chunk=options["chunk"])
    assert (residual == 3).all()
