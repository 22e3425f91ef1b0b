"""`sparsecomm.jax.sparse_adamw`: what `sparsecomm.SparseAdamW` makes of the same gradients, up to rounding."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

import jax.numpy as jnp  # noqa: E402

import sparsecomm as sc  # noqa: E402
import sparsecomm.jax as sj  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.ranks import errors, run  # noqa: E402

SHAPES = {"number": (), "matrix": (30, 11), "bias": (11,)}  # JAX has them in the order in which a Reducer has them
RULE: dict[str, Any] = {"density": 0.2, "wire": "packed"}


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return {name: np.array(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def weights() -> dict[str, np.ndarray]:
    return gradients(99, 99)


def by_arrays(transport: Any, steps: int) -> dict[str, np.ndarray]:
    mine = weights()
    decay = {"matrix": 0.1, "bias": 0.1}
    optimizer = sc.SparseAdamW(mine, betas=(0.8, 0.9), weight_decay=decay, comm=transport, **RULE)
    for step in range(steps):
        optimizer.lr = 0.02 / (1 + step)
        optimizer.step(gradients(step, transport.rank))
    return mine


def transformation(ranks: Any, **more: Any) -> Any:
    mask = {"matrix": True, "bias": True, "number": False}
    options = {"mask": mask, "comm": ranks, **RULE, **more}
    return sj.sparse_adamw(lambda step: 0.02 / (1 + step), 0.8, 0.9, weight_decay=0.1, **options)


def by_jax(transport: Any, steps: int, wrap: Any = lambda f: f) -> tuple[dict[str, np.ndarray], Any]:
    optimizer = transformation(transport)
    params: Any = jax.tree.map(jnp.array, weights())
    state = optimizer.init(params)
    update = wrap(lambda g, state, params: optimizer.update(g, state, params))
    for step in range(steps):
        changes, state = update(jax.tree.map(jnp.array, gradients(step, transport.rank)), state, params)
        params = optax.apply_updates(params, changes)
    return {name: np.asarray(p) for name, p in params.items()}, state


def close(ours: Any, theirs: Any) -> None:
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_one_rank(wrap: Any) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        close(by_jax(transport, 8, wrap)[0], by_arrays(transport, 8))

    run(1, program)


@pytest.mark.parametrize("P", [2, 5])
def test_several_ranks(P: int) -> None:
    pytest.importorskip("greenlet")

    def program(transport: simulated.SimulatedTransport) -> Any:
        return *by_jax(transport, 8), by_arrays(transport, 8)

    results = run(P, program)
    for params, state, theirs in results:
        close(params, theirs)
        for name, array in params.items():
            np.testing.assert_array_equal(array, results[0][0][name])
        for ours, first in zip(jax.tree.leaves(state[:4]), jax.tree.leaves(results[0][1][:4]), strict=True):
            np.testing.assert_array_equal(ours, first)


@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_at_density_1_it_is_optax_adamw_of_the_mean(P: int, wrap: Any) -> None:
    if P > 1 and wrap is jax.jit:
        pytest.skip("compiled programs of simulated ranks cannot wait for each other")
    pytest.importorskip("greenlet")
    steps = 60
    theirs = optax.adamw(lambda step: 0.02 / (1 + step), mask={"matrix": True, "bias": True, "number": False})
    expected: Any = jax.tree.map(jnp.array, weights())
    state = theirs.init(expected)
    for step in range(steps):
        everyones = [gradients(step, rank) for rank in range(P)]
        mean = {name: jnp.array(sum(g[name] for g in everyones) / P) for name in SHAPES}
        changes, state = theirs.update(mean, state, expected)
        expected = optax.apply_updates(expected, changes)

    def program(transport: simulated.SimulatedTransport) -> Any:
        mask = {"matrix": True, "bias": True, "number": False}
        optimizer = sj.sparse_adamw(lambda step: 0.02 / (1 + step), mask=mask, density=1.0, comm=transport)
        params: Any = jax.tree.map(jnp.array, weights())
        mine = optimizer.init(params)
        update = wrap(lambda g, state, params: optimizer.update(g, state, params))
        for step in range(steps):
            changes, mine = update(jax.tree.map(jnp.array, gradients(step, transport.rank)), mine, params)
            params = optax.apply_updates(params, changes)
        return params

    for params in run(P, program):
        for name, array in expected.items():
            np.testing.assert_allclose(params[name], array, rtol=3e-6, atol=3e-6)


def test_hyperparameters_that_are_injected() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        inject = optax.inject_hyperparams(
            sj.sparse_adamw, static_args=("comm", "density", "dense_steps", "check_weights_every")
        )
        params: Any = jax.tree.map(jnp.array, weights())
        mine, theirs = inject(0.01, comm=transport, density=1.0), optax.adamw(0.01)
        states, found = [mine.init(params), theirs.init(params)], [params, params]
        for step in range(5):
            states[0].hyperparams["learning_rate"] = jnp.asarray(0.01)
            for i, optimizer in enumerate((mine, theirs)):
                grads = jax.tree.map(jnp.array, gradients(step, 0))
                changes, states[i] = optimizer.update(grads, states[i], found[i])
                found[i] = optax.apply_updates(found[i], changes)
        close(found[0], found[1])

    run(1, program)


@pytest.mark.parametrize(("P", "bad"), [(1, np.nan), (1, 1e20), (3, np.inf), (3, 1e20)])
@pytest.mark.parametrize("when", [0, 3])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(P: int, bad: float, when: int) -> None:
    """And no gradient of the other ranks is lost: it stays in their residuals."""
    pytest.importorskip("greenlet")

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer = transformation(transport)
        params: Any = jax.tree.map(jnp.array, weights())
        state = optimizer.init(params)
        for step in range(6):
            given, before = gradients(step, transport.rank), state
            if step == when and transport.rank == P - 1:
                given["matrix"][3, 4] = bad
            changes, state = optimizer.update(jax.tree.map(jnp.array, given), state, params)
            if step == when:
                assert not any(np.asarray(change).any() for change in jax.tree.leaves(changes))
                for old, new in zip(jax.tree.leaves(before[:4]), jax.tree.leaves(state[:4]), strict=True):
                    np.testing.assert_array_equal(old, new)
                for name in SHAPES:
                    unit = 2.0 ** np.floor(np.log2(np.sqrt(before.nu[name]) + np.float32(1e-8)))
                    kept = given[name] / unit if when and transport.rank < P - 1 else 0
                    np.testing.assert_allclose(state.residuals[name], before.residuals[name] + kept, rtol=1e-5)
            params = optax.apply_updates(params, changes)
        assert int(state.step) == 5
        return {name: np.asarray(p) for name, p in params.items()}

    results = run(P, program)
    for params in results:
        for name, array in results[0].items():
            assert np.isfinite(array).all()
            np.testing.assert_array_equal(params[name], array)


def test_sums_that_would_overflow_change_nothing_on_any_rank() -> None:
    """What waits on two ranks makes a second moment infinite; the next step counts."""
    pytest.importorskip("greenlet")

    def program(transport: simulated.SimulatedTransport) -> None:
        optimizer = transformation(transport)
        params: Any = jax.tree.map(jnp.array, weights())
        state = optimizer.init(params)
        for step in range(4):
            if step == 2:
                state = state._replace(
                    residuals={**state.residuals, "matrix": state.residuals["matrix"].at[3, 4].set(1e21)}
                )
            before = state
            changes, state = optimizer.update(jax.tree.map(jnp.array, gradients(step, transport.rank)), state, params)
            assert int(state.step - before.step) == (step != 2)
            assert any(np.asarray(change).any() for change in jax.tree.leaves(changes)) == (step != 2)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
            params = optax.apply_updates(params, changes)

    run(2, program)


def test_types_and_masks_by_functions() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        params = {"half": jnp.ones((40, 5), jnp.bfloat16), "whole": jnp.ones(60), "none": jnp.ones((0, 3))}
        mask = lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)  # noqa: E731
        optimizer = sj.sparse_adamw(0.1, weight_decay=0.5, mask=mask, density=0.5, comm=transport)
        state = optimizer.init(params)
        grads = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params)
        for _ in range(3):
            changes, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, changes)
        assert params["half"].dtype == jnp.bfloat16
        assert state.nu["half"].dtype == jnp.float32
        assert (params["half"] < 1).any()

    run(1, program)


def test_parameters_or_moments_that_differ_are_found() -> None:
    pytest.importorskip("greenlet")

    def program(transport: simulated.SimulatedTransport) -> None:
        optimizer = transformation(transport, check_weights_every=1)
        params: Any = jax.tree.map(jnp.array, weights())
        state = optimizer.init(params)
        for step in range(2):
            _, state = optimizer.update(jax.tree.map(jnp.array, gradients(step, transport.rank)), state, params)
            if transport.rank:
                state = state._replace(mu=jax.tree.map(lambda m: m + 1, state.mu))

    assert {type(error) for error in errors(2, program)} == {sc.WeightMismatchError}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"learning_rate": -1.0}, r"lr=-1\.0"),
        ({"b1": 1.0}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"density": 0.0}, "density"),
        ({"check_weights_every": "often"}, "check_weights_every"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=why):
        sj.sparse_adamw(**{"learning_rate": 0.1, **wrong})


def test_parameters_are_needed() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        optimizer = transformation(transport)
        params = jax.tree.map(jnp.array, weights())
        with pytest.raises(sc.InvalidInputError, match="update got no parameters"):
            optimizer.update(params, optimizer.init(params))

    run(1, program)
