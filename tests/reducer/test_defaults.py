"""Every front end defaults to the recommended settings; and dense baselines."""

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
    """Return the front ends whose libraries are installed."""
    ways: dict[str, Callable[..., Any]] = {"Reducer": sc.Reducer}
    for module, names in (
        ("sparsecomm.torch", ("register", "SparseState", "DistributedOptimizer", "register_fsdp")),
        ("sparsecomm.jax", ("sparsify",)),
    ):
        try:
            imported = __import__(module, fromlist=list(names))
        except ImportError:
            continue
        ways |= {f"{module}.{name}": getattr(imported, name) for name in names}
    return ways


def test_every_way_to_train_defaults_to_the_documented_setting() -> None:
    for name, way in ways_to_train().items():
        parameters = inspect.signature(way).parameters
        assert parameters["density"].default is DENSITY, name
        assert [parameters[option].default for option in ("algorithm", "wire", "dense_steps")] == ["auto", "auto", None]
    for integration in ("accelerate", "lightning", "transformers"):  # their imports take seconds
        text = (ROOT / "sparsecomm" / "integrations" / f"{integration}.py").read_text()
        assert "density: Schedule = DENSITY" in text
    said = f"For SGD it is {DENSITY.density}, after {DENSITY.dense_steps} dense steps. "
    said += f'Both use `algorithm="{ALGORITHM}"` and `wire="{WIRE}"`'
    assert said in " ".join((ROOT / "docs" / "guides" / "choosing.md").read_text().split())


def gradients(dtype: str, rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: data.integers(N, dtype, 100 * step + 10 * rank + i) for i, name in enumerate("ab")}


@pytest.mark.covering(1)
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
    """This holds while a schedule, or ``dense_steps``, changes the density."""
    schedule = {2: 1.0}

    def program(transport: Transport) -> Any:
        options_ = {"comm": transport, "dense_steps": 2, "op": "sum", **options}
        reducer = sc.Reducer(gradients(dtype, 0, 0), lambda step: schedule.get(step, 0.05), **options_)
        taken = []
        for step in range(6):
            done = reducer.reduce(gradients(dtype, transport.rank, step))
            (bucket,) = reducer.buckets
            assert bucket.last_plan is not None
            taken.append((done.density, bucket.last_plan.algorithm.name, bucket.last_plan.choice.wire.name))
            assert (done.density < 1) == reducer.residual("a").any()
        return taken

    names = {"own": {"plain", "packed"} if dtype == "float64" else {WIRE}, "exact": {"plain", "packed"}}
    for step, (density, algorithm, wire) in enumerate(simulated.run(P, program)[0].value):
        assert density == (1.0 if step in (0, 1, 4) else 0.05)
        if density == 1.0:
            assert algorithm == "dense"
        else:
            assert any(algorithm == name and wire in names.get(kind, {kind}) for name, kind in sparse)


def test_dense_steps_come_before_a_schedule() -> None:
    assert with_dense_steps(0.1) == 0.1
    for density in (0.1, sc.Warmup(0.1, 4), lambda step: 0.1 * (step + 1)):
        schedule = with_dense_steps(density, 3)
        assert callable(schedule)
        then = [density(step) if callable(density) else density for step in range(5)]
        assert [schedule(step) for step in range(8)] == [1.0, 1.0, 1.0, *then]
    for warmup in (DENSITY, sc.Warmup(0.1, 4, dense_steps=7)):  # ``dense_steps`` replaces the warm-up's own
        assert with_dense_steps(warmup) is warmup
        for count in (0, 3):
            schedule = with_dense_steps(warmup, count)
            assert [schedule(step) for step in range(8)] == [1.0] * count + [
                warmup(warmup.dense_steps + step) for step in range(8 - count)
            ]
    for wrong in (-1, 1.5, True, "two"):
        with pytest.raises(sc.InvalidInputError, match=r"dense_steps=.*: must be a whole number, at least 0"):
            sc.Reducer({"x": np.zeros(3, np.float32)}, dense_steps=wrong)  # type: ignore[arg-type]
    with pytest.raises(sc.InvalidInputError, match="density=2"):
        with_dense_steps(2.0, 3)
