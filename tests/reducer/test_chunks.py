"""``scope="chunk"``: every tensor by itself, whatever bucket it is in and whichever way its gradients come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data, reference
from tests.reducer.programs import SHAPES, Arrays, bits, copies, gradients, reducer_of, residuals, run, same, total

STEPS = 3
OPTIONS = {
    "chunk": st.sampled_from([1, 16, 100, 256, 4096]),
    "decay": st.sampled_from([1.0, 0.5]),
    "bucket_bytes": st.sampled_from([1, 1500, None]),
    "algorithm": st.sampled_from(["allgather", "ssar_split_allgather"]),
}
WAYS: dict[str, dict[str, Any]] = {"push": {}, "clip": {"clip": 1e9}, "skip": {"skip_nonfinite": True}}


def by_hand(pushed: list[list[Arrays]], k: int, chunk: int, decay: float) -> tuple[list[Arrays], list[Arrays]]:
    """The sums of every step, and the residuals of every rank, tensor by tensor. ``pushed``: by rank and step."""
    kept = [{name: np.zeros(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()} for _ in pushed]
    sums = []
    for step in range(STEPS):
        each = []
        for rank, own in enumerate(kept):
            selected = {}
            for name, shape in SHAPES.items():
                own[name] = reference.accumulated(pushed[rank][step][name], own[name], decay)
                entries = reference.topk_by_chunk(own[name], k, chunk)
                selected[name] = reference.dense(entries, own[name].size).reshape(shape)
                own[name][entries[0]] = 0
            each.append(selected)
        sums.append(total(each))
    return sums, [{name: own[name].reshape(SHAPES[name]) for name in SHAPES} for own in kept]


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_sums_and_residuals_are_those_of_each_tensor(P: int, way: str) -> None:
    @settings(max_examples=10, phases=[Phase.generate])
    @given(data.seeds, st.sampled_from([0.001, 0.1, 0.7]), st.fixed_dictionaries(OPTIONS))
    def check(seed: int, density: float, options: dict[str, Any]) -> None:
        chunk = options["chunk"]
        each = [gradients(seed + step) for step in range(STEPS)]
        pushed = [[{name: np.roll(a, 7 * rank) for name, a in its.items()} for its in each] for rank in range(P)]

        def program(transport: simulated.SimulatedTransport) -> Any:
            options_ = {"scope": "chunk", "density": density, "dense_below": 0, **options, **WAYS[way]}
            reducer = reducer_of(transport, **options_)
            found = []
            for given_ in pushed[transport.rank]:
                mine = copies(given_)
                assert reducer.reduce(mine).left == {}
                found.append(mine)
            return found, residuals(reducer)

        sums, kept = by_hand(pushed, max(1, round(density * chunk)), chunk, options["decay"])
        for rank, (found, own) in enumerate(run(P, program)):
            for ours, right in zip(found, sums, strict=True):
                for name in SHAPES:
                    np.testing.assert_array_equal(ours[name], right[name], err_msg=name)
            assert bits(own) == bits(kept[rank])

    check()


def test_a_dense_sum_is_whole() -> None:
    P = 5
    each = [gradients(rank) for rank in range(P)]

    def program(transport: simulated.SimulatedTransport) -> Arrays:
        mine = copies(each[transport.rank])
        reducer_of(transport, scope="chunk", chunk=100, algorithm="dense", dense_below=0).reduce(mine)
        return mine

    for mine in run(P, program):
        same(mine, total(each))


def test_gradients_of_16_bits_and_float64_beside_float32() -> None:
    dtypes = {"a": "bfloat16", "b": "float16", "c": "float64", "d": "float32", "e": "float32", "f": "float16"}
    given_ = gradients(1, dtypes=dtypes)

    def program(transport: simulated.SimulatedTransport) -> None:
        mine = copies(given_)
        reducer = sc.Reducer(mine, 0.1, comm=transport, scope="chunk", chunk=50, decay=0.5, dense_below=0)
        reducer.reduce(mine)
        for name, shape in SHAPES.items():
            flat = reference.widened(given_[name])
            expected = reference.dense(reference.topk_by_chunk(flat, 5, 50), flat.size).reshape(shape)
            np.testing.assert_array_equal(mine[name].astype(np.float64), expected)
            np.testing.assert_array_equal(reducer.residual(name), flat.reshape(shape) - expected)

    run(1, program)
