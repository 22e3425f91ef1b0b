"""On a real CUDA device: the same bits as the CPU, for tensors of every library, on every stream, and in graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import cuda
from sparsecomm.transport import simulated
from sparsecomm.wire import EXACT, WIRES
from tests import data

pytestmark = pytest.mark.gpu

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:
    pytest.skip(f"no CUDA device: {type(error).__name__}: {error}", allow_module_level=True)

SIZES = [1, 300, 70_001, 3_000_000]
RESIDUALS = [(x, r) for x in data.DTYPES for r in (None, x)] + [("float16", "float32"), ("bfloat16", "float32")]


def put(array: np.ndarray, library: str = "cupy") -> Any:
    """Return a copy on the device."""
    if array.dtype.name == "bfloat16" or library == "torch":
        torch = pytest.importorskip("torch")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).cuda()
        return torch.from_numpy(array.copy()).cuda()
    if library == "jax":
        jax = pytest.importorskip("jax")
        return jax.device_put(array, jax.devices("gpu")[0])
    return cupy.asarray(array)


def fetch(tensor: Any, like: np.ndarray) -> np.ndarray:
    """Return a copy on the host."""
    if isinstance(tensor, cupy.ndarray):
        return tensor.get()
    import torch

    host = tensor.cpu()
    return host.view(torch.int16).numpy().view(like.dtype) if like.dtype.name == "bfloat16" else host.numpy()


def same(actual: sc.SparseVector, expected: sc.SparseVector) -> None:
    assert isinstance(actual.indices, cupy.ndarray)
    np.testing.assert_array_equal(actual.indices.get(), expected.indices)
    assert data.same_bits(actual.values.get(), expected.values)
    assert actual.shape == expected.shape


def same_numbers(a: np.ndarray, b: np.ndarray) -> None:
    """Compare all bits except the payload of NaN."""
    np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


@pytest.mark.parametrize("kind", data.KINDS)
@pytest.mark.parametrize(("dtype", "residual_dtype"), RESIDUALS)
def test_selection(kind: str, dtype: str, residual_dtype: str | None) -> None:
    for n in SIZES:
        x = data.gradient(kind, n, dtype, 1)
        for k in sorted({1, max(1, n // 1000), max(1, n // 20), n}):
            if residual_dtype is None:
                same(sc.topk(put(x), k), sc.topk(x, k))
                continue
            r = data.gradient(kind, n, residual_dtype, 2)
            there = put(r)
            entries, expected = sc.topk(put(x), k, residual=there), sc.topk(x, k, residual=r)
            same(entries, expected)
            same_numbers(fetch(there, r), r)
        for k, chunk in ((2, 64), (64, 4096), (300, 1000), (500, 20_000)):
            if residual_dtype is None:
                same(sc.topk(put(x), k, chunk=chunk), sc.topk(x, k, chunk=chunk))
                continue
            r = data.gradient(kind, n, residual_dtype, 2)
            there = put(r)
            same(sc.topk(put(x), k, residual=there, chunk=chunk), sc.topk(x, k, residual=r, chunk=chunk))
            same_numbers(fetch(there, r), r)
        for tau in (0.0, 0.5, 2.5):
            same(sc.threshold(put(x), tau), sc.threshold(x, tau))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "few values", "NaN and infinities", "huge range"])
def test_merging(dtype: str, kind: str) -> None:
    for n in (1000, 100_000, 5_000_000):
        xs = [data.gradient(kind, n, dtype, seed) for seed in range(4)]
        on_device, on_host = ([sc.topk(p(x), 0.01) for x in xs] for p in (put, lambda x: x))
        for k in (1, max(1, n // 100), n):
            a, b = on_device[0], on_host[0]
            for here, there in zip(on_device[1:], on_host[1:], strict=True):
                a, b = sc.merge_topk(a, here, k), sc.merge_topk(b, there, k)
            same(a, b)


CARRIED = [(d, w) for d in data.DTYPES for w in WIRES if d != "float64" or WIRES[w].kind == EXACT]


@pytest.mark.parametrize("algorithm", sc.algorithms())
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("dtype", "wire"), CARRIED)
def test_collectives(algorithm: str, mixed: bool, dtype: str, wire: str) -> None:
    options = {"algorithm": algorithm, "wire": wire}
    of_ranges = algorithm in ("dense", "double")  # these do not select by chunk
    k, by_chunk = (10, {"chunk": 1000, "decay": 0.95}) if mixed and not of_ranges else (500, {})

    def train(on_device: bool) -> list[tuple[np.ndarray, ...]]:
        def program(transport: simulated.SimulatedTransport) -> tuple[np.ndarray, ...]:
            here = on_device and not (mixed and transport.rank % 2)
            x, r = (
                data.gradient("normal", 50_000, dtype, transport.rank),
                data.gradient("normal", 50_000, dtype, transport.rank + 9),
            )
            out = np.empty_like(x)
            tensors = [put(v) if here else v for v in (x, r, out)]
            result = sc.sparse_allreduce(
                tensors[0], k, comm=transport, residual=tensors[1], out=tensors[2], op="mean", **options, **by_chunk
            )
            entries = [v.get() if here else v for v in (result.indices, result.values)]
            return (*entries, *(fetch(v, x) if here else v for v in tensors[1:]))

        return [result.value for result in simulated.run(3, program, node_of_rank=[0, 0, 1])]

    for actual, expected in zip(train(True), train(False), strict=True):
        assert all(data.same_bits(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("library", ["cupy", "torch", "jax"])
def test_tensors_of_every_library_on_their_streams(library: str) -> None:
    x = data.gradient("normal", 1_000_000, "float32")
    there = put(x, library)
    same(sc.topk(there, 1000), sc.topk(x, 1000))
    if library == "jax":
        return
    if library == "torch":
        import torch

        stream: Any = torch.cuda.Stream()
        current = torch.cuda.stream(stream)
        stream.wait_stream(torch.cuda.current_stream())
    else:
        current = stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
    with current:  # the selection runs between earlier and later work of this stream
        residual = there * 0
        for _ in range(20):
            there *= 1
        selected = sc.topk(there, 1000, residual=residual)
        residual *= 2
    stream.synchronize()
    r = np.zeros_like(x)
    same(selected, sc.topk(x, 1000, residual=r))
    np.testing.assert_array_equal(fetch(residual, x), 2 * r)


@pytest.mark.parametrize("n", [1000, 3_000_000])
def test_a_captured_graph(n: int) -> None:
    from sparsecomm.tensors import interop

    backend, k = cuda.of(0), n // 100
    stream = cupy.cuda.Stream(non_blocking=True)
    x, r = cupy.zeros(n, np.float32), cupy.zeros(n, np.float32)
    t, u = interop.tensor(x, "x"), interop.tensor(r, "r", writable=True)
    with stream:
        for _ in range(2):
            backend.merge_topk(backend.topk(t, k, u), backend.topk(t, k, u), k)
            backend.topk_by_chunk(t, 7, 500, None)
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        selected = backend.topk(t, k, u)
        merged, rejected = backend.merge_topk(selected, selected, k // 2)
        by_chunk = backend.topk_by_chunk(t, 7, 500, None)
        graph = stream.end_capture()
        host = np.zeros(n, np.float32)
        for seed in range(3):
            values = data.gradient("normal", n, "float32", seed)
            x.set(values)
            graph.launch(stream)
            stream.synchronize()
            expected = sc.topk(values, k, residual=host)
            room, counter = selected.room, int(selected.counter.get()[0])
            np.testing.assert_array_equal(room[0][:counter].get(), expected.indices)
            of_chunks = sc.topk(values, 7, chunk=500)
            assert int(by_chunk.counter.get()[0]) == of_chunks.nnz
            np.testing.assert_array_equal(by_chunk.room[0].get(), of_chunks.indices)
            assert int(merged.counter.get()[0]) == k // 2
            assert int(rejected.counter.get()[0]) == k - k // 2
            np.testing.assert_array_equal(r.get(), host)


def test_a_graph_of_pytorch() -> None:
    """PyTorch's stream is not CuPy's. Refused calls during the capture and calls before replays change nothing."""
    torch = pytest.importorskip("torch")
    n, k = 3_000_000, 30_000
    x, r, out = (torch.zeros(n, device="cuda") for _ in range(3))
    sc.topk(x, k, residual=r).to_dense(out)
    torch.cuda.synchronize()
    graph, host = torch.cuda.CUDAGraph(), np.zeros(n, np.float32)
    with torch.cuda.graph(graph):
        selected = sc.topk(x, k, residual=r)
        merge = lambda: sc.merge_topk(selected, selected, k)  # noqa: E731
        for refused in (lambda: sc.threshold(x, 1.0), lambda: selected.nnz, merge):
            with pytest.raises(sc.InvalidInputError, match="being captured into a CUDA graph"):
                refused()
        selected.to_dense(out)
    for seed in range(3):
        values = data.gradient("normal", n, "float32", seed)
        same(sc.topk(put(values), k), sc.topk(values, k))
        x.copy_(torch.from_numpy(values))
        graph.replay()
        torch.cuda.synchronize()
        expected = sc.topk(values, k, residual=host)
        same(selected, expected)
        np.testing.assert_array_equal(out.cpu().numpy(), expected.to_dense())
        np.testing.assert_array_equal(r.cpu().numpy(), host)
    before = torch.cuda.memory_allocated()
    sc.topk(x, n // 2)
    assert torch.cuda.memory_allocated() < before + 2**20
    assert torch.cuda.max_memory_allocated() > before + 12 * n // 2


def test_more_elements_than_31_bits_count() -> None:
    n = 2**31 + 1000
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * n:
        pytest.skip("too little memory")
    x = cupy.zeros(n, np.float16)
    indices = np.array([0, 7, 2**20, 2**31 - 2, 2**31 - 1, 2**31, n - 1])
    x[cupy.asarray(indices)] = cupy.asarray([1, -5, 3, 2, 4, -4, 6], np.float16)
    selected = sc.topk(x, 4)
    assert selected.indices.dtype == np.int64
    assert selected.indices.get().tolist() == [7, 2**31 - 1, 2**31, n - 1]


def test_device_memory_that_runs_out() -> None:
    pool = cupy.get_default_memory_pool()
    pool.set_limit(size=pool.total_bytes())
    try:
        with pytest.raises(MemoryError):
            cuda.of(0).runtime.empty(1 << 40, np.uint8)
    finally:
        pool.set_limit(size=0)
