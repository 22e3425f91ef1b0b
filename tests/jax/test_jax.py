"""`sparsecomm.jax` in one process. Between ranks: `tests/mpi/cases/test_jax.py`."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import sparsecomm as sc  # noqa: E402
import sparsecomm.jax as sj  # noqa: E402
from sparsecomm.jax.exchange import TreeExchange  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests import data  # noqa: E402
from tests.processes import run_python  # noqa: E402
from tests.ranks import run  # noqa: E402

JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


@pytest.fixture(autouse=True)
def _with_float64() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def same(a: Any, b: Any) -> bool:
    """Return whether two trees have the same structure, types and bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        data.same_bits(np.asarray(x), np.asarray(y)) for x, y in pairs
    )


def mixed(seed: int = 0) -> dict[str, Any]:
    """Return a tree with leaves of all types and of few and many elements."""
    shapes = {"float16": (30, 40), "bfloat16": (1100,), "float32": (7, 11, 20), "float64": (2000,)}
    tree = {name: jnp.asarray(data.integers(int(np.prod(s)), name, seed)).reshape(s) for name, s in shapes.items()}
    return tree | {"small": [jnp.ones(3, jnp.bfloat16), jnp.ones(()), jnp.ones((0, 4), jnp.float32)]}


# -- one array --------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@JIT
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("shape", [(1000,), (10, 20, 5), (), (0, 3)])
@pytest.mark.parametrize("k", [1, 0.1])
def test_one_rank_gets_its_top_k(wrap: Any, dtype: str, shape: tuple[int, ...], k: float) -> None:
    x = data.gradient("normal", int(np.prod(shape)), dtype, 3).reshape(shape)
    accumulator = np.float64 if dtype == "float64" else np.float32
    expected = data.integers(x.size, "float32", 5).reshape(shape).astype(accumulator)
    residual, before = jnp.array(expected), jnp.array(x)
    entries = sc.topk(x, k, residual=expected)
    result, new = wrap(lambda x, r: sj.sparse_allreduce(x, k, residual=r, algorithm="butterfly"))(before, residual)
    assert data.same_bits(np.asarray(result), entries.to_dense(np.empty_like(x)))
    assert data.same_bits(np.asarray(new), expected)
    assert data.same_bits(np.asarray(before), x)  # not written
    alone = wrap(lambda x: sj.sparse_allreduce(x, k, algorithm="butterfly"))(before)
    assert data.same_bits(np.asarray(alone), sc.topk(x, k).to_dense(np.empty_like(x)))


# -- trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@JIT
@pytest.mark.parametrize("scope", ["model", "tensor", "chunk"])
@pytest.mark.parametrize("dense_below", [0, 1024, 10**6])
def test_trees_lose_no_gradient(wrap: Any, scope: str, dense_below: int) -> None:
    residuals = sj.init_residuals(mixed())
    f = wrap(
        lambda g, r: sj.allreduce_tree(
            g, 0.1, residuals=r, scope=scope, chunk=50, dense_below=dense_below, algorithm="tree"
        )
    )
    for step in range(3):
        grads = mixed(step)
        before = jax.tree.map(lambda r, g: r + g, residuals, grads)
        result, residuals = f(grads, residuals)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), result) == jax.tree.map(lambda a: (a.shape, a.dtype), grads)
        assert same(jax.tree.map(lambda r, a: r + a, residuals, result), before)
        for leaf, residual in zip(jax.tree.leaves(result), jax.tree.leaves(residuals), strict=True):
            assert not (residual.any() and leaf.size < dense_below)
        large = [a for a in jax.tree.leaves(result) if a.size >= dense_below]
        single = [[a] for a in large]
        together = [[a for a in large if (a.dtype == np.float64) is double] for double in (False, True)]
        if scope == "chunk":
            single = [[part] for a in large for part in np.split(np.ravel(a), range(50, a.size, 50))]
        for group in together if scope == "model" else single:
            size = 50 if scope == "chunk" else sum(a.size for a in group)
            assert sum(np.count_nonzero(a) for a in group) <= (max(1, round(0.1 * size)) if size else 0)


def test_all_leaves_travel_in_one_callback() -> None:
    jaxpr = jax.make_jaxpr(lambda g: sj.allreduce_tree(g, 0.1, scope="tensor"))(mixed())
    assert [e.primitive.name for e in jaxpr.eqns].count("sparsecomm_exchange") == 1


def test_the_exchange_on_a_device_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange on a device, with NumPy instead of CuPy."""
    grads, residuals = mixed(), sj.init_residuals(mixed(1))
    expected = sj.allreduce_tree(grads, 0.1, residuals=residuals)
    on_device = TreeExchange.on_device
    monkeypatch.setattr(TreeExchange, "on_host", lambda plan, *arguments: on_device(plan, *arguments, arrays="numpy"))
    assert same(sj.allreduce_tree(grads, 0.1, residuals=residuals), expected)


# -- under transformations --------------------------------------------------------------------------------------------


def test_in_loops() -> None:
    def step(x: Any) -> Any:
        return x - sj.sparse_allreduce(x, 1, algorithm="butterfly")

    x = jnp.array([3.0, -5, 1, 4])
    assert jax.lax.scan(lambda c, _: (step(c), c[1]), x, None, length=2)[0].tolist() == [3, 0, 1, 0]
    assert jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: step(c), x))(x).tolist() == [0, 0, 1, 0]
    assert jax.lax.while_loop(lambda c: jnp.abs(c).max() > 2, step, x).tolist() == [0, 0, 1, 0]
    assert jax.lax.cond(True, step, lambda x: x, x).tolist() == [3, 0, 1, 4]
    assert jax.checkpoint(step)(x).tolist() == [3, 0, 1, 4]


@JIT
def test_vmap_and_grad_are_refused(wrap: Any) -> None:
    f = wrap(lambda x: sj.sparse_allreduce(x, 1).sum())
    with pytest.raises(sc.InvalidInputError, match=r"vmap .*; call it on the whole batch"):
        jax.vmap(f)(jnp.ones((2, 3)))
    with pytest.raises(sc.InvalidInputError, match=r"no derivative; take the gradient first"):
        jax.grad(f)(jnp.ones(3))


PROGRAM = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(200, exit=True)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, sparsecomm.jax as sj
x = jnp.arange(3_000_001, dtype=jnp.float32)
def step(c, _):
    return sj.allreduce_tree([c[1:], c, c[3:] * 2], 0.01)[1] + x, c[:2]
f = jax.jit(lambda y: jax.lax.scan(step, y, None, length=3)[0])
for _ in range(3):
    y = f(x)
    z = jnp.sin(y)
jax.block_until_ready((y, z))
print("done")
"""


def test_no_deadlock_on_one_core() -> None:
    """XLA's only thread makes the callbacks, with memory that may not have the alignment that JAX prefers."""
    assert run_python("-c", PROGRAM) == (0, "done\n")


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, sparsecomm as sc, sparsecomm.jax as sj
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((2,), ("d",))
x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("d")))
f = lambda x: sj.sparse_allreduce(x, 1)
g = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
for call in (lambda: f(x), lambda: jax.jit(f)(x), lambda: g(x), lambda: jax.pmap(f)(jnp.ones((2, 2)))):
    try:
        call()
    except sc.InvalidInputError as error:
        assert "expected one device in each process" in str(error), error
    else:
        raise AssertionError("not refused")
assert f(jax.device_put(jnp.ones(3), jax.devices()[1])).devices() == {jax.devices()[1]}
print("done")
"""


def test_several_devices_are_refused() -> None:
    assert run_python("-c", SHARDED) == (0, "done\n")


# -- optax ------------------------------------------------------------------------------------------------------------


def test_a_chain_of_optax_with_a_schedule() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    asked: list[int] = []

    def density(step: int) -> float:
        asked.append(step)
        return (0.5, 0.01)[min(step, 1)]

    chain = optax.chain(sj.sparsify(density, dense_below=0), optax.sgd(1.0))
    grads = {"w": jnp.asarray(data.gradient("normal", 400, "float32"))}
    params = {"w": jnp.zeros(400, jnp.float32)}
    state = jax.jit(chain.init)(params)
    step = jax.jit(chain.update)
    for entries in (200, 4, 4):
        updates, state = step(grads, state, params)
        assert np.count_nonzero(updates["w"]) == entries
        state = pickle.loads(pickle.dumps(state))
    assert asked == [0, 0, 1, 2]  # the first call checks the schedule
    assert (int(state[0].step), state[0].step.dtype) == (3, jnp.int32)
    updates, _ = jax.jit(optax.chain(sj.sparsify(optax.linear_schedule(1.0, 0.5, 1), dense_below=0)).update)(
        grads, (sj.SparsifyState(jnp.int32(1), sj.init_residuals(grads)),)
    )
    assert np.count_nonzero(updates["w"]) == 200


@pytest.mark.parametrize(
    "options", [{}, {"op": "mean_of_contributors"}, {"scope": "chunk"}, {"algorithm": "double", "wire": "packed_sign"}]
)
def test_sparsify_is_dense_at_density_1_and_its_defaults_fit_all_types(options: dict[str, Any]) -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    pytest.importorskip("greenlet")
    P, dtypes = 2, ["float32"] if "wire" in options else ["float32", "float64"]

    def grads(rank: int) -> dict[str, Any]:
        return {dtype: jnp.asarray(data.integers(3000, dtype, rank)) for dtype in dtypes}

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = grads(transport.rank)
        for transform in (
            sj.sparsify(1.0, comm=transport, **options),
            sj.sparsify(0.05, comm=transport, dense_steps=1, **options),
        ):
            means, state = transform.update(mine, transform.init(mine))
            assert not any(np.any(residual) for residual in jax.tree.leaves(state.residuals))
            yield means
        means, state = transform.update(mine, state)
        assert all(0 < np.count_nonzero(mean) < 600 for mean in means.values())

    ranks = simulated.run(P, lambda transport: list(program(transport)))
    mean = jax.tree.map(lambda *parts: sum(parts) / P, *map(grads, range(P)))
    assert all(same(tree, mean) for rank in ranks for tree in rank.value)


SPARSIFY: dict[str, dict[str, Any]] = {
    "model": {},
    "tensor": {"scope": "tensor", "dense_below": 0, "wire": "packed_int8"},
    "chunk": {"scope": "chunk", "chunk": 50, "algorithm": "split", "op": "mean_of_contributors"},
    "dense": {"density": 1.0},
}


@pytest.mark.parametrize("way", SPARSIFY)
def test_sparsify_skips_steps_that_are_not_finite(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """No rank applies a NaN or keeps it in its residuals."""
    optax = pytest.importorskip("optax", reason="optax is not installed")
    pytest.importorskip("greenlet")
    P, skipped = 3, 2

    def gradients(step: int, rank: int) -> dict[str, Any]:
        random = np.random.default_rng((step, rank))
        return {
            "w": random.normal(size=(40, 50)).astype("f4"),
            "b": random.normal(size=9).astype("f4"),
            "n": np.ones((0, 3), "f4"),
        }

    def program(transport: simulated.SimulatedTransport) -> Any:
        chain = optax.chain(sj.sparsify(**({"density": 0.02} | SPARSIFY[way]), comm=transport), optax.sgd(0.1, 0.9))
        params: Any = jax.tree.map(jnp.zeros_like, gradients(0, 0))
        state = chain.init(params)
        for step in range(6):
            grads, before = gradients(step, transport.rank), state[0]
            if step == skipped and transport.rank == P - 1:
                grads["w"][3, :40] = -np.inf
            updates, state = chain.update(jax.tree.map(jnp.asarray, grads), state, params)
            params = optax.apply_updates(params, updates)
            if step == skipped:
                assert int(state[0].step) == int(before.step) == step
                for name, old in before.residuals.items():
                    added = grads[name] if transport.rank < P - 1 else 0
                    np.testing.assert_array_equal(state[0].residuals[name], old + added)
        return params, state[0].residuals

    results = run(P, program)
    for params, residuals in results:
        assert same(params, results[0][0])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, residuals)))
        assert any(leaf.any() for leaf in jax.tree.leaves(residuals)) == (way != "dense")
    wheres = ["a gradient of another rank", "a gradient of another rank", "the gradient of ['w'] on this rank"]
    assert [text.partition(" is not")[0] for text in sorted(caplog.messages)] == [
        f"rank {rank}: {where}" for rank, where in enumerate(wheres)
    ]


# -- errors -----------------------------------------------------------------------------------------------------------

X = np.ones(4, np.float32)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: sj.sparse_allreduce([1.0], 1), "x: got list; expected a JAX array"),
    "int": (
        lambda: sj.allreduce_tree({"a": [X, jnp.ones(3, int)]}, 0.1),
        r"grads\['a'\]\[1\]: got elements of type int",
    ),
    "float": (lambda: sj.init_residuals({"a": X, "b": 3.0}), r"tree\['b'\]: got float; expected a JAX array"),
    "key": (lambda: sj.sparsify().init([jax.random.key(0)]), r"tree\[0\]: got elements of type key<fry>"),
    "key of local steps": (lambda: sj.LocalSteps([jax.random.key(0)]), r"\[0\]"),
    "state of sparsify": (lambda: sj.sparsify().update([X], (0, [X])), "state: got tuple; expected the SparsifyState"),
    "traced k": (lambda: jax.jit(sj.sparse_allreduce)(X, 1), "k: got a JAX array; .*static"),
    "density": (lambda: sj.allreduce_tree([X], 1.5), r"density=1\.5: must be a float in \(0, 1\]"),
    "scope": (lambda: sj.allreduce_tree([X], 0.1, scope="layer"), "scope='layer': expected one of model, tensor"),
    "wire": (lambda: jax.jit(lambda x: sj.sparse_allreduce(x, 1, wire="packed_int8"))(np.ones(3)), "x is float64"),
    "residual shape": (
        lambda: jax.jit(lambda g, r: sj.allreduce_tree(g, 0.1, residuals=r))({"w": X}, {"w": np.ones(3, np.float32)}),
        r"residuals\['w'\]: got float32 of shape \(3,\); expected float32 of shape \(4,\), since grads\['w'\]",
    ),
    "residual type": (
        lambda: sj.sparse_allreduce(jnp.ones(4, jnp.bfloat16), 1, residual=jnp.ones(4, jnp.bfloat16)),
        "residual: got bfloat16 .*expected float32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_before_anything_is_sent(case: str) -> None:
    call, pattern = BAD[case]
    with pytest.raises(sc.InvalidInputError, match=pattern):
        call()


def test_errors_of_the_exchange_keep_their_text() -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    transform = sj.sparsify(lambda step: step + 1.0)
    state = transform.init([X])._replace(step=jnp.int32(1))
    with pytest.raises(sc.InvalidInputError, match=r"density: the function returned 2\.0 for step 1: must be a float"):
        transform.update([X], state)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"InvalidInputError: .*the function returned 2\.0 for step 1"):
        jax.block_until_ready(jax.jit(transform.update)([X], state))
    assert jax.jit(lambda x: sj.sparse_allreduce(x, 2))(X).sum() in (2, 4)  # and the next call works


@pytest.mark.parametrize("tree", [False, True])
def test_ranks_with_other_shapes(tree: bool) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        x = jnp.ones((10, 20) if transport.rank else (20, 10))
        if tree:
            sj.allreduce_tree({"a": x, "b": jnp.ones(3)}, 0.1, comm=transport, dense_below=0)
        else:
            sj.sparse_allreduce(x, 10, comm=transport)

    results = simulated.run(2, program, catch=True)
    assert all(isinstance(result.error, sc.CollectiveMismatchError) for result in results)
    name = "grads['a']" if tree else "x"
    message = f"{name} is float64 (20, 10) on rank 0 and float64 (10, 20) on rank 1: "
    assert all(str(result.error).startswith(message) for result in results)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_denormals_under_jit(dtype: str) -> None:
    from mpi4py import MPI

    tiny = np.finfo(dtype).smallest_subnormal
    x = np.arange(-20, 20).astype(dtype) * tiny
    residual = np.ones(40, "float64" if dtype == "float64" else "float32") * tiny
    expected_out, expected_residual = np.empty_like(x), residual.copy()
    sc.sparse_allreduce(x, 7, comm=MPI.COMM_SELF, residual=expected_residual, out=expected_out)
    out, new = jax.jit(lambda x, r: sj.sparse_allreduce(x, 7, residual=r, comm=MPI.COMM_SELF))(x, residual)
    assert data.same_bits(np.asarray(out), expected_out)
    assert data.same_bits(np.asarray(new), expected_residual)
    assert expected_out.any()


def test_sparsify_says_that_optax_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"pip install .*\[jax\]'"):
        sj.sparsify(0.1)
