"""Failures on one rank during a step with nodes: nothing is lost, no rank hangs, and the next step works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from greenlet import getcurrent

import sparsecomm as sc
from sparsecomm.backends import Backends, CpuBackend
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.reducer.node_call import NodeCall
from sparsecomm.tensors.interop import CPU
from sparsecomm.transport import simulated
from sparsecomm.transport.simulated import SimulatedTransport
from tests.reducer.programs import Arrays, bits, gradients, same, total

SHAPES = {"a": (6, 9), "b": (5,), "c": (41,)}
NODES = [0, 0, 1, 1]
ABSENT = {(1, 0): "a", (1, 1): "a", (1, 3): "c", (2, 2): "b"}  # names by step and rank
ALLOCATIONS = "zeros", "empty"
PLACES = {  # methods that may fail
    SimulatedTransport: ("begin", "isend", "receive", "exchange_all"),
    CpuBackend: (
        *("take_topk", "topk_by_chunk", *ALLOCATIONS, "add_first", "accumulate", "add", "nonzeros", "merge", "write"),
        *("sum_and_count", "concatenate_entries", "well_formed", "clear", "largest", "scatter_add", "divide"),
    ),
    Bucket: ("gradients", "set_aside"),
    NodeCall: ("sum", "_sums", "gather", "_concatenate"),
}


class PlannedError(MemoryError):
    pass


class Failure:
    """Makes call number ``at`` of `PLACES` fail on one rank, and with ``memory`` also all later allocations."""

    def __init__(self, at: int, memory: bool = False) -> None:
        self.at, self.memory, self.where, self._passed, self._rank = at, memory, "", 0, None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._rank: Any = getcurrent()
        try:
            yield
        finally:
            self._rank = None

    def __call__(self, cls: type, name: str) -> Callable[..., Any]:
        method = getattr(cls, name)

        def planned(*arguments: Any, **options: Any) -> Any:
            if getcurrent() is self._rank:
                self._passed += 1
                if self._passed == self.at + 1 or (self.where and self.memory and name in ALLOCATIONS):
                    self.where = self.where or f"{cls.__name__}.{name}"
                    raise PlannedError(f"in {name}")
            return method(*arguments, **options)

        return planned


def votes(transport: SimulatedTransport, failure: Failure) -> None:
    """Vote like a transport that survives dead ranks: a call is applied on all ranks or on none."""
    others, vote = [rank for rank in range(transport.size) if rank != transport.rank], np.zeros(1, np.uint8)
    mine = failure._rank is getcurrent()
    failure._rank = None if mine else failure._rank
    memory = Backends().of(CPU).memory(direct=False)
    [*transport.exchange_all([(rank, vote) for rank in others], others, memory, 64)]
    failure._rank = getcurrent() if mine else failure._rank


def whole(state: Any) -> Arrays:
    """Return a rank's residuals plus unsummed gradients, in the shapes of the tensors."""
    sums = {}
    for name, shape in SHAPES.items():
        flat, residual = np.zeros(shape).reshape(-1), state["residuals"][name].reshape(-1)
        begin, end = (0, flat.size) if state["slices"] is None else state["slices"][name]["part"]
        flat[begin:end] = residual
        sums[name] = flat.reshape(shape) + (state["unsummed"][name][0] if name in state["unsummed"] else 0)
    return sums


def steps(options: dict[str, Any], victim: int, failure: Failure) -> list[Any]:
    """Make three steps; the second one fails. Return each rank's errors, gradients, sums and residuals."""

    def program(transport: SimulatedTransport) -> Any:
        settings = {"op": "sum", "bucket_bytes": 100, "dense_below": 10} | options
        reducer = sc.Reducer(gradients(0, SHAPES), 0.2, comm=transport, **settings)
        pushed, applied, raised = [], [], []
        for step in range(3):
            mine = gradients(10 * step + transport.rank, SHAPES)
            outs = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            mine.pop(ABSENT.get((step, transport.rank), ""), None)
            with failure.on() if step == 1 and transport.rank == victim else contextlib.nullcontext():
                for name, out in outs.items():
                    while not reducer.pushed(name):
                        with contextlib.suppress(PlannedError):
                            reducer.push(name, mine.get(name), out=out)
                try:
                    reducer.wait()
                except (sc.SparseCommError, PlannedError) as error:
                    raised.append((step, error))
            if reducer.step == step:  # out of memory at the end of the step, too
                with contextlib.suppress(sc.SparseCommError, PlannedError):
                    reducer.wait()
            assert reducer.step == step + 1
            applied.append({name: out * (name not in reducer.unsummed) for name, out in outs.items()})
            pushed.append({name: mine.get(name, np.zeros(shape)) for name, shape in SHAPES.items()})
        return raised, pushed, applied, whole(reducer.state_dict())

    with pytest.MonkeyPatch.context() as patch:
        for cls, names in PLACES.items():
            for name in names:
                patch.setattr(cls, name, failure(cls, name))
        patch.setattr(SimulatedTransport, "conclude", lambda transport: votes(transport, failure))
        return [result.value for result in simulated.run(4, program, node_of_rank=NODES)]


@pytest.mark.parametrize("memory", [False, True], ids=["once", "memory"])
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "split"},
        {"algorithm": "split", "skip_nonfinite": True},
        {"algorithm": "double", "wire": "packed", "scope": "model", "dense_below": 0},
        {"scope": "chunk", "chunk": 10, "algorithm": "allgather"},
        {"algorithm": "dense", "skip_nonfinite": True},
    ],
    ids=str,
)
def test_a_failure_anywhere_loses_nothing(options: dict[str, Any], memory: bool) -> None:
    at, failed_on_all = 0, 0
    while True:
        failure, victim = Failure(at, memory), at // 5 % 4
        results = steps(options, victim, failure)
        if not failure.where:
            break
        raised, pushed, applied, waiting = zip(*results, strict=True)
        assert all(step == 1 for errors in raised for step, _ in errors), failure.where
        same(total([*waiting, *applied[victim - 1]]), total(gradient for gradients in pushed for gradient in gradients))
        seen = {str([bits(outs) for outs in outputs]) for outputs in applied}
        assert len(seen) == 1 or (memory and len(seen) == 2), failure.where  # no memory to write its results
        failed_on_all += all(raised)
        at += 5
    assert failed_on_all > 5


@pytest.mark.parametrize("algorithm", ["split", "allgather", "double"])
def test_a_mean_may_be_too_small_for_the_dtype(algorithm: str) -> None:
    """One rank has the smallest float32, which becomes zero when divided by 4."""

    def program(transport: SimulatedTransport) -> None:
        x, tiny = np.zeros(64, np.float32), np.float32(1e-45)
        reducer = sc.Reducer({"x": x}, 0.1, comm=transport, dense_below=0, algorithm=algorithm, wire="plain")
        for step in range(2):
            x[:2] = tiny * (transport.rank == step), 4
            reducer.reduce({"x": x})
            assert x.tolist() == [0, 4] + [0] * 62

    simulated.run(4, program, node_of_rank=NODES)


def test_a_step_that_is_abandoned_makes_each_call_with_its_gradients() -> None:
    """If all tensors were pushed, `rebuild` ends the step like `wait`, and momentum counts it once."""

    def program(transport: SimulatedTransport, abandons: bool) -> Any:
        reducer = sc.Reducer(gradients(0, SHAPES), 0.2, comm=transport, momentum=0.5, algorithm="split")
        for step in range(2):
            for name, gradient in gradients(10 * step + transport.rank, SHAPES).items():
                reducer.push(name, gradient)
            if step and abandons:
                reducer.rebuild(transport)
            else:
                reducer.wait()
        state = reducer.state_dict()
        return state["step"], bits(state["residuals"]), bits(state["velocities"]), state["unsummed"]

    results = [simulated.run(4, lambda t, a=a: program(t, a), node_of_rank=NODES) for a in (False, True)]
    assert [result.value for result in results[0]] == [result.value for result in results[1]]
