"""Ranks whose calls differ: each rank's error names the first difference, with the values on two ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.calls.label import difference, pack
from sparsecomm.states.loading import Prepared, load
from sparsecomm.transport import simulated
from sparsecomm.transport.base import MAX_CONTENTS_BYTES
from tests.ranks import errors

Program = Callable[..., Any]
WEIGHTS = {"a": (30, 40), "b": (2000,), "c": (50, 60)}


def arrays(shapes: dict[str, Any] = WEIGHTS, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {name: np.ones(shape, dtype) for name, shape in shapes.items()}


def one_sum(t: Any, n: Any = 100, k: Any = 5, dtype: Any = np.float32, residual: bool = False, **options: Any) -> None:
    x = np.ones(n, dtype)
    sc.sparse_allreduce(x, k, comm=t, residual=x * 0 if residual else None, **options)


def reduce(
    t: Any, tensors: Any = WEIGHTS, dtype: Any = np.float32, density: Any = 0.1, step: int = 0, **o: Any
) -> None:
    gradients = arrays(tensors, dtype)
    reducer = sc.Reducer(gradients, density, comm=t, **o)
    reducer._open.number = step
    reducer.reduce(gradients)


def adamw(t: Any, later: Any = None, more_steps: int = 0, lost: str = "", order: Any = WEIGHTS, **options: Any) -> None:
    optimizer = sc.SparseAdamW(arrays(order), comm=t, check_weights_every=None, **options)
    for step in range(3):
        if step == 1:
            optimizer.lr = later or optimizer.lr
            optimizer._adamw.steps["b"] += more_steps
            if lost:
                optimizer._adamw.replace(lost, None, 0)
        optimizer.step(arrays())


def local_steps(t: Any, sync_every: int = 2, lr: float = 0.7, **options: Any) -> None:
    parameters = arrays()
    local = sc.LocalSteps(parameters, comm=t, sync_every=sync_every, outer=sc.NesterovSGD(lr), **options)
    for _ in range(4):
        for array in parameters.values():
            array += 1
        local.step(parameters)


def weights(t: Any, tensors: Any = WEIGHTS, dtype: Any = np.float32) -> None:
    sc.check_weights(arrays(tensors, dtype), comm=t)


def broadcast(t: Any, root: int = 0, shapes: Any = WEIGHTS, dtype: str = "float32") -> None:
    torch = pytest.importorskip("torch")
    import sparsecomm.torch as st

    st.broadcast_parameters({n: torch.ones(s, dtype=getattr(torch, dtype)) for n, s in shapes.items()}, root, comm=t)


def jax_step(t: Any, step: int = 0, **options: Any) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = pytest.importorskip("jax")
    import sparsecomm.jax as sj

    numpy = jax.numpy
    tree = {"a": numpy.ones((30, 40)), "b": numpy.ones(500)}
    if isinstance(mask := options.get("mask"), str):
        options["mask"] = {"a": mask == "a", "b": mask == "b"}
    if rate := options.pop("schedule", None):
        options["learning_rate"] = lambda step: rate / (step + 1)
    optimizer = sj.sparse_adamw(**{"learning_rate": 0.01} | options, comm=t, check_weights_every=None)
    state = optimizer.init(tree)
    optimizer.update(tree, state._replace(step=state.step + step), tree)


def jax_tree(t: Any, name: str = "b", dtype: str = "float32") -> None:
    numpy = pytest.importorskip("jax").numpy
    import sparsecomm.jax as sj

    sj.allreduce_tree({"a": numpy.ones((30, 40)), name: numpy.ones(500, dtype)}, 0.1, comm=t)


def loads(t: Any, name: str) -> None:
    load(t, name, [], lambda undo: Prepared())


MEASUREMENT = "measurement of links, before the first sum"
LESS = {name: WEIGHTS[name] for name in "ac"}
OTHER = WEIGHTS | {"b": (20, 100)}
# Program, arguments, other arguments on one rank; and the name and both values in the error
DIFFERENCES: dict[str, tuple[Program, dict[str, Any], dict[str, Any], str, str, str]] = {
    "n": (one_sum, {}, {"n": 101}, "shape", "(100,)", "(101,)"),
    "residual": (one_sum, {}, {"residual": True}, "residual", "not passed", "passed"),
    "label": (one_sum, {"label": "layer1"}, {"label": "layer 2"}, "label", "'layer1'", "'layer 2'"),
    "calls": (weights, {}, {"program": reduce}, "call", "check_weights()", MEASUREMENT),
    "reducer shape": (reduce, {}, {"tensors": OTHER}, "b", "float32 (2000,)", "float32 (20, 100)"),
    "missing layer": (reduce, {}, {"tensors": LESS}, "b", "float32 (2000,)", "missing"),
    "order": (reduce, {}, {"tensors": {n: WEIGHTS[n] for n in "acb"}}, r"number \d+ in the order", "b", "c"),
    "density": (reduce, {}, {"density": 0.2}, "density", "0.1", "0.2"),
    "schedule": (reduce, {}, {"density": sc.Warmup(0.1, 9)}, "density", "0.1", repr(sc.Warmup(0.1, 9))),
    "dense_steps": (reduce, {}, {"dense_steps": 7}, "dense_steps", "0", "7"),
    "step": (reduce, {}, {"step": 3}, "step", "0", "3"),
    "reducer op": (reduce, {}, {"op": "sum"}, "op", "mean", "sum"),
    "reducer wire": (reduce, {}, {"wire": "packed"}, "wire", "auto", "packed"),
    "reducer algorithm": (reduce, {}, {"algorithm": "split"}, "algorithm", "auto", "split"),
    "scope": (reduce, {}, {"scope": "model"}, "scope", "bucket", "model"),
    "reducer chunk": (reduce, {"scope": "chunk"}, {"scope": "chunk", "chunk": 64}, "chunk", "4096", "64"),
    "momentum": (reduce, {}, {"momentum": 0.9}, "momentum", "0.0", "0.9"),
    "masking": (reduce, {"momentum": 0.9}, {"masking": False, "momentum": 0.9}, "masking", "True", "False"),
    "clip": (reduce, {}, {"clip": 2.0}, "clip", "None", "2.0"),
    "decay": (reduce, {}, {"decay": 0.5}, "decay", "1.0", "0.5"),
    "skip_nonfinite": (reduce, {}, {"skip_nonfinite": True}, "skip_nonfinite", "False", "True"),
    "bucket_bytes": (reduce, {"bucket_bytes": 1 << 20}, {"bucket_bytes": 50}, "bucket_bytes", "1048576", "50"),
    "dense_below": (reduce, {}, {"dense_below": 5000}, "dense_below", "1024", "5000"),
    "lr later": (adamw, {"lr": 0.01}, {"lr": 0.01, "later": 0.005}, "lr", "0.01", "0.005"),
    "betas": (adamw, {}, {"betas": (0.8, 0.999)}, "betas", "(0.9, 0.999)", "(0.8, 0.999)"),
    "eps": (adamw, {}, {"eps": 1e-6}, "eps", "1e-08", "1e-06"),
    "weight_decay": (adamw, {}, {"weight_decay": 0.1}, "weight_decay", "0.01", "0.1"),
    "maximize": (adamw, {}, {"maximize": True}, "maximize", "False", "True"),
    "swapped groups": (
        *(adamw, {"weight_decay": {"a": 0.5, "b": 0.1}}, {"weight_decay": {"a": 0.1, "b": 0.5}}),
        *("weight_decay of a", "0.5", "0.1"),
    ),
    "order of weights": (adamw, {}, {"order": {n: WEIGHTS[n] for n in "bac"}}, r"number \d+ in the order", "a", "b"),
    "steps of a weight": (adamw, {}, {"more_steps": 2}, "steps so far of b", "1", "3"),
    "moments of a weight": (adamw, {}, {"lost": "b"}, "steps so far of b", "1", "0"),
    "sync_every": (local_steps, {}, {"sync_every": 3}, "sync_every", "2", "3"),
    "fragments": (local_steps, {"sync_every": 4}, {"sync_every": 4, "fragments": 2}, "fragments", "1", "2"),
    "delay": (local_steps, {}, {"fragment_sync_delay": 1}, "delay", "0", "1"),
    "decay of local steps": (local_steps, {}, {"decay": 0.5}, "decay", "0.8", "0.5"),
    "names of weights": (weights, {}, {"tensors": {"z": (2,)}}, "[az]", "float32 (30, 40)", "missing"),
    "types of weights": (weights, {}, {"dtype": np.int8}, "a", "float32 (30, 40)", "int8 (30, 40)"),
    "root": (broadcast, {}, {"root": 1}, "root", "0", "1"),
    "broadcast type": (broadcast, {}, {"dtype": "int32"}, "a", "torch.float32 (30, 40)", "torch.int32 (30, 40)"),
    "measurement": (reduce, {}, {"program": loads, "name": "it"}, "call", MEASUREMENT, "it"),
    "jax leaves": (jax_tree, {}, {"name": "c"}, r"grads\['[bc]'\]", "float32 (500,)", "missing"),
    "jax dtype": (jax_tree, {}, {"dtype": "bfloat16"}, r"grads\['b'\]", "float32 (500,)", "bfloat16 (500,)"),
    "jax schedule": (jax_step, {"schedule": 0.1}, {"schedule": 0.3}, "lr", "0.1", "0.3"),
    "jax mask": (jax_step, {"mask": "a"}, {"mask": "b"}, r"weight_decay of params\['a'\]", "0.0001", "0.0"),
    "jax density": (jax_step, {}, {"density": 0.5}, "density", "0.09", "0.5"),
    "jax step": (jax_step, {"step": 1}, {"step": 2}, "step", "1", "2"),
}  # fmt: skip


SETTINGS = "use the same settings and tensors on all ranks"
ADVICE = {
    "lr later": f"{SETTINGS}; or one of them has skipped a step$", "missing layer": f"{SETTINGS}$",
    "step": "one of them has skipped a step$", "measurement": ".*SPARSECOMM_PROFILE",
    "calls": r"call check_weights\(\) on all ranks$",
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENCES)
def test_every_rank_names_the_first_difference(what: str) -> None:
    P = 2 + len(what) % 2
    program, common, odd, name, value, other = DIFFERENCES[what]

    def run(transport: simulated.SimulatedTransport) -> None:
        options = dict(odd) if transport.rank == 1 else dict(common)
        options.pop("program", program)(transport, **options)

    raised = errors(P, run)
    value, other = re.escape(value), re.escape(other)
    first, second = (rf"{value} on rank 0 and {other} on rank 1", rf"{other} on rank 1 and {value} on rank 2")
    third = rf"{value} on rank 1 and missing on rank 2" if other == "missing" else second
    expected = rf"{name} is ({first}|{second}|{third})"
    if name == "call":
        expected = f"rank 0 is in {value}, and rank 1 in {other}|rank 1 is in {other}, and rank 2 in {value}"
    expected = rf"^(rank \d left call .* is in\. CollectiveMismatchError: )?({expected}): {ADVICE.get(what, '')}"
    assert [type(error) for error in raised] == [sc.CollectiveMismatchError] * P
    for error in raised:
        assert re.search(expected, str(error)), str(error)


def test_differences_of_long_odd_and_shortened_contents() -> None:
    """Ten thousand tensors fit. Of more, only the first are compared. Damaged contents give no difference."""
    shapes = [(f"transformer.h.{i}.attn.weight", f"float32 ({i}, 768)") for i in range(10_000)]
    odd = [*shapes[:-1], (shapes[-1][0], "float32 (1, 1)")]
    packed = pack(shapes)
    assert len(packed) <= MAX_CONTENTS_BYTES
    assert difference({1: packed, 0: pack(odd)}) == (
        f"transformer.h.9999.attn.weight is float32 (1, 1) on rank 0 and float32 (9999, 768) on rank 1: {SETTINGS}"
    )
    assert difference({0: packed, 1: packed}) == ""
    noise = np.random.default_rng(0).integers(0, 2**62, (20_000, 2)).tolist()
    many = [(str(name), value) for name, value in noise]
    for difference_at, is_found in ((5, True), (19_999, False)):
        changed = [*many[:difference_at], ("other", 1), *many[difference_at + 1 :]]
        packed = {4: pack(many), 7: pack(changed)}
        assert max(map(len, packed.values())) <= MAX_CONTENTS_BYTES
        expected = f"number 6 in the order is {many[5][0]} on rank 4 and other on rank 7: {SETTINGS}"
        assert difference(packed) == (expected if is_found else "")
    few = pack([("lr", 0.1)])
    for garbage in (b"", b"x", few[:-3], few + b"y", pack([]), bytes(5000)):
        assert difference({0: few, 1: garbage}).partition(":")[0] in ("", "lr is 0.1 on rank 0 and missing on rank 1")
    text = difference({0: pack([("a\nb", "x" * 800 + "1\x00")]), 1: pack([("a b", "x" * 800 + "\udce9")])})
    assert text.startswith("a b is ...xxx")
    assert "xx1  on rank 0 and ...xxx" in text
    assert len(text) < 300
    assert text.isprintable()
