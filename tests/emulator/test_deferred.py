"""The deferring device itself: work runs late and in any order that is allowed, and freed memory is reused at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from tests.emulator.arrays import DeviceArray
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.runtime import POISON
from tests.emulator.streams import LEGACY, PER_THREAD, Stream

SEEDS = range(20)
POISONED = np.full(1, POISON, np.uint8).repeat(4).view(np.float32)[0]


def filled(runtime: DeferredRuntime, value: float, count: int = 3) -> DeviceArray:
    """An array that the current stream will fill."""
    made = runtime.empty(count, np.float32)
    made[:] = value
    return made


# -- streams -----------------------------------------------------------------------------------------------------------


@contextmanager
def on(runtime: DeferredRuntime, stream: int | Stream) -> Iterator[None]:
    """Make a stream current. On leaving, nobody follows it."""
    before = runtime.make_current(stream)
    yield
    runtime.make_current(before)


def orders(runtime: DeferredRuntime, *streams: int | Stream) -> str:
    """The order in which work runs that streams are given in turn, when all that the last one was given is done."""
    ran = list[str]()
    for name, stream in zip("abc", streams, strict=False):
        with on(runtime, stream):
            runtime.enqueue(partial(ran.append, name))
    runtime.streams.run_all()
    return "".join(ran)


def test_streams_run_in_any_order_that_events_allow() -> None:
    found = {orders(r, r.new_stream(), r.new_stream()) for r in (DeferredRuntime(seed=seed) for seed in SEEDS)}
    assert found == {"ab", "ba"}
    for seed in SEEDS:
        runtime, ran = DeferredRuntime(seed=seed), list[str]()
        first, second, third = (runtime.new_stream() for _ in range(3))
        with on(runtime, first):
            runtime.enqueue(partial(ran.append, "a"))
            event = runtime.record()
            runtime.enqueue(partial(ran.append, "x"))
        with on(runtime, second):
            runtime.follow(event)
            runtime.enqueue(partial(ran.append, "b"))
        with on(runtime, third):
            runtime.enqueue(partial(ran.append, "c"))
        with on(runtime, second):
            runtime.synchronize()
        assert "".join(ran).replace("x", "").replace("c", "") == "ab"


def test_the_order_follows_from_the_seed() -> None:
    def order(seed: int) -> str:
        runtime = DeferredRuntime(seed=seed)
        return orders(runtime, *(runtime.new_stream() for _ in range(3)))

    assert [order(seed) for seed in SEEDS] == [order(seed) for seed in SEEDS]
    assert len({order(seed) for seed in SEEDS}) > 2


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    for seed in SEEDS:
        runtime = DeferredRuntime(seed=seed)
        assert orders(runtime, PER_THREAD, LEGACY, PER_THREAD) == "abc"
        assert orders(runtime, LEGACY, PER_THREAD, LEGACY) == "abc"
    found = {orders(r, r.new_stream(), LEGACY) for r in (DeferredRuntime(seed=seed) for seed in SEEDS)}
    assert found == {"ab", "ba"}


def test_each_thread_has_its_own_current_and_its_own_default_stream() -> None:
    runtime, streams = DeferredRuntime(), list[Stream]()

    def look() -> None:
        streams.append(runtime.current)
        with runtime.on_stream(PER_THREAD):
            assert runtime.stream() == PER_THREAD
            streams.append(runtime.current)

    with runtime.on_stream(runtime.new_stream()) as _:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert runtime.stream() not in (LEGACY, PER_THREAD)
    look()
    assert streams[0] is streams[2] is runtime.streams.legacy
    assert streams[1] is not streams[3]


# -- memory ------------------------------------------------------------------------------------------------------------


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_arithmetic_is_work_and_its_results_begin_as_poison() -> None:
    runtime = DeferredRuntime()
    a = filled(runtime, 3)
    b = a * 2 + np.float32(1)
    a *= np.float32(10)
    a[1:] = b[1:]
    c = np.concatenate([a, b])
    d = runtime.library.asarray(np.array([0, 5, 3]))
    e = c[d]
    assert all((each.raw == POISONED).all() for each in (a, b, c, e))
    assert e.tolist() == [30, 7, 7]
    assert (c[:2].dtype, (b > 3).dtype, b.sum().shape) == (np.float32, np.bool_, ())
    assert float(b.sum()) == 21
    assert b.view(np.uint32).itemsize == 4


def test_what_depends_on_the_data_waits_for_the_current_stream_and_what_that_waits_for() -> None:
    for seed in SEEDS:
        runtime = DeferredRuntime(seed=seed)
        with on(runtime, runtime.new_stream()):
            a = filled(runtime, 3)
            event = runtime.record()
        runtime.follow(event)
        found = a[a == 3]
        assert found.shape == (3,)
        assert np.flatnonzero(a).tolist() == [0, 1, 2]


def test_host_arrays_do_not_mix_in() -> None:
    a = filled(DeferredRuntime(), 3)
    with pytest.raises(TypeError, match="one of the host"):
        a + np.ones(3, np.float32)
    with pytest.raises(TypeError, match="without being asked"):
        exec("np.asarray(a)", {"np": np, "a": a, "__name__": "sparsecomm.somewhere"})
