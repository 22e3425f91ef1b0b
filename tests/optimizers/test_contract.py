"""Promises of `SparseAdamW` that hold for arrays, PyTorch and JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.optimizers.adapters import (
    SHAPES,
    OfArrays,
    OfJax,
    OfTorch,
    OfTorchWithOverlap,
    gradients,
    members_of,
    partial_gradients,
    parts_of,
    run_on,
)
from tests.ranks import errors

every_adapter = pytest.mark.parametrize("make", [OfArrays, OfTorch, OfTorchWithOverlap, OfJax])
with_states = pytest.mark.parametrize("make", [OfArrays, OfTorch])
RULE: dict[str, Any] = {"density": 0.2, "lr": 0.01}


def layout_of(make: Any, layout: str) -> str:
    return "0" if make is OfTorchWithOverlap else layout


def check_equal(optimizers: list[OfArrays], layout: str) -> None:
    """Check that all ranks have the same weights, and all ranks of a slice the same units, bit for bit."""
    for ranks in zip(*members_of(layout), strict=True):
        for rank in ranks:
            ours = optimizers[rank].units
            assert all(data.same_bits(ours[name], optimizers[ranks[0]].units[name]) for name in SHAPES)
            assert {name: len(units) for name, units in ours.items()} == {
                name: end - begin for name, (begin, end) in parts_of(layout, rank).items()
            }
    for optimizer in optimizers:
        assert all(data.same_bits(optimizer.weights[name], w) for name, w in optimizers[0].weights.items())


@pytest.mark.covering(2)
@every_adapter
@pytest.mark.parametrize("layout", ["0", "00011", "0011", "010110"])
@pytest.mark.parametrize("weight_decay", [0.1, {"matrix": 0.3}], ids=["all", "by name"])
def test_weights_are_those_of_arrays(make: Any, layout: str, weight_decay: Any) -> None:
    """Includes a schedule of learning rates, and tensors without gradients."""
    layout = layout_of(make, layout)
    pushed = partial(partial_gradients, P=len(layout)) if make.lacks else gradients
    rule = {"density": 0.2, "betas": (0.8, 0.95), "weight_decay": weight_decay, "wire": "packed"}

    def program(transport: simulated.SimulatedTransport) -> OfArrays:
        ours, theirs = make(transport, **rule), OfArrays(transport, **rule)
        for step in range(9):
            for optimizer in (ours, theirs):
                optimizer.step(pushed(step, transport.rank), 0.02 / (1 + step))
        for name, w in theirs.weights.items():
            tolerance = 1e-6 if make is OfJax and len(layout) == 1 else 0  # Optax adds rounded differences
            np.testing.assert_allclose(ours.weights[name], w, rtol=tolerance)
        for name, moment in theirs.moments.items():
            assert all(data.same_bits(*pair) for pair in zip(ours.moments[name], moment, strict=True))
        return ours

    check_equal(run_on(layout, program), layout)


@pytest.mark.covering(2)
@every_adapter
@pytest.mark.parametrize("layout", ["0", "000", "0011"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e20, 3e38])
@pytest.mark.parametrize("when", [0, 3])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(
    make: Any, layout: str, bad: float, when: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Finite gradients of other ranks stay in their residuals.

    If a node's sum overflows (3e38), the node drops its residual of this weight, and nothing else. If only the square
    of the sum overflows (1e20), all ranks drop theirs.
    """
    layout = layout_of(make, layout)
    P = len(layout)
    in_sums = bool(np.isfinite(bad)) and len(members_of(layout)) < P and when > 0

    def pushed(name: str, rank: int) -> np.ndarray:
        g = gradients(when, rank)[name].ravel()
        return 0 * g if rank == P - 1 and name == "matrix" and not in_sums else g

    def program(transport: simulated.SimulatedTransport) -> OfArrays:
        optimizer: OfArrays = make(transport, **RULE)
        members, parts = (
            next(ranks for ranks in members_of(layout) if transport.rank in ranks),
            parts_of(layout, transport.rank),
        )
        for step in range(6):
            mine = gradients(step, transport.rank)
            if step == when and transport.rank == P - 1:
                mine["matrix"][3, 4] = bad
            before = {name: w.copy() for name, w in optimizer.weights.items()}, optimizer.moments, optimizer.residuals
            optimizer.step(mine)
            same = all(data.same_bits(optimizer.weights[name], w) for name, w in before[0].items())
            assert same == (step == when)
            if step == when and when:
                assert bool(before[1]) == bool(optimizer.moments)
                for name, moment in before[1].items():
                    assert all(data.same_bits(*pair) for pair in zip(optimizer.moments[name], moment, strict=True))
                    added = sum(pushed(name, rank)[slice(*parts[name])] for rank in members)
                    expected = before[2][name] + added / 2.0 ** (optimizer.units[name] - 127.0)
                    if in_sums and name == "matrix" and (bad == 1e20 or P - 1 in members):
                        expected[np.arange(*parts[name]) == 3 * 11 + 4] = 0
                    np.testing.assert_allclose(optimizer.residuals[name], expected, rtol=1e-5, atol=1e-6)
        assert optimizer.steps() == 5
        return optimizer

    check_equal(run_on(layout, program), layout)
    where, name = "a gradient of another rank is not finite", "params['matrix']" if make is OfJax else "matrix"
    for rank in range(0 if in_sums else P - 1):
        assert f"step {when}: rank {rank}: {where}" in caplog.text
    assert (f"rank {P - 1}: the gradient of {name} on this rank is not finite; no rank" in caplog.text) != in_sums
    assert not in_sums or "on this rank is not finite" not in caplog.text


@every_adapter
@pytest.mark.parametrize(("what", "layout"), [("weights", "00"), ("units", "00"), ("weights", "0011")])
def test_weights_and_units_that_differ_are_found(make: Any, what: str, layout: str) -> None:
    if make is OfTorchWithOverlap:
        pytest.skip("several ranks")

    def program(transport: simulated.SimulatedTransport) -> None:
        optimizer = make(transport, check_weights_every=2, **RULE)
        optimizer.step(gradients(0, transport.rank))
        if transport.rank == len(layout) - 1:
            optimizer.damage(what)
        optimizer.step(gradients(1, transport.rank))
        with pytest.raises(sc.WeightMismatchError):
            optimizer.step(gradients(2, transport.rank))
        optimizer.step(gradients(2, transport.rank))  # compares weights again

    raised = errors(len(layout), program, node_of_rank=[*map(int, layout)])
    assert {type(error) for error in raised} == {sc.WeightMismatchError}
    prefix = f"{'params' if what == 'weights' else what}['" if make is OfJax else ""
    assert f"{prefix}bias{'.unit' if what == 'units' and not prefix else ''}" in str(raised[0])


# -- other ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@with_states
@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("layout", ["00", "000", "0011"])
def test_ranks_that_join_take_moments_from_those_that_stay(make: Any, steps: int, joins: bool, layout: str) -> None:
    """If a rank joins three, there are two nodes. If one joins two nodes, sizes differ, and each rank is a node."""
    other = {"000": "0011", "0011": "00112"}.get(layout, layout + "0") if joins else layout

    def begin(transport: simulated.SimulatedTransport) -> tuple[Any, Any]:
        optimizer = make(transport, **RULE)
        for step in range(steps):
            optimizer.step(gradients(step, transport.rank))
        assert optimizer.it.reducer.groups
        return optimizer, {name: w.copy() for name, w in optimizer.weights.items()}

    old = run_on(layout, begin)

    def program(transport: simulated.SimulatedTransport) -> Any:
        new = joins and transport.rank == 0
        optimizer = make(transport, **RULE) if new else old[transport.rank - joins][0]
        for name, w in old[0][1].items():
            optimizer.weights[name][...] = w
        assert optimizer.it.rebuild(transport, joining=new).ranks_joined == ((0,) if joins else ())
        assert optimizer.steps() == steps
        for step in range(4, 8):
            optimizer.step(gradients(step, transport.rank))
        assert optimizer.steps() == steps + 4
        return optimizer

    check_equal(run_on(other, program), other)
