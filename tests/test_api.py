"""The public functions: results for the arrays of every framework, and errors for wrong arguments."""

from __future__ import annotations

import copy
import inspect
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import errors
from sparsecomm.transport import simulated
from tests import data, reference


def alone(*args: Any, **kwargs: Any) -> sc.SparseVector:
    return simulated.run(1, lambda transport: sc.sparse_allreduce(*args, comm=transport, **kwargs))[0].value


CALLS: dict[str, Callable[..., sc.SparseVector]] = {"topk": sc.topk, "sparse_allreduce": alone}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def _torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _jax(array: np.ndarray) -> Any:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        return jax.numpy.asarray(array)


FRAMEWORKS = {"numpy": lambda array: array.copy(), "torch": _torch, "jax": _jax}


@every_call
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", data.DTYPES)
def test_every_framework_and_type(call: Callable[..., sc.SparseVector], framework: str, dtype: str) -> None:
    array = data.gradient("normal", 600, dtype).reshape(20, 30)
    x = FRAMEWORKS[framework](array)
    entries = call(x, 25)
    indices, values = reference.topk(reference.widened(array), 25)
    np.testing.assert_array_equal(entries.indices, indices)
    assert data.same_bits(entries.values, values)
    assert entries.shape == (20, 30)
    np.testing.assert_array_equal(entries.to_dense().reshape(-1), reference.dense((indices, values), 600))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", data.DTYPES)
def test_residual_and_out_of_every_framework_are_updated_in_place(framework: str, dtype: str) -> None:
    array, before = data.integers(100, dtype, 1), data.integers(100, dtype, 2)
    x, residual, out = (FRAMEWORKS[framework](a) for a in (array, before, np.zeros_like(array)))
    entries = alone(x, 10, residual=residual, out=out)
    view = lambda t: t.float().numpy() if framework == "torch" else reference.widened(t)  # noqa: E731
    total = reference.widened(array) + reference.widened(before)
    indices, values = reference.topk(total, 10)
    np.testing.assert_array_equal(entries.indices, indices)
    np.testing.assert_array_equal(view(out), reference.dense((indices, values), 100))
    np.testing.assert_array_equal(view(residual), total - reference.dense((indices, values), 100))


@pytest.mark.parametrize("shape", [(), (12,), (3, 4)])
def test_entries_as_a_sparse_tensor_of_torch(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    entries = sc.topk(torch.randn(shape), 4 if shape else 1)
    sparse = entries.to_torch()
    assert sparse.is_coalesced()
    assert torch.equal(sparse.to_dense(), torch.from_numpy(entries.to_dense()))
    entries.values[0] = 7
    assert sparse.values()[0] == 7  # the same memory


def test_density_and_count() -> None:
    x = np.arange(1, 1001, dtype=np.float32)
    assert sc.topk(x, 0.29).nnz == 290
    assert sc.topk(x, 1e-9).nnz == 1
    assert sc.topk(x, 1).nnz == 1
    assert sc.topk(x, 1.0).nnz == 1000
    assert sc.topk(x, np.int64(7)).nnz == sc.topk(x, np.float32(0.007)).nnz == 7


def test_threshold() -> None:
    x = np.array([1, -3, np.nan, 0, 2], np.float32)
    assert sc.threshold(x, 2).indices.tolist() == [1, 2, 4]
    assert sc.threshold(x, 0).indices.tolist() == [0, 1, 2, 4]
    residual = np.array([1, 1, 1, 1, -1], np.float32)
    assert sc.threshold(x, 2, residual=residual).values[:2].tolist() == [2, -2]
    np.testing.assert_array_equal(residual, [0, 0, 0, 1, 1])
    for tau in (-1, float("nan"), "1", None, True, 1j):
        with pytest.raises(sc.InvalidInputError, match="tau"):
            sc.threshold(x, tau)


def test_merge_topk() -> None:
    a = sc.topk(np.ones(10, np.float32), 2)
    merged = sc.merge_topk(a, sc.topk(np.arange(10, dtype=np.float32), 2), 3)
    assert merged.to_dense().tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 8, 9]
    for b in (sc.topk(np.ones(11, np.float32), 2), sc.topk(np.ones(10), 2), ([1], [1.0])):
        with pytest.raises(sc.InvalidInputError, match="b: got"):
            sc.merge_topk(a, b, 1)  # type: ignore[arg-type]


def test_sparse_vectors_made_by_users() -> None:
    v = sc.SparseVector([1, 4], [2.0, -3.0], 6)
    assert (v.nnz, v.size, v.density) == (2, 6, 2 / 6)
    assert v.indices.dtype == np.int32
    assert v.to_dense().tolist() == [0, 2, 0, 0, -3, 0]
    assert repr(v) == "SparseVector(size=6, nnz=2, values=float64)"
    assert sc.SparseVector([], [], 0).to_dense().shape == (0,)
    for indices in ([1, 1], [2, 1], [-1, 1], [1, 6], [1], [1, 1.5]):
        with pytest.raises(sc.InvalidInputError, match="SparseVector"):
            sc.SparseVector(indices, [1.0, 1.0], 6)
    for value in ("a", 1j):
        with pytest.raises(sc.InvalidInputError, match="SparseVector"):
            sc.SparseVector([1], [value], 6)
    for out in (np.zeros(5), np.zeros(6, np.float32), np.zeros(6, int), [0.0] * 6):
        with pytest.raises(sc.InvalidInputError, match="out: "):
            v.to_dense(out)


@pytest.mark.parametrize("again", [lambda v: pickle.loads(pickle.dumps(v)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("algorithm", ["butterfly", "dense"])
def test_results_can_be_copied_and_sent(again: Callable[[Any], Any], algorithm: str) -> None:
    x = data.gradient("NaN and infinities", 60, "float32").reshape(3, 20)
    v = alone(x * (x > 0), 7, algorithm=algorithm)
    copied = again(again(v))
    assert (type(copied), copied.size, copied.shape) == (type(v), 60, (3, 20))
    for actual, expected in ((copied.indices, v.indices), (copied.values, v.values), (copied.to_dense(), v.to_dense())):
        assert actual.dtype == expected.dtype
        assert data.same_bits(actual, expected)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("index", [10**9, 2**31 - 1, 100, -1, -(2**31)])
def test_wild_indices_never_lead_out_of_bounds(index: int, own: bool) -> None:
    """A program may write to the arrays of a vector."""
    v, other = sc.topk(np.arange(100, dtype=np.float32), 3), sc.topk(np.ones(100, np.float32), 5)
    v = sc.SparseVector(v.indices, v.values, 100) if own else v
    v.indices[1] = index
    out = np.full(300, np.nan, np.float32)
    with pytest.raises(sc.InvalidInputError, match="SparseVector"):
        v.to_dense(out[100:200])
    assert np.isnan(out[:100]).all()
    assert np.isnan(out[200:]).all()
    for pair in ((v, other), (other, v)):
        merged = sc.merge_topk(*pair, 8)  # merging does not check indices
        assert merged.nnz == 8
        with pytest.raises(sc.InvalidInputError, match="SparseVector"):
            merged.to_dense()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("indices", lambda i: i.astype(np.int64)),
        ("indices", lambda i: i[:1]),
        ("indices", lambda i: i.reshape(1, -1)),
        ("indices", lambda i: np.repeat(i, 2)[::2]),
        ("values", lambda v: v.astype(np.float16)),
        ("values", lambda v: np.repeat(v, 3)),
    ],
)
def test_replaced_arrays_are_refused(name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    v, other = sc.topk(np.arange(100, dtype=np.float32), 3), sc.topk(np.ones(100, np.float32), 5)
    setattr(v, name, change(getattr(v, name)))
    calls = v.to_dense, lambda: sc.merge_topk(v, other, 3), lambda: sc.merge_topk(other, v, 3)
    for call in calls:
        with pytest.raises(sc.InvalidInputError):
            call()


GOOD = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


@every_call
@pytest.mark.parametrize("k", [0, -1, 13, 0.0, 1.1, float("nan"), True, "3"])  # others: test_odd_arguments.py
def test_bad_k(call: Callable[..., sc.SparseVector], k: Any) -> None:
    with pytest.raises(sc.InvalidInputError, match=r"k=.*expected an int from 1 to 12 .* or a float in \(0, 1\]"):
        call(GOOD, k)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wire": "packed_int8", "dtype": "float64"}, "of float32 sums, and x is float64; pass wire="),
        ({"algorithm": "hierarchical:dense"}, r"or hierarchical:X, where X.* is one of butterfly, tree, split, allg"),
        ({"algorithm": "hierarchical:hierarchical"}, "hierarchical:X"),
        ({"algorithm": "xyz"}, "algorithm='xyz': expected one of auto, ((?!did you mean).)*$"),
        ({"wire": ["plain"]}, "expected one of auto, plain, packed, packed_bfloat16, packed_float16, packed_int8"),
        ({"algorithm": "buterfly"}, "; did you mean 'butterfly'"),
        ({"algorithm": "hierarchical:tre"}, "; did you mean 'hierarchical:tree'"),
        ({"op": "meen"}, "; did you mean 'mean'"),
        ({"wire": "packed_int5"}, "; did you mean 'packed_int"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    options = dict(options)
    x = np.ones(10, options.pop("dtype", "float32"))
    residual = np.zeros_like(x)
    with pytest.raises(sc.InvalidInputError, match=says):
        alone(x, 2, residual=residual, **options)
    assert not residual.any()


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: sc.explain(9, 1, dtype="float"), "float"),  # type: ignore[arg-type]
        (lambda: sc.Reducer({"x": GOOD}, scope="buckets"), "bucket"),  # type: ignore[arg-type]
        (lambda: sc.Reducer({"weight": GOOD}).residual("wieght"), "weight"),
    ],
)
def test_misspelled_names(call: Callable[[], object], meant: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=f"; did you mean '{meant}[a-z0-9]*'\\?$"):
        call()


@pytest.mark.parametrize("folder", ["checkout", "with a space"])
def test_commands_that_install(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / folder / "sparsecomm" / "errors.py"))
    assert shlex.split(errors.pip_install("torch")) == ["pip", "install", "sparsecomm[torch]"]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "pyproject.toml").touch()
    assert shlex.split(errors.pip_install("torch")) == ["pip", "install", "-e", f"{tmp_path / folder}[torch]"]


def test_temporary_memory_is_of_order_k() -> None:
    """The gradient has 62,500 KiB and the result 1,250 KiB."""
    program = (
        "import re, numpy as np, sparsecomm as sc\n"
        "from pathlib import Path\n"
        "x = np.random.default_rng(0).standard_normal(16_000_000, dtype=np.float32); r = np.ones_like(x)\n"
        "def kib(name): return int(re.search(name + r':\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "Path('/proc/self/clear_refs').write_text('5')  # forget the peak so far\n"
        "before = kib('VmRSS')\n"
        "sc.topk(x, 160_000, residual=r)\n"
        "sc.threshold(x, 11.0, residual=r)\n"
        "print(kib('VmHWM') - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 160_000 * 8 // 1024 < int(done.stdout) < 16_000, f"{done.stdout} KiB"


def test_blocking_and_other_calls_have_the_same_arguments() -> None:
    blocking, other = (inspect.signature(f).parameters for f in (sc.sparse_allreduce, sc.isparse_allreduce))
    assert list(blocking.values()) == list(other.values())
    with pytest.raises(sc.InvalidInputError, match="foo is not an option of sparse_allreduce; expected some of x, k"):
        sc.isparse_allreduce(np.ones(3), 1, foo=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"isparse_allreduce\(\) missing 1 required positional argument"):
        sc.isparse_allreduce(np.ones(3))  # type: ignore[call-arg]
