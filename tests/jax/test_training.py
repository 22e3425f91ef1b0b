"""`sparse_adamw` and `LocalSteps` of JAX, besides `tests/optimizers/test_contract.py` and
`tests/local_steps/test_contract.py`: jit, optax, types, trees.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from tests.local_steps.adapters import OnJax  # noqa: E402
from tests.optimizers.adapters import OfArrays, gradients, weights  # noqa: E402
from tests.ranks import run  # noqa: E402
from tests.reducer.programs import bits  # noqa: E402

MASK = {"matrix": True, "bias": True, "number": False}


def rate(step: Any) -> Any:
    return 0.02 / (1 + step)


def trained(optimizer: Any, steps: int, wrap: Any = lambda f: f) -> dict[str, np.ndarray]:
    """Return the weights after steps of one rank."""
    params: Any = jax.tree.map(jnp.array, weights())
    state = optimizer.init(params)
    update = wrap(lambda g, state, params: optimizer.update(g, state, params))
    for step in range(steps):
        changes, state = update(jax.tree.map(jnp.array, gradients(step, 0)), state, params)
        params = optax.apply_updates(params, changes)
    return {name: np.asarray(p) for name, p in params.items()}


@pytest.mark.parametrize(("density", "dense_steps"), [(0.2, 0), (0.2, 3), (1.0, 0)])
def test_under_jit_it_equals_the_optimizer_of_arrays(density: float, dense_steps: int) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        rule: dict[str, Any] = {"density": density, "dense_steps": dense_steps, "wire": "packed"}
        transform = sj.sparse_adamw(rate, 0.8, 0.9, weight_decay=0.1, mask=MASK, comm=transport, **rule)
        actual = trained(transform, 8, jax.jit)
        of_arrays = OfArrays(transport, betas=(0.8, 0.9), weight_decay={"matrix": 0.1, "bias": 0.1}, **rule)
        for step in range(8):
            of_arrays.step(gradients(step, 0), float(str(rate(np.float32(step)))))
        for name, array in actual.items():
            np.testing.assert_allclose(
                array, of_arrays.weights[name], rtol=2e-7
            )  # JAX adds the rounded update to the weights

    run(1, program)


def test_hyperparameters_that_are_injected() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        static = ("comm", "density", "dense_steps", "check_weights_every")
        mine = optax.inject_hyperparams(sj.sparse_adamw, static_args=static)(0.01, comm=transport, density=1.0)
        expected = trained(optax.adamw(0.01), 2, jax.jit)
        for name, array in trained(mine, 2).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5)

    run(1, program)


def steps_made(optimizer: Any, rank: int, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    """Return parameters and state after more steps."""
    for step in steps:
        changes, state = optimizer.update(jax.tree.map(jnp.array, gradients(step, rank)), state, params)
        params = optax.apply_updates(params, changes)
    return params, state


def flat(tree: Any) -> list[tuple[Any, bytes]]:
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("resumed", [1, 2, 3])
def test_a_step_depends_on_its_arguments_alone(resumed: int) -> None:
    """Also when units lag behind the moments, after dense steps, and in another transformation."""
    pytest.importorskip("greenlet")

    def program(transport: simulated.SimulatedTransport) -> None:
        def new() -> Any:
            return sj.sparse_adamw(rate, 0.8, 0.9, comm=transport, density=0.2, dense_steps=2, check_weights_every=None)

        first, params = new(), jax.tree.map(jnp.array, weights())
        early = steps_made(first, transport.rank, params, first.init(params), range(resumed))
        copies = flat(early)
        late = steps_made(first, transport.rank, *early, range(resumed, 5))
        for optimizer in (first, new()):
            assert flat(steps_made(optimizer, transport.rank, *early, range(resumed, 5))) == flat(late)
        assert flat(early) == copies

    run(2, program)


@pytest.mark.parametrize("again", [True, False])
def test_after_an_interrupt_a_step_is_repeated_or_dropped(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is interrupted while it waits. It repeats the step, or all ranks go back to an older state."""
    pytest.importorskip("greenlet")
    wait, interrupted = sc.Reducer.wait, []

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer = sj.sparse_adamw(rate, 0.8, 0.9, comm=transport, density=0.2)
        params: Any = jax.tree.map(jnp.array, weights())
        old = steps_made(optimizer, transport.rank, params, optimizer.init(params), range(2))
        expected = steps_made(optimizer, transport.rank, *old, range(2, 5))
        before = steps_made(optimizer, transport.rank, *old, range(2, 3))
        if transport.rank == 0:
            interrupted.append(optimizer)
            with pytest.raises(KeyboardInterrupt):
                steps_made(optimizer, 0, *before, range(3, 4))
        if transport.rank or again:
            after = steps_made(optimizer, transport.rank, *before, range(3, 4))
        if not again:
            after = steps_made(optimizer, transport.rank, *old, range(2, 4))
        assert flat(steps_made(optimizer, transport.rank, *after, range(4, 5))) == flat(expected)

    def interrupt(reducer: Any, *args: Any) -> Any:
        if interrupted and reducer.transport.rank == 0:
            interrupted.clear()
            raise KeyboardInterrupt
        return wait(reducer, *args)

    monkeypatch.setattr(sc.Reducer, "wait", interrupt)
    run(2, program)


def test_16_bit_parameters_are_rounded_and_their_exact_values_kept() -> None:
    """Compare with the optimizer of arrays, which updates its weights in place."""
    pytest.importorskip("greenlet")
    half: Any = jnp.bfloat16

    def program(transport: simulated.SimulatedTransport) -> Any:
        transform = sj.sparse_adamw(1e-4, comm=transport, density=0.2)
        exact = {name: w.astype(half) for name, w in weights().items()}
        of_arrays = sc.SparseAdamW(exact, 1e-4, weight_decay=1e-4, comm=transport, density=0.2)
        params: Any = jax.tree.map(jnp.array, exact)
        state = transform.init(params)
        for step in range(20):
            grads = {name: g.astype(half) for name, g in gradients(step, transport.rank).items()}
            of_arrays.step(grads)
            changes, state = transform.update(jax.tree.map(jnp.array, grads), state, params)
            params = optax.apply_updates(params, changes)
        for name, moments in of_arrays.state_dict()["moments"].items():
            own = slice(*moments["part"])
            assert moments["compensation"].any() == bool(len(moments["compensation"]))
            actual = np.asarray(params[name], "f4").reshape(-1)[own] + np.asarray(state.compensation[name])
            np.testing.assert_allclose(
                actual, exact[name].astype("f4").reshape(-1)[own] + moments["compensation"], rtol=2e-6
            )
        return flat(params)

    first, second = run(2, program)
    assert first == second


def test_types_and_masks_by_functions() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        params = {"half": jnp.ones((40, 5), jnp.bfloat16), "whole": jnp.ones(60), "none": jnp.ones((0, 3))}
        mask = lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)  # noqa: E731
        optimizer = sj.sparse_adamw(0.1, weight_decay=0.5, mask=mask, density=0.5, comm=transport)
        state = optimizer.init(params)
        with pytest.raises(sc.InvalidInputError, match="update got no parameters"):
            optimizer.update(params, state)
        grads, update = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params), jax.jit(optimizer.update)
        for _ in range(3):
            changes, state = update(grads, state, params)
            params = optax.apply_updates(params, changes)
        assert params["half"].dtype == jnp.bfloat16
        assert state.nu["half"].dtype == jnp.float32
        assert (params["half"] < 1).any()
        with pytest.raises(sc.InvalidInputError, match=r"state: mu has leaves of .*expected \[\(40, 5\), \(0, 3\), "):
            optimizer.update(grads, state._replace(mu=jax.tree.map(lambda _: jnp.zeros(0), params)), params)

    run(1, program)


def test_wrong_arguments() -> None:
    for wrong, why in (({"learning_rate": -1.0}, r"lr=-1\.0"), ({"b1": 1.0}, "betas"), ({"density": 0.0}, "density")):
        with pytest.raises(sc.InvalidInputError, match=why):
            sj.sparse_adamw(**{"learning_rate": 0.1, **wrong})


# -- local steps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def float64() -> Iterator[None]:
    """Undo what `OnJax` sets."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.usefixtures("float64")
def test_trees_are_replaced_and_never_written() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OnJax(transport, sync_every=4, fragments=2)
        mine.count = lambda: None  # type: ignore[method-assign]
        for step in range(1, 10):
            mine.step(transport.rank, step)
            trained, before = mine.parameters, bits(mine.values())
            mine.parameters = mine.local.step(trained)
            assert (mine.parameters is trained) == (step not in (2, 4, 6, 8))
            assert bits(mine.named(trained)) == before

    run(2, program)


@pytest.mark.usefixtures("float64")
def test_trees_that_are_refused() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OnJax(transport)
        params, local = mine.parameters, mine.local
        with pytest.raises(sc.InvalidInputError, match="expected PyTreeDef"):
            local.step(params["rest"])
        with pytest.raises(sc.InvalidInputError, match=r"params\['first'\]: got ndarray; expected a JAX array"):
            local.step(params | {"first": np.zeros((20, 30), np.float32)})
        with pytest.raises(sc.InvalidInputError, match=r"got a traced array; call LocalSteps outside of jax\.jit"):
            jax.jit(local.step)(params)
        assert local.step(params) is params

    run(1, program)
