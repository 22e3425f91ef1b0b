"""The recommended setting of a training, to which every way to train defaults; and dense baselines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.reducer.options import ALGORITHM, DENSITY, WIRE, with_dense_steps
from sparsecomm.transport import Transport, simulated
from tests import data

N, DTYPES = 5000, ("float32", "float64")
ROOT = Path(__file__).parents[2]


def ways_to_train() -> dict[str, Callable[..., Any]]:
    """Return those whose libraries are installed."""
    found: dict[str, Callable[..., Any]] = {"Reducer": sc.Reducer}
    for module, names in (
        ("sparsecomm.torch", ("register", "SparseState", "DistributedOptimizer", "register_fsdp")),
        ("sparsecomm.jax", ("sparsify",)),
    ):
        try:
            imported = __import__(module, fromlist=list(names))
        except ImportError:
            continue
        found |= {f"{module}.{name}": getattr(imported, name) for name in names}
    return found


def test_every_way_to_train_defaults_to_the_documented_setting() -> None:
    for name, way in ways_to_train().items():
        parameters = inspect.signature(way).parameters
        assert parameters["density"].default is DENSITY, name
        assert [parameters[option].default for option in ("algorithm", "wire", "dense_steps")] == ["auto", "auto", 0]
    for integration in ("accelerate", "lightning", "transformers"):  # whose imports take seconds
        text = (ROOT / "sparsecomm" / "integrations" / f"{integration}.py").read_text()
        assert "density: Schedule = DENSITY" in text
    said = f"density {DENSITY.density} after {DENSITY.dense_steps} dense steps, "
    said += f'`algorithm="{ALGORITHM}"` and `wire="{WIRE}"`'
    assert said in " ".join((ROOT / "docs" / "choosing.md").read_text().split())


def gradients(dtype: str, rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: data.integers(N, dtype, 100 * step + 10 * rank + i) for i, name in enumerate("ab")}


@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({}, {(ALGORITHM, "own")}),
        ({"wire": "packed"}, {(ALGORITHM, "packed")}),
        ({"op": "mean_of_contributors"}, {("split", "exact"), ("tree", "exact")}),
        ({"scope": "chunk", "chunk": 500}, {("butterfly", "exact"), ("split", "exact"), ("tree", "exact")}),
        ({"algorithm": "fastest"}, {("butterfly", "exact"), ("split", "exact"), ("tree", "exact")}),
        ({"algorithm": "butterfly"}, {("butterfly", "exact")}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # the order in a set varies
)
def test_auto_fits_what_is_asked_for_and_is_dense_at_density_1_only(
    P: int, dtype: str, options: dict[str, Any], sparse: set[tuple[str, str]]
) -> None:
    """Also while a schedule, or ``dense_steps``, changes the density; nothing is lost on the way."""
    schedule = {2: 1.0}

    def program(transport: Transport) -> Any:
        reducer = sc.Reducer(
            gradients(dtype, 0, 0),
            lambda step: schedule.get(step, 0.05),
            comm=transport,
            dense_steps=2,
            **{"op": "sum", **options},
        )
        taken, results = [], []
        for step in range(6):
            pushed = gradients(dtype, transport.rank, step)
            done = reducer.reduce(pushed)
            (bucket,) = reducer._connection.buckets.all
            assert bucket.latest is not None
            taken.append((done.density, bucket.latest.algorithm.name, bucket.latest.choice.wire.name))
            results.append((pushed, {name: reducer.residual(name).copy() for name in reducer.names}))
        return taken, results

    ranks = [rank.value for rank in simulated.run(P, program)]
    names = {"own": {"plain", "packed"} if dtype == "float64" else {WIRE}, "exact": {"plain", "packed"}}
    total: Any = 0
    for step, (density, algorithm, wire) in enumerate(ranks[0][0]):
        assert density == (1.0 if step in (0, 1, 4) else 0.05)
        if density == 1.0:
            assert algorithm == "dense"
        else:
            assert any(algorithm == name and wire in names.get(kind, {kind}) for name, kind in sparse)
        of_ranks = [gradients(dtype, rank, step)["a"] for rank in range(P)]
        total = total + sum(map(np.float64, of_ranks))
        result = ranks[0][1][step][0]["a"]
        left = sum(np.float64(rank[1][step][1]["a"]) for rank in ranks)
        if density == 1.0:
            assert not np.any(left)
            divisor = P if options.get("op") == "mean_of_contributors" else 1
            np.testing.assert_allclose(result * divisor, total, rtol=1e-6)
            total = 0
        elif options.get("op") != "mean_of_contributors":
            np.testing.assert_allclose(result + left, total, rtol=1e-6, atol=1e-4)
            total = total - result
        else:
            total = left


@pytest.mark.parametrize("algorithm", ["auto", "double", "allgather"])
@pytest.mark.parametrize("wire", ["auto", "packed_sign"])
def test_density_1_is_the_exact_mean_whatever_the_algorithm_and_the_wire_are(algorithm: str, wire: str) -> None:
    def program(transport: Transport) -> Any:
        pushed = gradients("float32", transport.rank, 0)
        sc.Reducer(pushed, 1.0, comm=transport, algorithm=algorithm, wire=wire).reduce(pushed)
        return pushed

    mean = sum(gradients("float32", rank, 0)["b"] for rank in range(3)) / np.float32(3)
    for rank in simulated.run(3, program):
        np.testing.assert_array_equal(rank.value["b"], mean)


def test_dense_steps_come_before_a_schedule() -> None:
    assert with_dense_steps(0.1) == 0.1
    for density in (0.1, sc.Warmup(0.1, 4), lambda step: 0.1 * (step + 1)):
        schedule = with_dense_steps(density, 3)
        assert callable(schedule)
        then = [density(step) if callable(density) else density for step in range(5)]
        assert [schedule(step) for step in range(8)] == [1.0, 1.0, 1.0, *then]
    for wrong in (-1, 1.5, True, "two", None):
        with pytest.raises(sc.InvalidInputError, match=r"dense_steps=.*: must be a whole number, at least 0"):
            sc.Reducer({"x": np.zeros(3, np.float32)}, dense_steps=wrong)  # type: ignore[arg-type]
    with pytest.raises(sc.InvalidInputError, match="density=2"):
        with_dense_steps(2.0, 3)
