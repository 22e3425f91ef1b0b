"""Tensors take part in a step if any rank has a gradient. The others do not change, and all ranks know which."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.calls.collectives import SumCall
from sparsecomm.calls.options import SumSettings
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import queue_of
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Link
from sparsecomm.reducer import node_call
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.interop import CPU, tensor
from sparsecomm.transport import simulated
from sparsecomm.tuning.profile import KnownCosts, measured
from tests import data
from tests.ranks import nodes_of, run
from tests.reducer.programs import SHAPES, Arrays, gradients, reducer_of, residuals, same, total

ALGORITHMS = [*sc.algorithms(), "hierarchical:split", "split:2"]
SENT = {name for name, shape in SHAPES.items() if np.prod(shape)}


# -- the bit in the header --------------------------------------------------------------------------------------------


class OddCall(SumCall):
    """A call with an incomplete contribution from one rank, or from none."""

    incomplete = False

    def _begin(self) -> None:
        self.plan.comm.begin(self.label.checksum, incomplete=self.incomplete)


@pytest.mark.covering(1)
@pytest.mark.parametrize("P", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_learn_that_one_contribution_is_incomplete(P: int, algorithm: str) -> None:
    """This holds for every rank, number of nodes and owners, and for algorithms that send directly or forward."""
    far, n = measured(Link(1e-6, 1e-9, 1e-4), Link(1e-6, 1e-9, 1e-4)), 600

    def program(transport: simulated.SimulatedTransport, k: int, costs: KnownCosts | None) -> None:
        queue = queue_of(transport)
        backend = queue.backends.of(CPU)
        settings = SumSettings(algorithm=algorithm, wire="packed")
        plan = Plan(transport, backend, settings, dtype=FLOAT32, shape=(n,), size=n, k=k, costs=costs)
        for odd in (None, *range(P)):
            x = data.integers(n, "float32", transport.rank) * (transport.rank != 1)  # rank 1 has no entries
            call = OddCall(plan, Contribution(backend, tensor(x, "x"), None, (n,), n))
            call.incomplete = transport.rank == odd
            queue.call(call)
            assert plan.comm.incomplete == (odd is not None), odd

    for k, costs, nodes in ((1, None, range(P)), (40, far, nodes_of(P)), (300, None, nodes_of(P)), (300, far, [0] * P)):
        simulated.run(P, lambda transport, k=k, costs=costs: program(transport, k, costs), node_of_rank=nodes)


def lacking(reducer: sc.Reducer, mine: Arrays, absent: str) -> sc.Step:
    """Make a step in which this rank lacks the gradients of ``names``."""
    return reducer.reduce({name: None if name in absent else gradient for name, gradient in mine.items()})


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_that_is_not_finite_changes_nothing_of_what_has_no_gradient(P: int, scope: str, momentum: float) -> None:
    """All ranks notice, wherever the tensor is in its bucket. Velocities of finite gradients continue."""

    def program(transport: simulated.SimulatedTransport) -> None:
        options = {"scope": scope, "momentum": momentum, "skip_nonfinite": True, "algorithm": "split"}
        options["masking"] = scope == "model"
        reducer = reducer_of(transport, **options)
        reducer.reduce(gradients(transport.rank))
        before, mine = reducer.state_dict(), gradients(10 + transport.rank)
        absent = "fea" if transport.rank == 0 else "fe"
        velocities = {name: momentum * before["velocities"].get(name, 0) + mine[name] for name in SHAPES}
        entered = {name: velocities[name] * (name not in absent) for name in SHAPES}
        if transport.rank == P - 1:
            mine["c"][100] = np.inf
            entered["c"][:] = 0
        step = lacking(reducer, mine, absent)
        assert not step.usable
        assert step.without_gradient == set("fe" if P > 1 else "fea")
        assert np.isnan(mine["c"]).any()
        same(residuals(reducer), total([before["residuals"], entered]))
        if momentum:
            dropped = absent + "c" * (transport.rank == P - 1)
            unchanged = {name: before["velocities"][name] for name in dropped}
            same(reducer.state_dict()["velocities"], velocities | unchanged)

    run(P, program)


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_that_fails_changes_nothing_without_a_gradient(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails on one rank while the other waits for the names that it lacks."""
    gathered = node_call.gather_words

    def fails(comm: Communicator, words: list[int], round_no: int) -> list[list[int]]:
        if comm.rank == 1 and comm.num_elements == 500:
            raise comm.broken(0, "nothing that fits")
        return gathered(comm, words, round_no)

    def program(transport: simulated.SimulatedTransport) -> Any:
        reducer = reducer_of(transport, scope="tensor", algorithm="split", skip_nonfinite=whole)
        reducer.reduce(gradients(transport.rank))
        before, mine, absent = residuals(reducer), gradients(10 + transport.rank), "ca" if transport.rank == 0 else "a"
        given_ = {name: gradient * (name not in absent) for name, gradient in mine.items()}
        with pytest.raises(sc.CollectiveMismatchError, match=r"that fits|left call"):
            lacking(reducer, mine, absent)
        after, lost = residuals(reducer), SENT if whole else {"c"}
        assert set(reducer.unsummed) == lost
        same({name: after[name] for name in lost | {"a"}}, {name: before[name] + given_[name] for name in lost | {"a"}})
        sums = gradients(20 + transport.rank)
        assert reducer.reduce(sums).without_gradient == set()
        return after, sums, residuals(reducer)

    with monkeypatch.context() as patch:
        patch.setattr(node_call, "gather_words", fails)
        results = run(2, program)
    same(results[0][1], results[1][1])
    pushed = total(gradients(20 + rank) for rank in range(2))
    same(total([results[0][1], *(r[2] for r in results)]), total([pushed, *(r[0] for r in results)]))


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
