"""Plans: which calls share one, when plans become invalid, and that stored plans change no result."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from pathlib import Path
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
from sparsecomm.calls.queue import Plans, queue_of
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.ranks import nodes_of

Ranks = simulated.SimulatedTransport
SIGNATURE = {"k": 3, "algorithm": "auto", "op": "sum", "residual": None, "out": None, "wire": "auto", "chunk": None}
X = np.arange(1, 13, dtype=np.float32)


def plan_of(transport: Ranks, x: Any = X, *, decay: Any = 1.0, label: Any = "", **changes: Any) -> Plan:
    """Return the plan of a call that is not made."""
    return prepare(x, comm=transport, decay=decay, label=label, background=False, **(SIGNATURE | changes))[1].plan


@pytest.fixture
def rank() -> Ranks:
    return simulated.run(1, lambda transport: transport)[0].value


@pytest.mark.parametrize(
    "same",
    [
        {"x": np.full(12, np.nan, np.float32)},
        {"x": np.frombuffer(X.tobytes(), np.float32)},
        {"label": "a layer"},
        {"residual": np.zeros(12, np.float32), "decay": 0.5},
        {"residual": np.zeros(12, np.float32)},
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
    "k as another int": {"k": np.int64(3)},
    "dtype": {"x": X.astype(np.float64)},
    "half": {"x": X.astype(np.float16)},
    "size": {"x": X[:11]},
    "shape": {"x": X.reshape(3, 4)},
    "algorithm": {"algorithm": "tree"},
    "algorithm as itself": {"algorithm": sc.algorithms()["butterfly"]},
    "op": {"op": "mean"},
    "wire": {"wire": "packed"},
    "chunk": {"chunk": 4},
    "chunk as another int": {"chunk": np.int64(4)},
    "residual": {"residual": np.zeros(12, np.float32)},
    "out": {"out": np.zeros(12, np.float32)},
}


def test_each_signature_has_its_own_plan(rank: Ranks) -> None:
    plans = [plan_of(rank), *(plan_of(rank, **other) for other in OTHERS.values())]
    assert len(set(map(id, plans))) == len(plans)
    assert [plan_of(rank), *(plan_of(rank, **other) for other in OTHERS.values())] == plans, "each is kept"


def test_each_device_and_communicator_has_its_own_plan(cuda: DeferredRuntime, rank: Ranks) -> None:
    plans = plan_of(rank), plan_of(rank, cuda.put(X)), plan_of(simulated.run(1, lambda transport: transport)[0].value)
    assert len(set(map(id, plans))) == 3


# -- when plans end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("TIMEOUT", "7"), ("THREADS", "3"), ("PROFILE", "mine.json"), ("SIMD", "portable")]
)
def test_a_changed_setting_invalidates_plans(
    rank: Ranks, name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARSECOMM_" + name, raising=False)
    before = plan_of(rank)
    monkeypatch.setenv("SPARSECOMM_" + name, value)
    with pytest.warns(RuntimeWarning, match="No such file") if name == "PROFILE" else nullcontext():
        changed = plan_of(rank)
    assert changed is not before
    assert plan_of(rank) is changed
    if name == "THREADS":
        assert changed.backend.threads == 3
    monkeypatch.delenv("SPARSECOMM_" + name)
    assert plan_of(rank) not in (before, changed)


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


# -- what is refused --------------------------------------------------------------------------------------------------


class Odd(str):
    """A str that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]


class OddNumber(int):
    def __hash__(self) -> int:
        raise RuntimeError("leave me alone")


@pytest.mark.parametrize(
    "odd",
    [
        {"k": [3]}, {"k": np.array([3])}, {"k": {}}, {"k": float("nan")}, {"k": "3"}, {"k": 13}, {"chunk": []},
        {"algorithm": []}, {"algorithm": np.array(["auto"])}, {"op": {}}, {"op": "summe"}, {"wire": set()},
        {"decay": "1"}, {"label": 0}, {"x": [1.0]}, {"decay": 0.5}, {"k": True}, {"k": 3.0},
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


# -- and nobody sees a difference -------------------------------------------------------------------------------------


class Forgetful(Plans):
    """Finds no plan, so that each call makes a new one."""

    def find(self, key: Hashable) -> Plan | None:
        return None


signatures = st.fixed_dictionaries(
    {
        "n": st.sampled_from([12, 40]),
        "dtype": st.sampled_from(["float32", "bfloat16", "float64"]),
        "k": st.sampled_from([1, 1.0, 5, 0.25]),
        "algorithm": st.sampled_from(["auto", "butterfly", "split", "split:2", "tree", "dense", "hierarchical"]),
        "op": st.sampled_from(["sum", "mean"]),
        "wire": st.sampled_from(["auto", "packed"]),
        "chunk": st.sampled_from([None, 7]),
        "residual": st.booleans(),
        "out": st.booleans(),
    }
)
circumstances = st.fixed_dictionaries(
    {
        "label": st.sampled_from(["", "a"]),
        "background": st.booleans(),
        # The call differs on one rank, or one is interrupted where it sends its first message. How many follow, a kept
        # plan may change.
        "fault": st.sampled_from([None, None, None, "mismatch", 0]),
    }
)
sequences = st.lists(signatures, min_size=1, max_size=3).flatmap(
    lambda few: st.lists(st.builds(dict.__or__, st.sampled_from(few), circumstances), min_size=4, max_size=12)
)


def interrupt(*message: Any) -> Any:
    """Raise instead of sending a message."""
    raise KeyboardInterrupt


def train(plans: Callable[[], Plans], P: int, sequence: list[dict[str, Any]]) -> list[Any]:
    """Return for each rank and call the result or the error, the residual and out."""

    def program(transport: Ranks) -> list[Any]:
        queue_of(transport).plans = plans()
        return [step(transport, number, dict(call)) for number, call in enumerate(sequence)]

    def step(transport: Ranks, number: int, call: dict[str, Any]) -> Any:
        n, dtype, fault, background = (call.pop(name) for name in ("n", "dtype", "fault", "background"))
        x, mine = data.gradient("normal", n, dtype, 10 * number + transport.rank), transport.rank == transport.size - 1
        given = {name: np.ones_like(x) if call[name] else None for name in ("residual", "out")}
        call["chunk"] = None if call["k"] == 0.25 else call["chunk"]
        if fault == "mismatch" and mine:
            call["label"] = "another"
        if fault == 0 and mine:
            transport.isend = interrupt  # type: ignore[method-assign]
        outcome: Any
        try:
            made = (sc.isparse_allreduce if background else sc.sparse_allreduce)(x, comm=transport, **call | given)
            result = made.wait() if background else made
            outcome = result.indices.tobytes(), result.values.tobytes()
        except (sc.SparseCommError, KeyboardInterrupt) as error:
            # Links are measured by the clock, and when a call begins depends on the messages of those before.
            outcome = type(error), re.sub(r"checksum \w+", "checksum", str(error))
        finally:
            vars(transport).pop("isend", None)
        last = sc.last_call(transport)
        return outcome, [None if a is None else a.tobytes() for a in given.values()], last, x.tobytes()

    return [result.value for result in simulated.run(P, program, node_of_rank=nodes_of(P))]


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_stored_and_new_plans_give_the_same_results(P: int) -> None:
    seen = set()

    @settings(max_examples=40)
    @given(sequences)
    def check(sequence: list[dict[str, Any]]) -> None:
        kept, fresh = train(Plans, P, sequence), train(Forgetful, P, sequence)
        assert kept == fresh
        seen.update(outcome[0] if isinstance(outcome[0], type) else None for (outcome, *_) in kept[-1])

    check()
    assert seen >= ({None} if P == 1 else {None, KeyboardInterrupt, sc.CollectiveMismatchError})
