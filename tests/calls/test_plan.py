"""Plans: which calls share a plan, and when plans become invalid. Stored plans change no result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.calls import queue as module
from sparsecomm.calls.collectives import prepare
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import Handle, Plans, queue_of
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.ranks import nodes_of

Ranks = simulated.SimulatedTransport
X = np.arange(1, 13, dtype=np.float32)


def plan_of(transport: Ranks, x: Any = X, k: Any = 3, *, residual: Any = None, out: Any = None, **options: Any) -> Plan:
    """Return the plan of a call without making the call."""
    return prepare(x, k, transport, residual, out, options)[1].plan


@pytest.fixture
def rank() -> Ranks:
    return simulated.run(1, lambda transport: transport)[0].value


@pytest.mark.parametrize(
    "same",
    [
        {"x": np.full(12, np.nan, np.float32), "label": "a layer"},
        {"residual": np.zeros(12, np.float32), "decay": 0.5},
        {"out": np.zeros(12, np.float32)},
    ],
    ids=str,
)
def test_a_second_call_of_a_signature_finds_its_plan(rank: Ranks, same: dict[str, Any]) -> None:
    first = plan_of(rank, **{name: np.zeros(12, np.float32) for name in ("residual", "out") if name in same})
    assert plan_of(rank, **same) is first
    result = sc.sparse_allreduce(X, 3, comm=rank, **{n: v for n, v in same.items() if n != "x"})
    assert result.nnz == 3
    assert plan_of(rank, **same) is first, "also after a call"


OTHERS: dict[str, dict[str, Any]] = {
    "k": {"k": 4},
    "k as a density": {"k": 0.25},
    "dtype": {"x": X.astype(np.float64)},
    "size": {"x": X[:11]},
    "shape": {"x": X.reshape(3, 4)},
    "algorithm": {"algorithm": "tree"},
    "algorithm as itself": {"algorithm": sc.algorithms()["butterfly"]},
    "op": {"op": "mean"},
    "wire": {"wire": "packed"},
    "chunk": {"chunk": 4},
    "residual": {"residual": np.zeros(12, np.float32)},
    "out": {"out": np.zeros(12, np.float32)},
}


def test_each_signature_has_its_own_plan(rank: Ranks) -> None:
    base = {"algorithm": "butterfly", "op": "sum", "wire": "plain", "chunk": 5}
    calls = [base | other for other in ({}, *OTHERS.values())]
    plans = [plan_of(rank, **call) for call in calls]
    assert len(set(map(id, plans))) == len(plans)
    assert [plan_of(rank, **call) for call in calls] == plans, "each is kept"


def test_each_device_and_communicator_has_its_own_plan(cuda: DeferredRuntime, rank: Ranks) -> None:
    plans = plan_of(rank), plan_of(rank, cuda.put(X)), plan_of(simulated.run(1, lambda transport: transport)[0].value)
    assert len(set(map(id, plans))) == 3


# -- when plans end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("TIMEOUT", "7"), ("THREADS", "3"), ("SIMD", "portable")])
def test_a_changed_setting_invalidates_plans(
    rank: Ranks, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_of(rank)
    monkeypatch.setenv("SPARSECOMM_" + name, value)
    changed = plan_of(rank)
    assert plan_of(rank) is changed is not before
    assert changed.backend.threads == 3 or name != "THREADS"


def test_an_algorithm_registered_later_is_used(rank: Ranks) -> None:
    before, tree = plan_of(rank), sc.algorithms()["tree"]
    new = sc.Algorithm("new", "", "", "", "", tree.run, lambda problem, costs: -1.0, automatic=True)
    sc.register_algorithm(new)
    try:
        assert plan_of(rank).algorithm is new is not before.algorithm
    finally:
        del ALGORITHMS["new"]


def test_only_the_latest_plans_are_stored(rank: Ranks) -> None:
    limit, x = module._MAX_PLANS, np.ones(2000, np.float32)
    first, *others = [plan_of(rank, x, k=k) for k in range(1, limit + 50)]
    assert len(queue_of(rank).plans._plans) == limit
    assert plan_of(rank, x, k=1) is not first
    assert plan_of(rank, x, k=limit + 49) is others[-1]


# -- arguments --------------------------------------------------------------------------------------------------------


class Odd(str):
    """A str that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]


class OddNumber(int):
    def __hash__(self) -> int:
        raise RuntimeError("leave me alone")


@pytest.mark.parametrize(
    "odd",
    [
        {"k": [3]}, {"k": float("nan")}, {"k": True}, {"k": 3.0}, {"k": 13}, {"chunk": []}, {"algorithm": []},
        {"op": "summe"}, {"wire": set()}, {"decay": "1"}, {"decay": 0.5}, {"label": 0}, {"x": [1.0]},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_arguments_are_refused_despite_a_plan(rank: Ranks, odd: dict[str, Any]) -> None:
    plan = plan_of(rank)
    for _ in range(2):
        with pytest.raises(sc.InvalidInputError, match=f"rank 0: {next(iter(odd))}"):
            plan_of(rank, **odd)
    assert plan_of(rank) is plan


@pytest.mark.parametrize("odd", [{"k": OddNumber(3)}, {"op": Odd("sum")}], ids=str)
def test_unhashable_valid_arguments_are_used(rank: Ranks, odd: dict[str, Any]) -> None:
    assert plan_of(rank, **odd) is not plan_of(rank, **odd)
    result = sc.sparse_allreduce(X, comm=rank, **({"k": 3} | odd))
    assert data.same_bits(result.indices, sc.sparse_allreduce(X, 3, comm=rank).indices)


# -- stored plans change no result ------------------------------------------------------------------------------------


class Forgetful(Plans):
    """Finds no plan, so that each call makes a new one."""

    def find(self, key: Hashable) -> Plan | None:
        return None


signatures = st.fixed_dictionaries(
    {
        "shape": st.sampled_from([(12,), (3, 4), (40,)]),
        "dtype": st.sampled_from(["float32", "bfloat16", "float64"]),
        "k": st.sampled_from([1, 1.0, 5, 6, 0.25]),
        "algorithm": st.sampled_from(["auto", "butterfly", "split", "split:2", "tree", "dense", "hierarchical"]),
        "op": st.sampled_from(["sum", "mean"]),
        "wire": st.sampled_from(["auto", "packed", "packed_int8"]),
        "chunk": st.sampled_from([None, 7]),
        "residual": st.booleans(),
        "out": st.booleans(),
    }
)
circumstances = st.fixed_dictionaries(
    {
        "label": st.sampled_from(["", "a"]),
        "background": st.booleans(),
        # On one rank the call differs, or is interrupted at its first message: stored plans may change how many follow.
        "fault": st.sampled_from([None, None, None, "mismatch", "interrupt"]),
    }
)
sequences = st.lists(signatures, min_size=1, max_size=3).flatmap(
    lambda few: st.lists(st.builds(dict.__or__, st.sampled_from(few), circumstances), min_size=4, max_size=12)
)
sequences = st.one_of(sequences, sequences.map(lambda calls: [call | {"fault": None} for call in calls]))


def interrupt(*message: Any) -> Any:
    """Raise instead of sending a message."""
    raise KeyboardInterrupt


def attempt(make: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type and the text of its error."""
    try:
        return make()
    except (sc.SparseCommError, KeyboardInterrupt) as error:
        # The checksum of measured costs depends on the clock.
        return type(error), re.sub(r"checksum \w+", "checksum", str(error))


def train(plans: Callable[[], Plans], P: int, sequence: list[dict[str, Any]], blocking: bool = False) -> list[Any]:
    """Return for each rank and call the result or the error, the residual and out.

    Calls in the background are in flight together, unless some call fails. With ``blocking`` they are blocking calls.
    """
    together = all(call["fault"] is None for call in sequence)

    def program(transport: Ranks) -> list[Any]:
        queue_of(transport).plans = plans()
        steps = [step(transport, number, dict(call)) for number, call in enumerate(sequence)]
        for wait, *_ in reversed(steps):
            wait()
        return [(wait(), [None if a is None else a.tobytes() for a in arrays], last) for wait, arrays, last in steps]

    def step(transport: Ranks, number: int, call: dict[str, Any]) -> Any:
        shape, dtype, fault, background = (call.pop(name) for name in ("shape", "dtype", "fault", "background"))
        x = data.gradient("normal", math.prod(shape), dtype, 10 * number + transport.rank).reshape(shape)
        mine = transport.rank == transport.size - 1
        if dtype == "float64" or call["algorithm"] not in ("butterfly", "tree"):  # split remembers rounded values
            call["wire"] = call["wire"].removesuffix("_int8")
        targets = {name: np.ones_like(x) if call[name] else None for name in ("residual", "out")}
        call["chunk"] = None if call["k"] == 0.25 else call["chunk"]
        if fault == "mismatch" and mine:
            call["label"] = "another"
        if fault == "interrupt" and mine:
            transport.isend = interrupt  # type: ignore[method-assign]

        make = sc.isparse_allreduce if background and not blocking else sc.sparse_allreduce
        handle = attempt(partial(make, x, comm=transport, **call | targets))

        def outcome() -> Any:
            result = attempt(handle.wait) if isinstance(handle, Handle) else handle
            if isinstance(result, tuple):
                return result
            return result.shape, result.indices.tobytes(), result.values.tobytes()

        if not together:
            outcome()
        vars(transport).pop("isend", None)
        return outcome, [*targets.values(), x], None if together else sc.last_call(transport)

    return [result.value for result in simulated.run(P, program, node_of_rank=nodes_of(P))]


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_stored_plans_and_calls_in_the_background_give_the_same_results(P: int) -> None:
    seen = set()

    @settings(max_examples=40)
    @given(sequences)
    def check(sequence: list[dict[str, Any]]) -> None:
        kept, fresh = train(Plans, P, sequence), train(Forgetful, P, sequence, blocking=True)
        assert kept == fresh
        seen.update(outcome[0] if isinstance(outcome[0], type) else None for (outcome, *_) in kept[-1])

    check()
    assert seen >= ({None} if P == 1 else {None, KeyboardInterrupt, sc.CollectiveMismatchError})
