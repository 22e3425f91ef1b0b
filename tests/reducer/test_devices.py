"""A `Reducer` of tensors on a CUDA device gives the same bits as on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.reducer.programs import SHAPES, bits, run

DTYPES = dict.fromkeys(SHAPES, "float32") | {"c": "float16", "f": "float64"}
STEPS = 4


def train(P: int, cuda: DeferredRuntime | None, options: dict[str, Any]) -> list[Any]:
    """Some steps, on the device if there is one, each rank on a stream of its own."""

    def program(ranks: simulated.SimulatedTransport) -> Any:
        with cuda.on_stream(cuda.new_stream()) if cuda else nullcontext():
            return steps(ranks)

    def steps(ranks: simulated.SimulatedTransport) -> Any:
        put, wait = (cuda.put, cuda.synchronize) if cuda else (lambda array: array, lambda: None)

        def made() -> sc.Reducer:
            like = {name: put(np.zeros(shape, DTYPES[name])) for name, shape in SHAPES.items()}
            return sc.Reducer(like, 0.05, comm=ranks, bucket_bytes=1500, dense_below=10, **options)

        reducer, found = made(), []
        for step in range(STEPS):
            mine = {
                name: data.gradient("normal", int(np.prod(shape)), DTYPES[name], 10 * step + ranks.rank).reshape(shape)
                for name, shape in SHAPES.items()
            }
            if step == 1 and ranks.rank == 0 and options.get("skip_nonfinite"):
                mine["a"][3, 3] = np.nan
            if step == 2 and not options.get("clip"):
                reducer.accumulate("c", put(mine["c"].copy()))
            pushed = dict(mine)
            if step == 3:  # not pushed here
                del pushed["f"]
            for name, gradient in pushed.items():
                reducer.push(name, put(gradient))
            done = reducer.wait()
            wait()
            left = {name: (np.array(part.indices), np.array(part.values)) for name, part in done.left.items()}
            found.append((done.usable, bits(pushed), {name: bits(dict(enumerate(p))) for name, p in left.items()}))
            if step == 2:
                state = reducer.state_dict()
                assert all(type(a) is np.ndarray for a in state["residuals"].values())
                reducer = made()
                reducer.load_state_dict(state)
                reducer.scale(0.5)
        state = reducer.state_dict()
        return found, bits(state["residuals"]), bits(state["velocities"])

    return run(P, program)


@pytest.mark.covering(1)
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("scope", ["tensor", "bucket", "model", "chunk"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": "sum", "skip_nonfinite": True, "algorithm": "split"},
        {"momentum": 0.9, "skip_nonfinite": True},
        {"momentum": 0.9, "nesterov": True, "masking": False, "algorithm": "allgather"},
        {"clip": 5.0, "skip_nonfinite": True, "op": "mean_of_contributors"},
        {"algorithm": "dense", "skip_nonfinite": True},
        {"decay": 0.9, "chunk": 50},
    ],
)
def test_the_same_bits_on_every_device(cuda: DeferredRuntime, P: int, scope: str, options: dict[str, Any]) -> None:
    options = options | {"scope": scope}
    found = train(P, cuda, options)
    assert cuda.launches
    assert found == train(P, None, options)
