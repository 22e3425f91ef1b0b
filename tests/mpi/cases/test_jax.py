"""Compiled `sparsecomm.jax`, which simulated ranks cannot run. Every rank runs this file."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from tests.mpi.ranks import RANK, WORLD, P

if P != 3:
    pytest.skip("on 3 ranks only: JAX takes long to load and to compile", allow_module_level=True)
os.environ["JAX_PLATFORMS"] = "cpu"
jax = pytest.importorskip("jax", reason="JAX is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

import jax.numpy as jnp  # noqa: E402

import sparsecomm.jax as sj  # noqa: E402


def everyones(value: Any) -> list[Any]:
    jax.effects_barrier()
    return WORLD.allgather(value)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def integers(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, RANK])
    shapes = {"a": ((40, 30), "float32"), "b": ((7,), "float32"), "c": ((900,), "bfloat16"), "d": ((50, 11), "float16")}
    return {name: jnp.asarray(rng.integers(-3, 4, shape), dtype) for name, (shape, dtype) in shapes.items()}


def test_calls_keep_their_order_in_scan() -> None:
    """The calls have equal sizes and do not depend on each other."""

    def body(carry: Any, i: Any) -> tuple[Any, Any]:
        x, r = carry
        y, r = sj.sparse_allreduce(x + i, 5, residual=r, algorithm="butterfly")
        z = sj.sparse_allreduce(x * 0 + RANK + i, 3, algorithm="butterfly")
        return (x, r), (y, z)

    x = jnp.asarray(integers(3)["c"], jnp.float32)
    steps = jnp.arange(6.0)
    (_, r), (ys, zs) = jax.jit(lambda x: jax.lax.scan(body, (x, jnp.zeros_like(x)), steps))(x)
    assert len(set(map(tuple, everyones(bits((ys, zs)))))) == 1
    residual = np.zeros(x.size, np.float32)
    for i in range(6):
        y = sc.sparse_allreduce(np.asarray(x) + np.float32(i), 5, residual=residual, algorithm="butterfly").to_dense()
        assert bits(ys[i]) == bits(y)
        expected = np.zeros(x.size, np.float32)
        expected[:3] = sum(range(P)) + P * i
        np.testing.assert_array_equal(zs[i], expected)
    assert bits(r) == bits(residual)


def test_ranks_that_disagree_all_raise_and_go_on() -> None:
    x, residual = jnp.ones(100), jnp.zeros(100)
    k = 6 if RANK == 1 else 5
    with pytest.raises(sc.CollectiveMismatchError, match=r"k is [56] on rank . and [56] on rank"):
        sj.sparse_allreduce(x, k, residual=residual, algorithm="butterfly")
    f = jax.jit(lambda x, r: sj.sparse_allreduce(x, k, residual=r, algorithm="butterfly"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"CollectiveMismatchError: .*k is [56] on rank"):
        jax.block_until_ready(f(x, residual))
    np.testing.assert_array_equal(residual, 0)
    result = jax.jit(lambda x: sj.sparse_allreduce(x, 4, algorithm="butterfly"))(x)
    np.testing.assert_array_equal(result[:5], [P, P, P, P, 0])


def test_weights_that_differ_are_found() -> None:
    params = {"w": jnp.ones(300), "b": jnp.full(3, jnp.nan)}
    changed = params | {"w": params["w"].at[7].add(RANK == 2)}

    @cache
    def compiled(every: int | None) -> Any:
        chain = optax.chain(sj.sparsify(0.1, check_weights_every=every), optax.sgd(0.1))
        update = lambda params, state: chain.update(jax.tree.map(jnp.ones_like, params), state, params)[1]  # noqa: E731
        return chain.init(params), jax.jit(update)

    def step(every: int | None, params: Any, state: Any = None) -> Any:
        first, update = compiled(every)
        return jax.block_until_ready(update(params, state or first))

    step(None, changed)
    step(0, changed, step(0, params))  # weights are compared in step 0 only
    with pytest.raises(Exception, match=r"params\['w'\], float32 \(300,\): the weights of rank 2 differ"):
        step(0, changed)
    with pytest.raises(Exception, match=r"params\['w'\], float32 \(300,\): the weights of rank 2 differ"):
        step(1, changed, step(1, params))
    sc.sparse_allreduce(np.ones(4, np.float32), 4)


def test_adamw_makes_the_same_weights_and_units_everywhere() -> None:
    """The first of its two exchanges happens only in step 0."""
    optimizer = sj.sparse_adamw(0.05, density=0.2)
    params: Any = {name: leaf for name, leaf in integers(0).items() if name in "ad"}
    params = jax.tree.map(jnp.array, WORLD.bcast(jax.tree.map(np.asarray, params)))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    before = params
    for step in range(4):
        grads = {name: leaf for name, leaf in integers(step + 1).items() if name in "ad"}
        changes, state = update(grads, state, params)
        params = optax.apply_updates(params, changes)
    assert bits(params) != bits(before)
    assert len(set(map(tuple, everyones(bits((params, state.step, state.units)))))) == 1
