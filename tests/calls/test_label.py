"""Ranks whose calls differ: each rank's error names the first difference, with the values on two ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.calls.label import Label, difference, pack
from sparsecomm.calls.queue import Call
from sparsecomm.states.loading import Prepared, load
from sparsecomm.transport import simulated
from sparsecomm.transport.base import MAX_CONTENTS_BYTES
from tests.processes import LIMIT, mpirun, torchrun
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
    "shape": (one_sum, {}, {"n": (20, 5)}, "shape", "(100,)", "(20, 5)"),
    "dtype": (one_sum, {}, {"dtype": np.float64}, "dtype", "float32", "float64"),
    "k": (one_sum, {}, {"k": 6}, "k", "5", "6"),
    "op": (one_sum, {}, {"op": "mean"}, "op", "sum", "mean"),
    "wire": (one_sum, {"wire": "plain"}, {"wire": "packed_int8"}, "wire", "plain", "packed_int8"),
    "algorithm": (one_sum, {"algorithm": "tree"}, {"algorithm": "split"}, "algorithm", "tree", "split"),
    "chunk": (one_sum, {"k": 1, "chunk": 20}, {"k": 1, "chunk": 25}, "chunk", "20", "25"),
    "residual": (one_sum, {}, {"residual": True}, "residual", "not passed", "passed"),
    "label": (one_sum, {"label": "layer1"}, {"label": "layer 2"}, "label", "'layer1'", "'layer 2'"),
    "no label": (one_sum, {}, {"label": "x"}, "label", "''", "'x'"),
    "calls": (weights, {}, {"program": reduce}, "call", "check_weights()", MEASUREMENT),
    "kinds of calls": (weights, {}, {"program": loads, "name": "it"}, "call", "check_weights()", "it"),
    "reducer shape": (reduce, {}, {"tensors": OTHER}, "b", "float32 (2000,)", "float32 (20, 100)"),
    "reducer dtype": (reduce, {}, {"dtype": np.float64}, "a", "float32 (30, 40)", "float64 (30, 40)"),
    "missing layer": (reduce, {}, {"tensors": LESS}, "b", "float32 (2000,)", "missing"),
    "more layers": (reduce, {"tensors": LESS}, {"tensors": WEIGHTS}, "b", "missing", "float32 (2000,)"),
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
    "lr": (adamw, {"lr": 0.01}, {"lr": 0.005}, "lr", "0.01", "0.005"),
    "lr later": (adamw, {"lr": 0.01}, {"lr": 0.01, "later": 0.005}, "lr", "0.01", "0.005"),
    "betas": (adamw, {}, {"betas": (0.8, 0.999)}, "betas", "(0.9, 0.999)", "(0.8, 0.999)"),
    "eps": (adamw, {}, {"eps": 1e-6}, "eps", "1e-08", "1e-06"),
    "weight_decay": (adamw, {}, {"weight_decay": 0.1}, "weight_decay", "0.01", "0.1"),
    "maximize": (adamw, {}, {"maximize": True}, "maximize", "False", "True"),
    "swapped groups": (
        *(adamw, {"weight_decay": {"a": 0.5, "b": 0.1}}, {"weight_decay": {"a": 0.1, "b": 0.5}}),
        *("weight_decay of a", "0.5", "0.1"),
    ),
    "one of a group": (
        *(adamw, {"weight_decay": 0.1}, {"weight_decay": {"a": 0.1, "b": 0.1, "c": 0.2}}),
        *("weight_decay of c", "0.1", "0.2"),
    ),
    "order of weights": (adamw, {}, {"order": {n: WEIGHTS[n] for n in "bac"}}, r"number \d+ in the order", "a", "b"),
    "steps of a weight": (adamw, {}, {"more_steps": 2}, "steps so far of b", "1", "3"),
    "moments of a weight": (adamw, {}, {"lost": "b"}, "steps so far of b", "1", "0"),
    "sync_every": (local_steps, {}, {"sync_every": 3}, "sync_every", "2", "3"),
    "fragments": (local_steps, {"sync_every": 4}, {"sync_every": 4, "fragments": 2}, "fragments", "1", "2"),
    "delay": (local_steps, {}, {"fragment_sync_delay": 1}, "delay", "0", "1"),
    "decay of local steps": (local_steps, {}, {"decay": 0.5}, "decay", "0.8", "0.5"),
    "weights": (weights, {}, {"tensors": OTHER}, "b", "float32 (2000,)", "float32 (20, 100)"),
    "names of weights": (weights, {}, {"tensors": {"z": (2,)}}, "[az]", "float32 (30, 40)", "missing"),
    "types of weights": (weights, {}, {"dtype": np.int8}, "a", "float32 (30, 40)", "int8 (30, 40)"),
    "root": (broadcast, {}, {"root": 1}, "root", "0", "1"),
    "broadcast type": (broadcast, {}, {"dtype": "int32"}, "a", "torch.float32 (30, 40)", "torch.int32 (30, 40)"),
    "measurement": (reduce, {}, {"program": loads, "name": "it"}, "call", MEASUREMENT, "it"),
    "loading": (loads, {"name": "Reducer 0"}, {"name": "Reducer 1"}, "call", "Reducer 0", "Reducer 1"),
    "jax leaves": (jax_tree, {}, {"name": "c"}, r"grads\['[bc]'\]", "float32 (500,)", "missing"),
    "jax dtype": (jax_tree, {}, {"dtype": "bfloat16"}, r"grads\['b'\]", "float32 (500,)", "bfloat16 (500,)"),
    "jax lr": (jax_step, {}, {"learning_rate": 0.005}, "lr", "0.01", "0.005"),
    "jax schedule": (jax_step, {"schedule": 0.1}, {"schedule": 0.3}, "lr", "0.1", "0.3"),
    "jax b2": (jax_step, {}, {"b2": 0.99}, "betas", "(0.9, 0.999)", "(0.9, 0.99)"),
    "jax mask": (jax_step, {"mask": "a"}, {"mask": "b"}, r"weight_decay of params\['a'\]", "0.0001", "0.0"),
    "jax density": (jax_step, {}, {"density": 0.5}, "density", "0.09", "0.5"),
    "jax step": (jax_step, {"step": 1}, {"step": 2}, "step", "1", "2"),
}  # fmt: skip


SETTINGS = "use the same settings and tensors on all ranks"
ADVICE = {
    "lr": f"{SETTINGS}; or one of them has skipped a step$", "betas": f"{SETTINGS}$", "missing layer": f"{SETTINGS}$",
    "step": "one of them has skipped a step$", "measurement": ".*SPARSECOMM_PROFILE",
    "calls": r"call check_weights\(\) on all ranks$", "loading": "make the same calls in the same order on all ranks$",
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


def test_matching_calls_never_build_their_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("made")

    monkeypatch.setattr(Call, "contents", refuse)
    monkeypatch.setattr("sparsecomm.optimizers.adamw.by_name", refuse)
    for program, common, *_ in (DIFFERENCES[what] for what in ("k", "label", "momentum", "swapped groups", "weights")):
        assert errors(2, lambda t, p=program, c=common: p(t, **c)) == [None, None]
    one, two = Label.of(("lr", 0.1)), Label.of(("lr", 0.2))
    assert (one + two).checksum != (two + one).checksum != one.checksum
    assert [*(one + two).pairs()] == [("lr", 0.1), ("lr", 0.2)]


@pytest.mark.parametrize("how", ["garbage", "interrupted", "out of memory", "gone"])
def test_a_rank_that_does_not_send_its_contents(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the difference that the labels alone show, and the next call succeeds."""
    exchange = simulated.SimulatedTransport.exchange_contents

    def odd(self: simulated.SimulatedTransport, peer: int, contents: bytes) -> bytes | None:
        if self.rank == 1 and how == "garbage":
            exchange(self, peer, bytes(range(256)) * 20)
            return None
        if self.rank == 1:
            raise {"interrupted": KeyboardInterrupt, "out of memory": MemoryError, "gone": sc.TransportError}[how]
        return exchange(self, peer, contents)

    monkeypatch.setattr(simulated.SimulatedTransport, "exchange_contents", odd)

    def program(transport: simulated.SimulatedTransport) -> None:
        with pytest.raises(sc.CollectiveMismatchError) as caught:
            one_sum(transport, k=5 + (transport.rank == 1), algorithm="tree", wire="plain")
        assert "differ in k" in str(caught.value) or "makes another call" in str(caught.value)
        one_sum(transport)

    assert errors(3, program) == [None] * 3


SCRIPT = """
import os, sys
import numpy as np
import sparsecomm as sc
from sparsecomm.transport.control import FailureDetector
if dies := sys.argv[1] == "gloo":
    import torch.distributed as dist
    dist.init_process_group("gloo")
weights = {f"layer{i}.weight": np.ones((30, 40), np.float32) for i in range(2000)}
optimizer = sc.SparseAdamW(weights, lr=0.01, check_weights_every=None)
optimizer.step(weights)
rank = optimizer.reducer._connection.transport.rank
decay = {name: 0.01 for name in weights}
for attempt in range(1 + dies):
    if attempt and rank == 1:
        FailureDetector.exchange_contents = lambda *_: os._exit(0)
    optimizer.weight_decay = decay | {"layer1999.weight": 0.5} if rank == 1 else decay
    try:
        optimizer.step(weights)
    except sc.SparseCommError as error:
        print(f"rank {rank}, {attempt}: {type(error).__name__}: {error}", flush=True)
    optimizer.weight_decay = decay
    if not attempt:
        optimizer.step(weights)
"""


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_between_processes(launch: Any, tmp_path: Path) -> None:
    """Over gloo, also if a rank dies before it sends its contents."""
    file, gloo = tmp_path / "program.py", launch is torchrun
    file.write_text(SCRIPT)
    status, output = launch(3, str(file), "gloo" if gloo else "mpi", seconds=LIMIT)
    lines = [re.findall(rf"rank \d, {attempt}: (.*Error: .*)", output) for attempt in (0, 1)]
    assert [status, *map(len, lines)] == [0, 3, 2 * gloo], output
    decays = "weight_decay of layer1999.weight is (0.01 on rank 0 and 0.5 on rank 1|0.5 on rank 1 and 0.01 on rank 2)"
    assert all(re.search(f"CollectiveMismatchError: .*{decays}", line) for line in lines[0]), output
