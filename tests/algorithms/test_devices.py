"""Gradients on a CUDA device on some or all ranks give the same bits as on the CPU: results, residuals and ``out``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.test_orderings import VIA, calls
from tests.ranks import run

WHERE: dict[str, Callable[[int], bool]] = {
    "all on CUDA": lambda rank: True,
    "even ranks on CUDA": lambda rank: rank % 2 == 0,
    "rank 1 on CUDA": lambda rank: rank == 1,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", sc.algorithms())
@pytest.mark.parametrize("P", [1, 2, 3, 6])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("dtype", "op", "wire", "chunk"),
    [
        ("float32", "mean", "plain", None),
        ("float32", "sum", "packed_int8", None),
        ("bfloat16", "sum", "packed_bfloat16", 97),
        ("float16", "sum", "packed_float16", None),
        ("float64", "mean", "packed", 200),
        ("float32", "mean_of_contributors", "packed_int2", 200),
    ],
)
def test_promise_4_the_same_bits_on_every_device(
    cuda: DeferredRuntime, algorithm: str, P: int, where: str, dtype: str, op: str, wire: str, chunk: int | None
) -> None:
    if sc.algorithms()[algorithm].cannot_count_contributors:
        op = op.removesuffix("_of_contributors")
    options: dict[str, Any] = {"algorithm": algorithm, "op": op, "wire": wire}
    if chunk and sc.algorithms()[algorithm].by_chunk:
        options |= {"chunk": chunk, "decay": 1.0 if algorithm == "dense" else 0.9}
    via = VIA[cuda.seed % len(VIA)]
    on_devices = calls(cuda, P, dtype, WHERE[where], via, steps=2, **options)
    assert cuda.launches or P == 1
    on_cpu = calls(None, P, dtype, via=via, steps=2, **options)
    for result, expected in zip(on_devices, on_cpu, strict=True):
        assert all(data.same_bits(a, b) for a, b in zip(result, expected, strict=True))


def test_promise_5_device_memory_that_runs_out_on_one_rank(
    cuda: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = cuda.empty

    def limited(count: int, dtype: Any) -> np.ndarray:
        if count == 50:  # the selected entries
            raise MemoryError("no room")
        return empty(count, dtype)

    def program(transport: simulated.SimulatedTransport) -> np.ndarray:
        x, residual = np.arange(500, dtype=np.float32), np.ones(500, np.float32)
        put = cuda.put if transport.rank == 1 else lambda array: array
        with pytest.raises((MemoryError, sc.TransportError), match="no room"):
            sc.sparse_allreduce(put(x), 50, comm=transport, residual=put(residual))
        cuda.synchronize()
        return residual - x

    monkeypatch.setattr(cuda, "empty", limited)
    for rest in run(3, program):
        np.testing.assert_array_equal(rest, np.ones(500))
