"""Calls and reducers on the emulated device, whose work runs late and in any order, give the results of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.tensors import interop
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.devices import use
from tests.emulator.transport import CarelessTransport

SEEDS = range(6)
N, K = 900, 60
Results = list[list[np.ndarray]]  # by rank: the results in the order of the program

# -- bodies: work on the device, or on the CPU for comparison ---------------------------------------------------------


def every_rank(rank: int) -> bool:
    return True


def calls(
    runtime: DeferredRuntime | None,
    P: int = 3,
    dtype: str = "float32",
    on_device: Callable[[int], bool] = every_rank,
    via: Mapping[str, Any] = MappingProxyType({}),
    steps: int = 3,
    **options: Any,
) -> Results:
    """Make some calls with a residual and ``out``. Each rank has its own stream, and two ranks share a node."""
    options = {"algorithm": "butterfly", "op": "mean"} | options

    def program(transport: CarelessTransport) -> list[np.ndarray]:
        there = runtime if on_device(transport.rank) else None
        with there.on_stream(there.new_stream()) if there else nullcontext():
            put, fetch = _between(there)
            residual, seen = np.zeros(N, data.DTYPES["float32" if dtype == "bfloat16" else dtype]), []
            out = np.empty_like(residual)
            targets = {"residual": put(residual), "out": put(out)}
            for step in range(steps):
                x = _on(there, data.gradient("normal", N, dtype, 10 * step + transport.rank))
                result = sc.sparse_allreduce(x, K, comm=transport, **targets, **options)
                x[:] = np.nan  # the caller may change it now
                seen += [np.array(result.indices), np.array(result.values), fetch(out)]
            return [*seen, fetch(residual)]

    return _on_ranks(P, program, runtime, **via)


def calls_aside(runtime: DeferredRuntime | None) -> Results:
    """Make calls in a background thread, and use results on the program's stream."""

    def program(transport: CarelessTransport) -> list[np.ndarray]:
        transport.threaded = True
        put, fetch = _between(runtime)
        residual, out, seen = np.zeros(N, np.float32), np.empty(N, np.float32), []
        targets = {"residual": put(residual), "out": put(out)}
        for step in range(3):
            x = _on(runtime, data.gradient("normal", N, "float32", step))
            handle = sc.isparse_allreduce(x, K, comm=transport, **targets)
            del x  # the caller may also free it
            _on(runtime, np.full(N, np.nan, np.float32))
            handle.wait()
            seen.append(fetch(out))
        return [*seen, fetch(residual)]

    return _on_ranks(1, program, runtime)


def two_queues(runtime: DeferredRuntime | None) -> Results:
    """Make calls on two communicators and two streams, without a wait in between."""

    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        with _elsewhere(runtime):
            return sc.sparse_allreduce(_on(runtime, next(gradients)), K, comm=transport)

    gradients = iter([data.gradient("normal", N, "float32", seed) for seed in range(2)])
    results = [simulated.run(1, program)[0].value for _ in range(2)]
    if runtime:
        runtime.streams.run_all()
    return [[np.array(result.indices), np.array(result.values)] for result in results if result is not None]


def another_librarys_stream(runtime: DeferredRuntime | None) -> Results:
    """Tensors belong to another library's current stream, and results are used on CuPy's."""
    x = data.gradient("normal", N, "float32")
    if runtime is None:
        selected = sc.topk(x, K)
    else:
        stream = runtime.new_stream()
        before = runtime.make_current(stream)
        tensor = runtime.put(x)
        runtime.make_current(before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interop, "_current_stream", lambda obj: stream.handle)
            selected = sc.topk(tensor, K)
    return [[np.array(selected.to_dense())]]


def reducer(runtime: DeferredRuntime | None) -> Results:
    """Gradients come from several streams, and the state is used on another one."""

    def program(transport: CarelessTransport) -> list[np.ndarray]:
        put, _ = _between(runtime)
        like = {name: put(np.zeros(N, np.float32)) for name in "ab"}
        new, seen = sc.Reducer(like, 0.05, comm=transport, momentum=0.9, dense_below=10), []
        for step in range(3):
            gradients = {name: data.gradient("normal", N, "float32", 3 * step + i) for i, name in enumerate("ab")}
            for name, gradient in gradients.items():
                with _elsewhere(runtime):
                    new.push(name, put(gradient))
            new.wait()
            with _elsewhere(runtime):
                new.scale(0.5)
            seen += [*gradients.values(), *new.state_dict()["residuals"].values()]
        return seen

    return _on_ranks(1, program, runtime)


def _on(runtime: DeferredRuntime | None, array: np.ndarray) -> Any:
    """Return a copy on the device, whose memory the current stream reuses once it is freed."""
    return runtime.library.asarray(array) if runtime else array.copy()


def _between(runtime: DeferredRuntime | None) -> tuple[Callable[[np.ndarray], Any], Callable[[np.ndarray], np.ndarray]]:
    """Return functions that pass host arrays to the device and fetch them."""
    if runtime is None:
        return (lambda array: array), np.copy

    def fetch(array: np.ndarray) -> np.ndarray:
        runtime.synchronize()
        return array.copy()

    return runtime.put, fetch


@contextmanager
def _elsewhere(runtime: DeferredRuntime | None) -> Iterator[None]:
    """Make a new stream current. Nothing waits for it afterwards."""
    if runtime is None:
        yield
        return
    before = runtime.make_current(runtime.new_stream())
    yield
    runtime.make_current(before)


def _on_ranks(
    P: int, program: Callable[[CarelessTransport], list[np.ndarray]], runtime: DeferredRuntime | None, **via: Any
) -> Results:
    wrapped = CarelessTransport.wrapping(program, seed=runtime.seed if runtime else 0, **via)
    nodes = [rank // 2 for rank in range(P)]
    return [result.value for result in simulated.run(P, wrapped, node_of_rank=nodes)]  # type: ignore[misc]


# -- in any order -----------------------------------------------------------------------------------------------------

VIA: list[dict[str, Any]] = [{}, {"limit": 96}, {"device_memory": True}, {"device_memory": True, "limit": 96}]
_, in_pieces, direct, direct_in_pieces = (partial(calls, via=via) for via in VIA)
dense = partial(calls, algorithm="dense")


@pytest.mark.parametrize(
    "body",
    [calls, in_pieces, direct, direct_in_pieces, dense, calls_aside, two_queues, another_librarys_stream, reducer],
)
def test_results_are_those_of_the_cpu_in_every_order(
    body: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = body(None)
    for seed in SEEDS:
        runtime = DeferredRuntime(seed=seed)
        use(runtime, monkeypatch, radix_max_size=50, spare_candidates=100, filter_rounds=1)
        results = body(runtime)
        runtime.streams.run_all()
        for result, on_cpu in zip(results, expected, strict=True):
            assert all(data.same_bits(*pair) for pair in zip(result, on_cpu, strict=True)), seed
