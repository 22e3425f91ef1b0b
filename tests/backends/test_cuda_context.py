"""Execution contexts: threads share no memory that a call works with, whichever streams they use."""

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
    """Lets another thread go on before every launch: what threads share, they then use by turns."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.both = threading.Barrier(2)

    def launch(self, *arguments: Any, **options: Any) -> None:
        try:
            self.both.wait(0.05)
        except threading.BrokenBarrierError:  # the other one does something else, or is done
            self.both.reset()
        super().launch(*arguments, **options)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alternating]:
    made = Alternating(seed=1)
    use(made, monkeypatch, radix_max_size=50, spare_candidates=2000)
    monkeypatch.setitem(sys.modules, "cupy", made.library)
    yield made
    made.streams.run_all()


def by_two(program: Callable[[int], None]) -> None:
    """Run a program in two threads."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(program, number) for number in range(2)]:
            done.result()


def gradient(number: int, seed: int) -> np.ndarray:
    return data.gradient("normal", N, "float32", seed=100 * number + seed)


@pytest.mark.parametrize("stream", [1, PER_THREAD])
def test_two_threads_select_at_once(runtime: Alternating, stream: int) -> None:
    """On one stream; and on the per-thread default stream, which is one handle and a stream each."""

    def program(number: int) -> None:
        runtime.make_current(stream)
        found = [sc.topk(runtime.put(gradient(number, seed)), K) for seed in range(TIMES)]
        for seed, entries in enumerate(found):
            indices, values = reference.topk(gradient(number, seed), K)
            np.testing.assert_array_equal(np.array(entries.indices), indices)
            assert data.same_bits(np.array(entries.values), values)

    by_two(program)


@pytest.mark.parametrize("seed", range(6))
def test_calls_of_two_threads_on_their_default_streams(seed: int) -> None:
    """One owner's calls, one after another; what the first has started has not run when the second one starts."""
    runtime = DeferredRuntime(seed=seed)
    backend = CudaBackend(runtime, radix_max_size=50, spare_candidates=2000)
    found: dict[int, Any] = {}

    def program(number: int) -> None:
        runtime.make_current(PER_THREAD)
        x = interop.tensor(runtime.put(gradient(number, seed)), "x", stream=PER_THREAD)
        found[number] = backend.topk(x, K, None), x

    threads = [threading.Thread(target=program, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    runtime.streams.run_all()
    for number, (entries, _) in found.items():
        np.testing.assert_array_equal(np.array(entries.indices), reference.topk(gradient(number, seed), K)[0])


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_what_the_host_reads_is_read_on_its_device_after_the_work_that_writes_it(seed: int, in_thread: bool) -> None:
    """Another thread reads, or another device is current. No other stream waits for the stream of the work."""
    other, runtime = (DeferredRuntime(seed=seed, device=index) for index in range(2))
    backend, x = CudaBackend(runtime, radix_max_size=50, spare_candidates=2000), gradient(1, seed)
    before = runtime.make_current(runtime.new_stream())
    there = interop.tensor(runtime.put(x.copy()), "x", stream=runtime.stream())
    freed = [backend.topk(there, K, None) for _ in range(4)]  # whose memory is not zero
    assert [entries.nnz for entries in freed] == [K] * 4
    del freed
    none = interop.tensor(runtime.put(x[:0].copy()), "x", stream=runtime.stream())
    nothing, neither = backend.topk(none, K, None), backend.topk_by_chunk(none, 9, 500, None)
    found = backend.topk(there, K, None)
    by_chunk, (merged, lost) = backend.topk_by_chunk(there, 9, 500, None), backend.merge_topk(found, found, K // 2)
    mean, dense = backend.divide(merged, 4), backend.nonzeros(backend.accumulate(there, None), (N,))
    runtime.make_current(before)
    taken = reference.topk(x, K)
    (indices, values), rest = reference.merge_topk(taken, taken, K // 2)
    of_chunks = reference.topk_by_chunk(x, 9, 500)
    empty, quotients = reference.topk(x[:0], 0), values / np.float32(4)
    expected = empty, empty, taken, of_chunks, rest, (indices, quotients), reference.topk(x, N), (indices, values)
    made = nothing, neither, found, by_chunk, lost, mean, dense, merged

    def read() -> None:
        for entries, (indices, values) in zip(made, expected, strict=True):
            assert entries.nnz == len(indices)
            np.testing.assert_array_equal(entries.indices.raw, indices)  # a copy would wait for the current stream
            assert data.same_bits(entries.values.raw, values)

    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(read).result()
    else:
        with other.on_stream(None):
            read()
