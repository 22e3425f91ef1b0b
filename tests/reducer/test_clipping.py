"""Clipping to the median of all ranks' norms, against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.reducer.programs import SHAPES, Arrays, gradients, residuals, run

SIZES = [1.0, 1e20, 0.25, 3.0, 0.0, np.nan, 2.0, 1e-3]  # of the ranks' gradients: 0 pushes nothing


def pushed(rank: int) -> Arrays:
    mine = {name: np.asarray(SIZES[rank] * a, np.float32) for name, a in gradients(rank).items()}
    if np.isnan(SIZES[rank]):
        mine = gradients(rank)
        mine["c"][7] = np.nan
    return mine


def clipped(P: int) -> list[Arrays]:
    """What every rank adds, by the definition."""
    norms = np.array([np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in pushed(r).values())) for r in range(P)])
    bound = np.median(norms[np.isfinite(norms) & (norms > 0)])
    factors = np.where(norms > bound, bound / np.where(norms > 0, norms, 1), 1.0) if P > 1 else np.ones(1)
    return [{name: a * factor for name, a in pushed(rank).items()} for rank, factor in enumerate(factors)]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(expected), initial=1e-3))


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"scope": "tensor"},
        {"momentum": 0.5, "masking": False},
        {"scope": "model", "decay": 0.5},
        {"scope": "chunk", "chunk": 64, "decay": 0.5},
    ],
    ids=str,
)
def test_each_rank_is_clipped_to_the_median_norm(P: int, options: dict[str, Any]) -> None:
    def program(ranks: simulated.SimulatedTransport) -> tuple[Arrays, list[Arrays]]:
        mine, kept = pushed(ranks.rank), []
        reducer = sc.Reducer(mine, 0.1, comm=ranks, op="sum", clip="median", dense_below=10, **options)
        with pytest.raises(sc.InvalidInputError, match="accumulate with clip"):
            reducer.accumulate("a", mine["a"])
        applied = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for _ in "12":
            outs = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            for name in sorted(mine) if ranks.rank % 2 else mine:
                reducer.push(name, mine[name] if SIZES[ranks.rank] else None, out=outs[name])
            reducer.wait()
            kept.append(residuals(reducer))
            for name in applied:
                applied[name] += outs[name]
            assert reducer.counters.calls == reducer.step * len(reducer.groups)
        return applied, kept

    results = run(P, program)
    steps = 2.5 if "momentum" in options else 2  # 1, and 1 + 0.5
    for name, shape in SHAPES.items():
        given = sum((mine[name] for mine in clipped(P)), np.zeros(shape)) * steps
        kept = sum(kept[-1][name].astype(np.float64) for _, kept in results)
        forgotten = 0.5 * sum(kept[0][name] for _, kept in results) if "decay" in options else 0
        close(results[0][0][name] + kept + forgotten, given)
        for applied, _ in results[1:]:
            np.testing.assert_array_equal(applied[name], results[0][0][name])


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_a_rank_whose_norm_is_not_finite_does_not_count(skip: bool, scope: str) -> None:
    P = 8

    def program(ranks: simulated.SimulatedTransport) -> tuple[bool, Arrays, Arrays]:
        mine = pushed(ranks.rank)
        reducer = sc.Reducer(mine, 1.0, comm=ranks, op="sum", clip="median", scope=scope, skip_nonfinite=skip)
        usable = reducer.reduce(mine).usable
        return usable, mine, residuals(reducer)

    results = run(P, program)
    for rank, (usable, sums, kept) in enumerate(results):
        assert usable is not skip
        for name in SHAPES:
            own, total = clipped(P)[rank][name], sum(mine[name] for mine in clipped(P))
            if skip:
                close(kept[name], own if np.isfinite(own).all() else 0 * own.astype(bool))
            else:
                np.testing.assert_array_equal(np.isnan(sums[name]), np.isnan(total))
                close(sums[name], total)


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=str)
def test_where_norms_are_not_gathered_gradients_wait_as_they_are(P: int, options: dict[str, Any]) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        mine, odd = gradients(ranks.rank), ranks.rank == 1
        reducer = sc.Reducer(mine, 0.1, comm=ranks, clip=None if odd else "median", **options)
        before = {name: a.copy() for name, a in mine.items()}
        with pytest.raises(sc.CollectiveMismatchError, match=r"a Reducer's step and its tensors, .* and settings"):
            reducer.reduce(mine)
        assert set(reducer.unsummed) == set(SHAPES)
        for name, kept in residuals(reducer).items():
            np.testing.assert_array_equal(kept, before[name])

    run(P, program)


def test_one_rank_is_not_clipped_and_sends_nothing() -> None:
    def program(ranks: simulated.SimulatedTransport) -> int:
        mine = gradients(0)
        sc.Reducer(mine, 1.0, comm=ranks, clip="median").reduce(mine)
        for name, expected in gradients(0).items():
            np.testing.assert_array_equal(mine[name], expected)
        return ranks.counters.messages_sent

    assert run(1, program) == [0]
