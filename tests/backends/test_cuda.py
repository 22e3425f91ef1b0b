"""Properties of CUDA devices only: launches, waits of the host, memory, streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.backends.cuda.context import CountedVector, Workspace
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import simulated
from tests import data, reference
from tests.backends.devices import same, selection_state
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.streams import Stream
from tests.emulator.tensor import MANAGED, CudaTensor


def on_device(array: np.ndarray) -> interop.Tensor:
    return interop.tensor(CudaTensor(array), "x", writable=True)


@pytest.fixture
def runtime() -> DeferredRuntime:
    return DeferredRuntime()


@pytest.fixture
def backend(runtime: DeferredRuntime) -> CudaBackend:
    return CudaBackend(runtime, radix_max_size=300, spare_candidates=500, filter_rounds=1)


def entries_of(n: int, nnz: int, seed: int) -> SparseVector:
    rng = np.random.default_rng(seed)
    return SparseVector(np.sort(rng.choice(n, nnz, replace=False)), rng.standard_normal(nnz).astype(np.float32), n)


@pytest.mark.parametrize("index", [10**9, 5000, -1, -(2**31)])
@pytest.mark.parametrize("position", [0, 1000, 2499])
def test_damaged_indices_never_lead_out_of_bounds(
    backend: CudaBackend, runtime: DeferredRuntime, position: int, index: int
) -> None:
    n = 5000
    changed, other, out = entries_of(n, 2500, 1), entries_of(n, 2500, 2), runtime.empty(n, np.float32)
    changed.indices[position] = index
    backend.densify(backend.as_tensor(out, (n,)), changed)
    for pair in ((changed, other), (other, changed)):
        merged, rejected = backend.merge_topk(*pair, 700)
        assert merged.nnz + rejected.nnz <= 5000
    written = out.get()
    runtime.check()
    valid = (changed.indices >= 0) & (changed.indices < n)
    expected = reference.dense((changed.indices[valid], changed.values[valid]), n)
    assert ((written == expected) | (written == 0)).all()


# -- launches and waits ------------------------------------------------------------------------------------------------


def test_number_of_launches(backend: CudaBackend, runtime: DeferredRuntime) -> None:
    x = data.gradient("normal", 9000, "float32")
    a, b = entries_of(5000, 400, 1), entries_of(5000, 400, 2)
    for call, launches in (
        (lambda: backend.topk(on_device(x), 90, on_device(np.zeros_like(x))), "sample filter emit radix"),
        (lambda: backend.topk(on_device(x[:300]), 9, None), "radix"),
        (lambda: backend.merge_topk(a, b, 400), "merge emit"),
        (lambda: backend.threshold(on_device(x), 3.0, None).indices, "threshold"),
        (lambda: backend.topk_by_chunk(on_device(x), 9, 500, on_device(np.zeros_like(x)), 0.95), "warp_chunks"),
        (lambda: backend.topk_by_chunk(on_device(x), 200, 500, on_device(np.zeros_like(x)), 0.95), "chunks"),
    ):
        runtime.launches.clear()
        _ = call()
        assert runtime.launches == launches.split()


@pytest.mark.parametrize("by_chunk", [False, True])
def test_launches_are_prepared_once(
    backend: CudaBackend, runtime: DeferredRuntime, by_chunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each kind of call and stream: later calls on other memory reuse them."""
    prepared, prepare = list[str](), backend.prepare
    monkeypatch.setattr(backend, "prepare", lambda *arguments: prepared.append(arguments[1]) or prepare(*arguments))

    def call(n: int, k: int, seed: int, *, residual: bool = True, shift: int = 0) -> int:
        """Return the number of launches that were prepared."""
        x, r = (data.integers(n + shift, "float32", seed + i)[shift:] for i in range(2))
        total = r + x if residual else x.copy()
        before = x.copy(), r.copy()
        runtime.launches.clear()
        prepared.clear()
        arguments = (k, n // 3) if by_chunk else (k,)
        select, oracle = (getattr(module, "topk_by_chunk" if by_chunk else "topk") for module in (backend, reference))
        expected = oracle(total, *arguments)
        same(select(on_device(x), *arguments, on_device(r) if residual else None), expected)
        total[expected[0]] = 0
        np.testing.assert_array_equal(r, total if residual else before[1])
        np.testing.assert_array_equal(x, before[0])
        return len(prepared)

    launches = call(9000, 90, 0)
    assert launches == len(runtime.launches) > 0
    assert [call(9000, 90, seed) for seed in (1, 2)] == [0, 0]
    assert call(9000, 91, 3) == call(9000, 90, 4, residual=False) == call(9000, 90, 5, shift=1) == launches
    assert call(40_000, 90, 6) == launches  # the selection needs more state
    assert call(9000, 90, 7) == 0
    stream, x = runtime.new_stream(), on_device(data.integers(9000, "float32", 1))
    with runtime.on_stream(stream):
        assert [call(9000, 90, seed) for seed in (8, 9)] == [launches, 0]
        for times in (1, 2):  # each graph prepares its own
            with runtime.capture(stream):
                backend.topk_by_chunk(x, 90, 3000, None) if by_chunk else backend.topk(x, 90, None)
            assert len(prepared) == times * launches


def test_the_host_waits_only_when_it_asks(
    backend: CudaBackend, runtime: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels pass numbers of entries to each other in device memory: selection, merges, residual and densify."""

    def no_waiting(event: object) -> None:
        raise AssertionError("the host waited for the device")

    x, residual, out = (data.gradient("normal", 9000, "float32", seed) for seed in range(3))
    acc = residual + x
    with monkeypatch.context() as patched:
        patched.setattr(runtime.streams, "run_until", no_waiting)
        taken = backend.topk(on_device(x), 90, on_device(residual))
        others = backend.topk_by_chunk(on_device(out), 8, 900, None)
        merged, rejected = backend.merge_topk(taken, others, 70)
        twice, _ = backend.merge_topk(merged, merged, 60)
        mean = backend.divide(merged, 4)
        backend.scatter_add(on_device(residual), rejected)
        backend.scatter_add_where(on_device(residual), taken, merged, False)
        backend.densify(on_device(out), mean)
    by_chunk = reference.topk_by_chunk(data.gradient("normal", 9000, "float32", 2), 8, 900)
    selected = reference.topk(acc, 90), by_chunk
    expected, lost = reference.merge_topk(*selected, 70)
    np.testing.assert_array_equal(merged.indices, expected[0])
    np.testing.assert_array_equal(rejected.indices, lost[0])
    np.testing.assert_array_equal(twice.values, reference.topk(reference.dense(expected, 9000), 60)[1] * 2)
    np.testing.assert_array_equal(out, reference.dense(expected, 9000) / np.float32(4))
    acc[selected[0][0]] = 0
    acc[lost[0]] += lost[1]
    back = ~np.isin(selected[0][0], expected[0])
    acc[selected[0][0][back]] += selected[0][1][back]
    np.testing.assert_array_equal(residual, acc)


@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 97, 300, 511, 512, 513, 1365, 4096, 4097, 10_000]),
    st.integers(0, 15_000),
    st.integers(1, 300),
    st.sampled_from(sorted(data.KINDS)),
    st.sampled_from(["float32", "bfloat16", "float64"]),
    data.seeds,
)
def test_chunks_of_any_length(chunk: int, n: int, k: int, kind: str, dtype: str, seed: int) -> None:
    """A warp selects alone for small k, or from up to 512 elements; tiles have 4,096. Threads run in any order."""
    x, r = data.gradient(kind, n, dtype, seed), data.gradient("normal", n, dtype, seed + 1)
    backend = CudaBackend(DeferredRuntime(seed=seed, multiprocessors=1 + seed % 4))
    for residual, decay in ((None, 1.0), (r, 0.95)):
        acc = x if residual is None else reference.accumulated(x, r, decay)
        indices, values = reference.topk_by_chunk(reference.widened(acc), min(k, chunk), chunk)
        there = None if residual is None else on_device(residual)
        result = backend.topk_by_chunk(on_device(x), min(k, chunk), chunk, there, decay)
        np.testing.assert_array_equal(result.indices, indices)
        assert data.same_bits(np.asarray(result.values), values)
    backend.runtime.check()
    acc[indices] = 0
    np.testing.assert_array_equal(reference.widened(r), reference.widened(acc))


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("shift", [(1, 1), (0, 1), (3, 0)])
def test_memory_that_is_not_aligned(backend: CudaBackend, dtype: str, shift: tuple[int, int]) -> None:
    x, r = (data.integers(5000 + by, dtype, by)[by:] for by in shift)
    before = reference.widened(r) + reference.widened(x)
    expected = reference.topk(before, 500)
    same(backend.topk(on_device(x), 500, on_device(r)), expected)
    before[expected[0]] = 0
    np.testing.assert_array_equal(reference.widened(r), before)
    expected = reference.topk_by_chunk(reference.widened(reference.accumulated(x, r)), 5, 333)
    result = backend.topk_by_chunk(on_device(x), 5, 333, on_device(r))
    same(result, expected)
    backend.densify(on_device(x), result)
    backend.runtime.synchronize()
    np.testing.assert_array_equal(reference.widened(x), reference.dense(expected, len(x)))


@pytest.mark.parametrize("by_chunk", [False, True])
def test_device_memory_that_runs_out_leaves_everything_as_it_was(
    by_chunk: bool, runtime: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever allocation fails, no kernel has been launched yet."""
    x, r = data.gradient("normal", 9000, "float32"), data.gradient("normal", 9000, "float32", 1)
    before, empty = r.copy(), runtime.empty
    for allowed in range(20):
        left = [allowed]

        def limited(count: int, dtype: object, left: list[int] = left) -> np.ndarray:
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError
            return empty(count, dtype)

        fresh = CudaBackend(runtime, radix_max_size=300, spare_candidates=500, filter_rounds=1)
        monkeypatch.setattr(runtime, "empty", limited)
        runtime.launches.clear()
        try:
            if by_chunk:
                fresh.topk_by_chunk(on_device(x), 90, 900, on_device(r))
            else:
                fresh.topk(on_device(x), 90, on_device(r))
        except MemoryError:
            runtime.synchronize()
            assert not runtime.launches
            assert data.same_bits(r, before)
        else:
            assert allowed > (1 if by_chunk else 5)
            return
    raise AssertionError("never enough")


@pytest.mark.parametrize("stopped", ["topk", "merge"])
def test_a_call_after_one_that_stopped_between_two_launches(
    stopped: str, backend: CudaBackend, runtime: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels expect zeros in the state that they share, and leave zeros."""
    x, y = (data.gradient("normal", 9000, "float32", seed) for seed in range(2))
    a, b = (backend.topk(on_device(v), 900, None) for v in (x, y))
    expected, wanted = reference.topk(x, 90), reference.topk(x, 900)
    merged, _ = reference.merge_topk(wanted, reference.topk(y, 900), 1000)
    calls = {
        "topk": lambda: same(backend.topk(on_device(x), 90, None), expected),
        "merge": lambda: same(backend.merge_topk(a, b, 1000)[0], merged),
    }
    for allowed in range(1, 4 if stopped == "topk" else 2):
        left = [allowed]

        def limited(*arguments: Any, left: list[int] = left, launch: Any = runtime.launch) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            launch(*arguments)

        for call in calls.values():
            left[0] = allowed
            with monkeypatch.context() as patched:
                patched.setattr(runtime, "launch", limited)
                with pytest.raises(KeyboardInterrupt):
                    calls[stopped]()
            call()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_candidates_of_normal_data_find_room(dtype: str, runtime: DeferredRuntime) -> None:
    """Even without the spare room for many equal elements. At density 0.09 there is room for 1.7 k candidates."""
    x, rooms = on_device(data.gradient("normal", 1 << 19, dtype)), []
    backend, room = CudaBackend(runtime, radix_max_size=300, spare_candidates=0), Workspace.room
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Workspace, "room", lambda self, nbytes: rooms.append(nbytes) or room(self, nbytes))
        for density in (0.001, 0.01, 0.03, 0.09):
            k = round(x.size * density)
            backend.topk(x, k, None)
            runtime.synchronize()
            state = selection_state(backend)
            assert int(state["retry"].get()[0]) == 0
            assert k <= int(state["count"].get()[0])
    assert rooms[-1] < 1.7 * k * (x.dtype.itemsize + 4)


def test_scratch_memory_is_given_back(runtime: DeferredRuntime) -> None:
    """Between calls, the pool holds less than 1 MiB plus 1/500 of x for any k, as kernels/README.md promises."""
    backend = CudaBackend(runtime, radix_max_size=300)  # with the default room for candidates
    for n, k in ((9000, 90), (200_000, 60_000), (9000, 900)):
        x = data.gradient("normal", n, "float32")
        result = backend.topk(on_device(x), k, None)
        merged, rejected = backend.merge_topk(result, result, k // 2)
        merged.indices.get()
        del result, merged, rejected
        assert runtime.current.pool.in_use < 2**20 + x.nbytes // 500


# -- tensors and streams ----------------------------------------------------------------------------------------------


def test_results_stay_on_the_device(cuda: DeferredRuntime) -> None:
    x = CudaTensor(data.gradient("normal", 4000, "float32"))
    result = sc.topk(x, 40)
    assert isinstance(result, CountedVector)
    assert result.device == interop.Device("cuda", 0)
    assert x.streams == [1]  # the tensor's library was told on which stream the selection runs
    assert sc.merge_topk(result, result, 10).nnz == 10
    assert (result.nnz, result.density) == (40, 0.01)
    with pytest.raises(sc.InvalidInputError, match=r"b is on cpu; expected cuda:0, where a is"):
        sc.merge_topk(result, sc.topk(x.array, 40), 10)
    managed = sc.topk(CudaTensor(x.array, kind=MANAGED), 40)
    np.testing.assert_array_equal(managed.indices, result.indices)


# -- graphs ------------------------------------------------------------------------------------------------------------


@contextmanager
def captured(runtime: DeferredRuntime, monkeypatch: pytest.MonkeyPatch, stream: Stream) -> Iterator[list[Any]]:
    """Capture a stream that is current in the tensors' library, as in `torch.cuda.graph`, and not in CuPy."""
    with runtime.capture(stream) as graph, monkeypatch.context() as patched:
        patched.setattr(interop, "_current_stream", lambda obj: stream.handle)
        yield graph


@pytest.mark.parametrize("warm", [False, True])
def test_a_graph_beside_calls_that_are_not_captured(
    warm: bool, cuda: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph may be the first call on its stream. Other calls run before each replay, also on this stream."""
    captured_stream, x, out = cuda.new_stream(), data.gradient("normal", 4000, "float32"), np.zeros(4000, np.float32)

    def eager(seed: int) -> None:
        for stream in (captured_stream, cuda.current):
            with cuda.on_stream(stream):
                y = data.gradient("normal", 4000, "float32", seed)
                selected = sc.topk(cuda.library.asarray(y), 40)
                same(sc.merge_topk(selected, selected, 20), reference.merge_topk(*2 * [reference.topk(y, 40)], 20)[0])

    if warm:
        eager(5)
    with captured(cuda, monkeypatch, captured_stream) as graph:
        selected = sc.topk(CudaTensor(x), 40)
        selected.to_dense(CudaTensor(out))
        with cuda.on_stream(captured_stream):
            twice = sc.merge_topk(selected, sc.topk(CudaTensor(x), 90), 60)
    for seed in range(3):
        eager(seed)
        cuda.streams.run_all()
        x[:] = data.gradient("normal", 4000, "float32", 10 + seed)
        x[seed:] *= seed < 2  # the last gradient has few entries
        cuda.replay(graph, captured_stream)
        cuda.streams.run_all()
        expected = reference.topk(x, 40)
        same(selected, expected)
        same(twice, reference.merge_topk(expected, reference.topk(x, 90), 60)[0])
        np.testing.assert_array_equal(out, reference.dense(expected, 4000))


def test_what_cannot_be_captured_is_refused_before_it_begins(
    cuda: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, x, residual = cuda.new_stream(), np.ones(99, np.float32), np.zeros(99, np.float32)

    def program(transport: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer({"w": CudaTensor(x)}, 0.1, comm=transport, dense_below=0)
        reducer.push("w", cuda.put(np.ones(99, np.float32)))
        reducer.wait()
        cuda.streams.run_all()
        for refused in (
            lambda: sc.sparse_allreduce(CudaTensor(x), 3, comm=transport, residual=CudaTensor(residual)),
            lambda: sc.isparse_allreduce(CudaTensor(x), 3, comm=transport, residual=CudaTensor(residual)),
            lambda: reducer.push("w", CudaTensor(x)),
            lambda: sc.threshold(CudaTensor(x), 0.5, residual=CudaTensor(residual)),
        ):
            with captured(cuda, monkeypatch, stream) as graph:
                with pytest.raises(sc.InvalidInputError, match="being captured into a CUDA graph"):
                    refused()
                assert not graph
            cuda.streams.run_all()
            assert not residual.any()
        reducer.push("w", cuda.put(np.ones(99, np.float32)))
        assert reducer.wait().number == 1
        with cuda.capture(stream), cuda.on_stream(stream):
            selected = sc.topk(CudaTensor(x), 3)
            with pytest.raises(sc.InvalidInputError, match=r"being captured into a CUDA graph, .* nnz"):
                _ = selected.nnz

    simulated.run(2, program)


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual", "out"])
def test_everything_on_one_device(cuda: DeferredRuntime, name: str) -> None:
    array = np.ones(9, np.float32)
    for other in (np.ones(9, np.float32), CudaTensor(np.ones(9, np.float32), device=1)):
        with pytest.raises(sc.InvalidInputError, match=rf"{name}: got a tensor on (cpu|cuda:1); expected cuda:0"):
            sc.sparse_allreduce(CudaTensor(array), 3, **{name: other})
    with pytest.raises(sc.InvalidInputError, match=rf"{name}: got a tensor on cuda:0; expected cpu"):
        sc.sparse_allreduce(array, 3, **{name: CudaTensor(np.ones(9, np.float32))})


def test_without_cupy_or_driver_the_error_says_what_to_install() -> None:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        expected = r"CuPy, which .* cannot be imported .*pip install .*\[cuda13x\]'"
    except Exception:
        expected = r"CuPy .* cannot use it .*expected a GPU, and a driver for CUDA \d+ or newer"
    else:
        pytest.skip("there is a GPU")
    with pytest.raises(sc.InvalidInputError, match=expected):
        sc.topk(CudaTensor(np.ones(9, np.float32)), 3)
