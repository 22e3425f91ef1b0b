"""A `Reducer` whose gradients come from several streams of a CUDA device, and whose state is looked at from others."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.reducer.programs import SHAPES, bits, run


def train(P: int, options: dict[str, Any], runtime: DeferredRuntime | None) -> list[Any]:
    """Return results, residuals and states of all ranks. Every piece of work is on a stream of its own."""

    def elsewhere() -> None:
        if runtime is not None:
            runtime.make_current(runtime.new_stream())

    def put(array: np.ndarray) -> Any:
        elsewhere()
        return array if runtime is None else runtime.put(array)

    def program(ranks: simulated.SimulatedTransport) -> Any:
        like = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        elsewhere()
        reducer = sc.Reducer(
            {name: put(array) for name, array in like.items()}, 0.05, comm=ranks, bucket_bytes=1500, **options
        )
        found = []
        for step in range(3):
            mine = {
                name: data.gradient("normal", array.size, "float32", 10 * step + ranks.rank).reshape(array.shape)
                for name, array in like.items()
            }
            if not options.get("clip"):
                reducer.accumulate("c", put(mine["c"].copy()))
            for name, gradient in mine.items():
                reducer.push(name, put(gradient))
            elsewhere()
            reducer.wait()
            found.append(bits(mine))  # the sums, which are there when `wait` returns
            elsewhere()
            found.append({name: np.array(reducer.residual(name)).tobytes() for name in like})
            elsewhere()
            reducer.scale(0.5)
            elsewhere()
            state = reducer.state_dict()
            found += [bits(state["residuals"]), bits(state["velocities"])]
            if step == 1:
                elsewhere()
                reducer.clear()
                elsewhere()
                reducer.load_state_dict(state)
        return found

    return run(P, program)


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "bucket"},  # buckets are filled anew after the first step
        {"scope": "tensor", "dense_below": 10},
        {"scope": "model", "momentum": 0.9},
        {"scope": "bucket", "clip": 1.0, "decay": 0.9},
        {"scope": "tensor", "clip": 1.0, "momentum": 0.9},
        {"scope": "bucket", "skip_nonfinite": True, "momentum": 0.9},
    ],
    ids=str,
)
def test_every_gradient_on_a_stream_of_its_own(cuda: DeferredRuntime, options: dict[str, Any]) -> None:
    assert train(2, options, cuda) == train(2, options, None)


@pytest.mark.parametrize("end", ["dropped", "cleared"])
@pytest.mark.parametrize("order", range(4))
def test_memory_is_freed_when_all_work_with_it_is_done(cuda: DeferredRuntime, end: str, order: int) -> None:
    """It goes to the next array of the stream on which it was made; the gradient was added on another one."""
    n = 3000

    def program(ranks: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer({"a": cuda.put(np.zeros(n, np.float32))}, 0.05, comm=ranks, scope="tensor")
        assert np.array(reducer.residual("a")).sum() == 0  # it is there
        before = cuda.make_current(cuda.new_stream())
        gradient = cuda.put(np.full(n, 5, np.float32))
        if end == "dropped":
            reducer.accumulate("a", gradient)
        else:
            reducer.reduce({"a": gradient})
            reducer.scale(0.5)
        cuda.make_current(before)
        if end == "dropped":
            del reducer
        else:
            reducer.clear()
        gc.collect()
        others = [cuda.empty(n, np.float32) for _ in range(4)]
        for other in others:
            other[...] = 3
        cuda.synchronize()
        cuda.streams.run_all()
        assert all((other.get() == 3).all() for other in others)

    run(1, program)
