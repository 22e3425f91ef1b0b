"""Execution contexts: threads share no scratch memory, whichever streams they use."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.tensors import interop
from tests import data, reference
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.devices import use
from tests.emulator.streams import PER_THREAD

N, K, TIMES = 3000, 60, 8


class Alternating(DeferredRuntime):
    """Switches to another thread before every launch, so that threads use shared memory by turns."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.both = threading.Barrier(2)

    def launch(self, *arguments: Any, **options: Any) -> None:
        try:
            self.both.wait(0.05)
        except threading.BrokenBarrierError:  # the other thread launches nothing now
            self.both.reset()
        super().launch(*arguments, **options)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alternating]:
    alternating = Alternating(seed=1)
    use(alternating, monkeypatch, radix_max_size=50, spare_candidates=2000)
    monkeypatch.setitem(sys.modules, "cupy", alternating.library)
    yield alternating
    alternating.streams.run_all()


def by_two(program: Callable[[int], None]) -> None:
    """Run a program in two threads."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(program, number) for number in range(2)]:
            done.result()


def gradient(number: int, seed: int) -> np.ndarray:
    return data.gradient("normal", N, "float32", seed=100 * number + seed)


@pytest.mark.parametrize("stream", [1, PER_THREAD])
def test_two_threads_select_at_once(runtime: Alternating, stream: int) -> None:
    """On one stream, and on the per-thread default stream, whose handle means another stream in each thread."""

    def program(number: int) -> None:
        runtime.make_current(stream)
        results = [sc.topk(runtime.put(gradient(number, seed)), K) for seed in range(TIMES)]
        for seed, entries in enumerate(results):
            indices, values = reference.topk(gradient(number, seed), K)
            np.testing.assert_array_equal(np.array(entries.indices), indices)
            assert data.same_bits(np.array(entries.values), values)

    by_two(program)


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_host_reads_on_the_right_device_after_the_work(seed: int, in_thread: bool) -> None:
    """Another thread reads, or another device is current, and no other stream waits for the stream of the work."""
    other, runtime = (DeferredRuntime(seed=seed, device=index) for index in range(2))
    backend, x = CudaBackend(runtime, radix_max_size=50, spare_candidates=2000), gradient(1, seed)
    before = runtime.make_current(runtime.new_stream())
    there = interop.tensor(runtime.put(x.copy()), "x", stream=runtime.stream())
    freed = [backend.topk(there, K, None) for _ in range(4)]  # their memory is reused, and is not zero
    assert [entries.nnz for entries in freed] == [K] * 4
    del freed
    none = interop.tensor(runtime.put(x[:0].copy()), "x", stream=runtime.stream())
    nothing, neither = backend.topk(none, K, None), backend.topk_by_chunk(none, 9, 500, None)
    selected = backend.topk(there, K, None)
    by_chunk, (merged, lost) = (
        backend.topk_by_chunk(there, 9, 500, None),
        backend.merge_topk(selected, selected, K // 2),
    )
    mean, dense = backend.divide(merged, 4), backend.nonzeros(backend.accumulate(there, None), (N,))
    runtime.make_current(before)
    taken = reference.topk(x, K)
    (indices, values), rest = reference.merge_topk(taken, taken, K // 2)
    of_chunks = reference.topk_by_chunk(x, 9, 500)
    empty, quotients = reference.topk(x[:0], 0), values / np.float32(4)
    expected = empty, empty, taken, of_chunks, rest, (indices, quotients), reference.topk(x, N), (indices, values)
    results = nothing, neither, selected, by_chunk, lost, mean, dense, merged

    def read() -> None:
        for entries, (indices, values) in zip(results, expected, strict=True):
            assert entries.nnz == len(indices)
            np.testing.assert_array_equal(entries.indices.raw, indices)  # a copy would wait for the current stream
            assert data.same_bits(entries.values.raw, values)

    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(read).result()
    else:
        with other.on_stream(None):
            read()
