"""Tensors take part in a step if any rank has a gradient. The others do not change, and all ranks know which."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.ranks import run


def test_a_complete_step_sends_nothing_more_and_each_incomplete_call_one_small_message() -> None:
    """There are more tensors than bits in a word."""
    tensors = {f"{i}": np.ones(3, np.float32) for i in range(70)} | {"large": np.ones(500, np.float32)}

    def program(transport: simulated.SimulatedTransport) -> None:
        reducer, sent = sc.Reducer(tensors, 0.1, comm=transport, dense_below=10, algorithm="butterfly"), []
        for absent in ((), ("3", "69"), ("3", "69", "large")):
            before = copy(reducer.counters)
            mine = {name: None if name in absent[transport.rank :] else a.copy() for name, a in tensors.items()}
            assert reducer.reduce(mine).without_gradient == set(absent[1:])
            added = reducer.counters.since(before)
            sent.append((added["sparsecomm/messages_sent"], added["sparsecomm/bytes_sent"]))
        (messages, nbytes), *others = sent
        assert [number for number, _ in others] == [messages + 1, messages + 2]
        assert all(more - nbytes < 200 * (number - messages) for number, more in others)

    run(2, program)


@pytest.mark.covering(2)
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("op", ["sum", "mean", "mean_of_contributors"])
@pytest.mark.parametrize("dtype", list(data.DTYPES))
@pytest.mark.parametrize("algorithm", [*sc.algorithms(), "auto"])
def test_a_rank_without_a_gradient_gets_what_the_outputs_of_other_ranks_hold(
    algorithm: str, dtype: str, op: str, scope: str, narrow: bool
) -> None:
    """Equal bit for bit, even if 16-bit outputs round to zero or infinity."""
    if op == "mean_of_contributors" and algorithm != "auto" and sc.algorithms()[algorithm].cannot_count_contributors:
        pytest.skip("the library refuses it")
    out_dtype = data.DTYPES[dtype] if narrow or dtype == "float64" else np.float32
    extremes = np.array([-1e-9, 1e-9, 6.5e4, -6.5e4, 3.38e38, -(2.0**-133)])

    def program(transport: simulated.SimulatedTransport) -> list[bytes]:
        mine = {}
        for name, n in {"x": 300, "y": 7}.items():
            mine[name] = data.gradient("normal", n, dtype, transport.rank)
            with np.errstate(over="ignore"):
                mine[name][: len(extremes)] = extremes.astype(data.DTYPES[dtype])
        reducer, outputs = sc.Reducer(mine, 1.0, comm=transport, algorithm=algorithm, op=op, scope=scope), []
        for step in range(2):
            outs = {name: np.full(array.shape, 7, out_dtype) for name, array in mine.items()}
            absent = {"y"} if transport.rank == step else {"x", "y"} if transport.rank == 2 else set()
            for name, gradient in mine.items():
                reducer.push(name, *((None,) if name in absent else (gradient, outs[name])))
            left = reducer.wait().sums_without_out
            assert left.keys() == absent
            for name in absent:
                dense = left[name].to_dense()
                with np.errstate(over="ignore"):
                    assert dense.astype(out_dtype).astype(dense.dtype).tobytes() == dense.tobytes()
                left[name].to_dense(outs[name])
                assert left[name].nnz == np.count_nonzero(dense)
            outputs += [out.tobytes() for out in outs.values()]
        return outputs

    first, *others = run(3, program)
    assert all(outputs == first for outputs in others)
