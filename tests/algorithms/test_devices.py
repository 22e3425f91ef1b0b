"""Gradients on a CUDA device, on some ranks or all: the same bits as on the CPU, in results, residuals and ``out``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.transport import CarelessTransport
from tests.ranks import run

WHERE: dict[str, Callable[[int], bool]] = {
    "all on CUDA": lambda rank: True,
    "even ranks on CUDA": lambda rank: rank % 2 == 0,
    "rank 1 on CUDA": lambda rank: rank == 1,
}
VIA: list[dict[str, Any]] = [  # how messages travel
    {},
    {"limit": 96},
    {"device_memory": True},
    {"device_memory": True, "limit": 96},
]
STEPS = 2


@dataclass
class Outcome:
    entries: list[tuple[np.ndarray, np.ndarray]]  # of every step
    residual: np.ndarray
    out: np.ndarray


def train(
    cuda: DeferredRuntime, P: int, dtype: str, on_cuda: Callable[[int], bool], via: dict[str, Any], **options: Any
) -> list[Outcome]:
    """Some steps with a residual on every rank, each of which has a stream of its own."""

    def program(transport: CarelessTransport) -> Outcome:
        with cuda.on_stream(cuda.new_stream()):
            return steps(transport)

    def steps(transport: CarelessTransport) -> Outcome:
        put = cuda.put if on_cuda(transport.rank) else lambda array: array
        residual_dtype = "float32" if dtype == "bfloat16" else dtype
        residual = np.zeros((20, 35), data.DTYPES[residual_dtype])
        out, entries = np.empty_like(residual), []
        targets = {"residual": put(residual), "out": put(out)}
        for step in range(STEPS):
            x = data.gradient("normal", 700, dtype, seed=10 * transport.rank + step).reshape(20, 35)
            given = cuda.library.asarray(x) if on_cuda(transport.rank) else x
            result = sc.sparse_allreduce(given, 33, comm=transport, **targets, **options)
            del given  # its memory is reused at once
            assert result.shape == (20, 35)
            entries.append((np.array(result.indices), np.array(result.values)))
        cuda.synchronize()
        return Outcome(entries, residual, out)

    wrapped = CarelessTransport.wrapping(program, seed=P, **via)
    return run(P, wrapped, [rank // 2 for rank in range(P)])


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
    via = VIA[cuda.seed % len(VIA)]
    if chunk and sc.algorithms()[algorithm].by_chunk:
        options |= {"chunk": chunk, "decay": 1.0 if algorithm == "dense" else 0.9}
    found = train(cuda, P, dtype, WHERE[where], via, **options)
    assert cuda.launches or P == 1
    on_cpu = train(cuda, P, dtype, lambda rank: False, via, **options)
    for ours, theirs in zip(found, on_cpu, strict=True):
        for (indices, values), (other_indices, other_values) in zip(ours.entries, theirs.entries, strict=True):
            np.testing.assert_array_equal(indices, other_indices)
            assert data.same_bits(values, other_values)
        assert data.same_bits(ours.residual, theirs.residual)
        assert data.same_bits(ours.out, theirs.out)


@pytest.mark.parametrize("algorithm", sc.algorithms())
def test_promise_5_a_failed_call_leaves_the_gradient_in_the_residual(cuda: DeferredRuntime, algorithm: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> np.ndarray:
        x, residual = np.arange(500, dtype=np.float32), np.ones(500, np.float32)
        with pytest.raises(sc.CollectiveMismatchError):
            sc.sparse_allreduce(
                cuda.put(x), 5 + transport.rank, comm=transport, residual=cuda.put(residual), algorithm=algorithm
            )
        cuda.synchronize()
        return residual - x

    for kept in run(2, program):
        np.testing.assert_array_equal(kept, np.ones(500))


def test_promise_5_device_memory_that_runs_out_on_one_rank(
    cuda: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = cuda.empty

    def limited(count: int, dtype: Any) -> np.ndarray:
        if count == 50:  # what is selected
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
    for kept in run(3, program):
        np.testing.assert_array_equal(kept, np.ones(500))
