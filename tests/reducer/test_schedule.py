"""Densities: what is one, and what a function may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.reducer.schedule import density_at
from sparsecomm.transport import simulated

X = np.ones(100, np.float32)
NONE = [1, np.int64(1), True, np.True_, "0.01", b"1", 0, 0.0, -0.5, 1.5, float("nan"), None, [0.5], np.array(0.5), 1j]


@pytest.mark.parametrize("density", NONE, ids=repr)
def test_what_is_no_density_is_refused_at_once(density: Any) -> None:
    says = r"density=.*: expected a float in \(0, 1\].*1\.0 is a dense sum"
    with pytest.raises(sc.InvalidInputError, match=says):
        sc.Reducer({"x": X}, density)
    with pytest.raises(sc.InvalidInputError, match=says):
        sc.LocalSteps({"x": X.copy()}, density)
    with pytest.raises(sc.InvalidInputError, match=says):
        sc.Warmup(density, 10)


@pytest.mark.parametrize("density", NONE, ids=repr)
def test_what_is_no_density_is_refused_by_frameworks(density: Any) -> None:
    torch, says = pytest.importorskip("torch"), r"density=.*: expected a float in \(0, 1\]"
    model = torch.nn.Linear(3, 2)
    with pytest.raises(sc.InvalidInputError, match=says):
        sc.torch.SparseState(model.named_parameters(), density)
    with pytest.raises(sc.InvalidInputError, match=says):
        sc.torch.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), density)


@pytest.mark.parametrize(
    "density", [0.5, 1.0, np.float32(0.25), np.float64(1.0), sc.Warmup(0.01, 4, start=1.0)], ids=repr
)
def test_what_is_one(density: Any) -> None:
    assert 0 < density_at(density, 0) <= 1
    simulated.run(2, lambda ranks: sc.Reducer({"x": X}, density, comm=ranks).reduce({"x": X.copy()}))


@pytest.mark.parametrize("returned", [1, 1.0, 0.5, np.float32(0.5), np.array(0.5)], ids=repr)
def test_what_a_function_may_return(returned: Any) -> None:
    assert density_at(lambda step: returned, 3) in (0.5, 1.0)


@pytest.mark.parametrize("returned", [None, "0.5", True, 2, 0, -1, float("nan"), [], 10**400, np.ones(2)], ids=repr)
def test_what_a_function_may_not(returned: Any) -> None:
    with pytest.raises(sc.InvalidInputError, match=r"density: the function returned .* for step 3; expected a float"):
        density_at(lambda step: returned, 3)


def test_a_function_that_fails_later_changes_nothing() -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer({"x": X}, lambda step: 0.5 if step < 1 else "x", comm=ranks)  # type: ignore[arg-type, return-value]
        reducer.reduce({"x": X.copy()})
        with pytest.raises(sc.InvalidInputError, match=r"returned 'x' for step 1"):
            reducer.push("x", X.copy())
        assert not reducer.pending

    simulated.run(2, program)
