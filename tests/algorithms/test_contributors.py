"""Means over the ranks that contributed to each entry, on simulated ranks, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.cli.oracles import contributors, oracle
from sparsecomm.transport import simulated
from sparsecomm.wire import EXACT, WIRES
from tests import data, reference
from tests.ranks import allreduce

OP = "mean_of_contributors"
KNOWING = [name for name, algorithm in sc.algorithms().items() if not algorithm.cannot_count_contributors]
OTHERS = [name for name in sc.algorithms() if name not in KNOWING]
EXACT_WIRES = [name for name, wire in WIRES.items() if wire.kind is EXACT]
check = settings(max_examples=12)


def test_who_knows_the_number() -> None:
    assert KNOWING == ["split", "allgather", "ssar_split_allgather"]


@pytest.mark.parametrize("algorithm", [*KNOWING, "auto"])
@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
def test_each_sum_is_divided_by_the_number_of_ranks_that_selected_its_index(algorithm: str, P: int) -> None:
    @check
    @given(
        st.data(),
        st.integers(1, 300),
        data.seeds,
        st.sampled_from(["normal", "few values", "all equal", "NaN and infinities", "denormals"]),
        st.sampled_from(["float32", "float64", "bfloat16"]),
        st.sampled_from(EXACT_WIRES),
    )
    def run(draw: st.DataObject, n: int, seed: int, kind: str, dtype: str, wire: str) -> None:
        k = draw.draw(data.counts(n))
        xs = [data.gradient(kind, n, dtype, seed + rank) for rank in range(P)]
        widened = [reference.widened(x) for x in xs]
        with np.errstate(invalid="ignore"):
            results = allreduce(xs, k, algorithm=algorithm, wire=wire, op=OP)
            total = oracle("split" if algorithm == "auto" else algorithm)(widened, k, range(P))
            expected = total / contributors(widened, k).astype(total.dtype)
        for found in results:
            assert data.same_bits(found.to_dense() + 0, reference.canonical(expected) + 0)

    run()


@pytest.mark.parametrize("k", [3, 18, 40])
@pytest.mark.parametrize("P", [2, 5, 8])
def test_the_first_of_equal_sums_win_however_many_they_are(P: int, k: int) -> None:
    """Those whose keys an owner shows may all be equal to the k-th."""
    for union in range(k, P * k + 1):
        xs = [np.zeros(union, np.float32) for _ in range(P)]
        for rank, x in enumerate(xs):
            begin = rank * (union - k) // (P - 1)
            x[begin : begin + k] = np.nan
        for found in allreduce(xs, k, algorithm="split", wire="plain", op=OP):
            assert found.indices.tolist() == list(range(k))


@pytest.mark.parametrize("algorithm", [*KNOWING, "split:3"])
@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
def test_no_gradient_mass_is_lost(algorithm: str, P: int) -> None:
    """Result times contributors, and residuals, are what was there; exactly so, also where a quotient was rounded."""

    @check
    @given(st.data(), st.integers(1, 300), data.seeds, st.sampled_from([1, 3, 8]), st.sampled_from(list(WIRES)))
    def run(draw: st.DataObject, n: int, seed: int, maximum: int, wire: str) -> None:
        k, exact, few_bits = draw.draw(data.counts(n)), WIRES[wire].kind is EXACT, WIRES[wire].kind.planes > 0
        xs = [data.integers(n, "float32", seed + rank, maximum) for rank in range(P)]
        residuals = [data.integers(n, "float32", seed + P + rank, maximum) for rank in range(P)]
        for _ in range(2 if exact else 1):  # the second step finds what the first left
            before = [r + x for r, x in zip(residuals, xs, strict=True)]
            counts = contributors(before, k)
            options = {"algorithm": algorithm, "wire": wire, "op": OP}
            results = [result.to_dense() for result in allreduce(xs, k, residuals, **options)]
            assert all(data.same_bits(found, results[0]) for found in results)
            if not few_bits:  # these round whole numbers, also on the way to where they are summed
                np.testing.assert_array_equal(results[0] != 0, oracle(algorithm)(before, k, range(P)) != 0)
            applied = results[0].astype(np.float64) * counts
            applied = np.where(np.abs(applied - np.rint(applied)) < 1e-5, np.rint(applied), applied)  # 1/3 in float32
            left = sum(residual.astype(np.float64) for residual in residuals)
            np.testing.assert_allclose(applied + left, np.sum(before, axis=0), rtol=0, atol=1e-4 if few_bits else 0)
            xs = [np.zeros_like(x) for x in xs]

    run()


@pytest.mark.parametrize("algorithm", [*OTHERS, "hierarchical:allgather"])
def test_algorithms_that_do_not_know_say_why(algorithm: str) -> None:
    reason = sc.algorithms()[algorithm.partition(":")[0]].cannot_count_contributors
    residual = np.ones(9, np.float32)
    with pytest.raises(sc.InvalidInputError) as raised:
        simulated.run(2, lambda transport: sc.sparse_allreduce(residual, 3, comm=transport, algorithm=algorithm, op=OP))
    assert f"algorithm={algorithm!r}, which {reason}; expected auto or one of {', '.join(KNOWING)}" in str(raised.value)
    with pytest.raises(sc.InvalidInputError, match="which"):
        sc.Reducer({"a": residual}, algorithm=algorithm, op=OP)


def test_auto_chooses_among_those_that_know() -> None:
    def program(transport: simulated.SimulatedTransport) -> set[str]:
        return {each.algorithm.name for each in sc.explain(10**6, 0.01, comm=transport, op=OP).candidates}

    assert simulated.run(4, program, node_of_rank=[0, 0, 1, 1])[0].value == {"split"}
