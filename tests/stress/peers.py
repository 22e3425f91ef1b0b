"""Damaged messages in whole calls, of every algorithm and wire format.

One message of one rank is replaced with damaged bytes, or with a correct message of other entries or numbers. Each rank
must raise `CollectiveMismatchError`, or `TransportError` if it waits in vain, or return a well-formed sparse vector.
After `realign`, the next call must give the oracle's result on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.algorithms import find, inner_algorithms
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.testing import expected_sum
from sparsecomm.transport.simulated import SimulatedTransport, run
from sparsecomm.wire import EXACT, HEADER_BYTES, MEAN_OF_CONTRIBUTORS, WIRES, Messages, Wire
from sparsecomm.wire.header import CALL_BYTES
from tests.stress.harness import Numbered, numbered
from tests.stress.mutations import NUMBERS, damaged

BACKEND = CpuBackend(1)
DAMAGES = ("bytes", "payload", "vectors", "vectors", "words")
REFUSALS = sc.CollectiveMismatchError, sc.TransportError


class Case:
    """A call on P ranks after ``calls`` others, in which message ``which`` of rank ``victim`` is damaged."""

    def __init__(self, seed: int, number: int) -> None:
        rng = self.rng = np.random.default_rng([seed, number])
        algorithms = [*sc.algorithms(), "split:2", *(f"hierarchical:{inner}" for inner in inner_algorithms())]
        self.algorithm = algorithms[number % len(algorithms)]
        wires = list(WIRES)
        self.wire = wires[number // len(algorithms) % len(wires)]
        self.P = int(rng.integers(2, 6))
        self.n = int(rng.choice([40, 300, 1000, 4000]))
        self.k = max(1, int(self.n * rng.choice([0.02, 0.1, 0.3])))
        algorithm = find(self.algorithm)
        exact = WIRES[self.wire].kind is EXACT
        counts = exact and algorithm and not algorithm.cannot_count_contributors
        ops = ["sum", "mean", *([MEAN_OF_CONTRIBUTORS] if counts else [])]
        self.op = str(rng.choice(ops))
        self.dtype = str(rng.choice(["float32", "float64"])) if exact else "float32"
        self.nodes = tuple(rank // 2 for rank in range(self.P)) if "hierarchical" in self.algorithm else range(self.P)
        self.residual = bool(rng.random() < 0.5)
        self.calls = int(rng.integers(0, 3))
        self.victim, self.which = int(rng.integers(self.P)), int(rng.integers(100))
        self.damage = str(rng.choice(DAMAGES))

    def __repr__(self) -> str:
        return f"Case({', '.join(f'{name}={value!r}' for name, value in vars(self).items() if name != 'rng')})"

    def gradient(self, rank: int, step: int) -> np.ndarray:
        drawn = np.random.default_rng([self.calls, self.n, rank, step]).integers(-9, 10, self.n)
        return drawn.astype(self.dtype)

    @property
    def max_entries(self) -> int:
        name = self.algorithm.removeprefix("hierarchical:")
        if name == "split:2":
            return 2 * self.k
        algorithm = find(name)
        return self.k if name != "dense" and algorithm and algorithm.bounded_result else self.n


class Damage:
    """Replaces the message. ``armed``: ranks in the damaged call; ``done``: whether the message was replaced."""

    def __init__(self, case: Case) -> None:
        self.case, self.armed, self.sent, self.done = case, set[int](), 0, False
        # Id of a message -> (the message, so that its id is not reused; function that makes another).
        self._others: dict[int, tuple[np.ndarray, Callable[[], np.ndarray]]] = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        rng, case, numbers = self.case.rng, self.case, [self.case.n - 1, self.case.n, self.case.k]
        entries, parcel, isend = Messages.entries, Messages.parcel, SimulatedTransport.isend

        def remember(message: np.ndarray, other: Callable[[], np.ndarray]) -> np.ndarray:
            self._others[id(message)] = message, other
            return message

        def new_entries(messages: Messages, vector: SparseVector, wire: Wire, round_no: int) -> Any:
            message = entries(messages, vector, wire, round_no)
            return remember(message, lambda: entries(messages, other_vector(vector, wire, rng), wire, round_no))

        def new_parcel(messages: Messages, vectors: Any, words: Any, wire: Wire, round_no: int) -> Any:
            def other() -> Any:
                drawn, sent = list(vectors), list(words)
                if case.damage == "words" or not drawn:
                    sent = other_words(words, rng, numbers)
                else:
                    at = int(rng.integers(len(drawn)))
                    drawn[at] = other_vector(drawn[at], wire, rng)
                if rng.random() < 0.05:
                    drawn = drawn[:-1] if rng.random() < 0.5 else drawn + drawn[:1]
                return parcel(messages, drawn, sent, wire, round_no)

            return remember(parcel(messages, vectors, words, wire, round_no), other)

        def new_isend(transport: SimulatedTransport, data: Any, to: int, *rest: Any, **named: Any) -> Any:
            return isend(transport, self._replaced(transport.rank, data), to, *rest, **named)

        with pytest.MonkeyPatch.context() as patch:
            for name, method in (("entries", new_entries), ("parcel", new_parcel)):
                patch.setattr(Messages, name, method)
            patch.setattr(SimulatedTransport, "isend", new_isend)
            yield

    def _replaced(self, rank: int, data: np.ndarray) -> np.ndarray:
        """Return the message that replaces ``data``."""
        case = self.case
        if rank != case.victim or rank not in self.armed:
            return data
        self.sent += 1
        if self.sent != case.which + 1:
            return data
        self.done = True
        if case.damage in ("vectors", "words") and id(data) in self._others:
            return self._others[id(data)][1]()
        if case.damage == "payload" and len(data) > HEADER_BYTES + 4:
            other = data.copy()
            for _ in range(case.rng.integers(1, 3)):
                at = int(case.rng.integers(HEADER_BYTES, len(data) - 3))
                other[at : at + 4] = case.rng.integers(0, 256, 4, np.uint8)
            return other
        (other,) = damaged(data, 1, CALL_BYTES, [case.n - 1, case.n, case.k, case.k + 1], case.rng)
        return other


def other_vector(vector: SparseVector, wire: Wire, rng: np.random.Generator) -> SparseVector:
    """Return another vector, as from a faulty or hostile rank."""
    n, nnz = vector.size, vector.nnz
    indices, values = vector.indices.copy(), vector.values.copy()
    how = rng.choice(["elsewhere", "moved", "values", "none", "doubled", "swapped", "outside", "zero"])
    if how in ("elsewhere", "moved") or not nnz:
        drawn = rng.integers(0, n, int(rng.integers(0, 2 * nnz + 3)))
        indices = np.unique(drawn if how != "moved" else indices + rng.integers(-n // 2, n // 2))
        indices = indices[(indices >= 0) & (indices < n)].astype(vector.indices.dtype)
        values = rng.integers(1, 10, len(indices)).astype(values.dtype)
    elif how == "values":
        values = rng.choice([1, -1, 300, np.nan, np.inf, -np.inf, 1e30], nnz).astype(values.dtype)
    elif how == "none":
        indices, values = indices[:0], values[:0]
    elif how == "doubled" and nnz > 1:
        at = int(rng.integers(1, nnz))
        indices[at] = indices[at - 1]
    elif how == "swapped" and nnz > 1 and not wire.needs_codec:
        at = int(rng.integers(1, nnz))
        indices[at - 1 : at + 1] = indices[at - 1 : at + 1][::-1].copy()
    elif how == "outside" and not wire.needs_codec:
        indices[rng.choice([0, -1])] = rng.choice([-1, n, n + 1, -(2**31), 2**31 - 1])
    elif how == "zero":
        values[int(rng.integers(nnz))] = 0
    other = SparseVector.trusted(indices, values, n, vector.shape)
    return other if wire.kind is EXACT or how == "zero" else BACKEND.quantize(other, wire.kind)[0]


def other_words(words: Any, rng: np.random.Generator, numbers: list[int]) -> list[int]:
    other = list(words)
    if other and rng.random() < 0.8:
        at = int(rng.integers(len(other)))
        chosen = [*NUMBERS, *numbers, other[at] + 1, max(0, other[at] - 1)]
        other[at] = int(chosen[rng.integers(len(chosen))]) % 2**64
        return other
    return [*other, int(rng.integers(0, 2**62))] if rng.random() < 0.5 else other[:-1]


class Outcome(NamedTuple):
    """A rank's result or error of the damaged call, its contribution to the next call, and that call's result."""

    result: SparseVector | None
    error: BaseException | None
    contribution: np.ndarray
    next_result: np.ndarray


def make_calls(case: Case) -> tuple[Damage, list[Outcome]]:
    damage = Damage(case)

    def program(transport: SimulatedTransport) -> Outcome:
        residual = np.zeros(case.n, case.dtype) if case.residual else None
        options = {"algorithm": case.algorithm, "wire": case.wire, "op": case.op, "residual": residual}

        def call(step: int) -> SparseVector:
            return sc.sparse_allreduce(case.gradient(transport.rank, step), case.k, comm=transport, **options)

        for step in range(case.calls):
            call(step)
        damage.armed.add(transport.rank)
        result, raised = None, None
        try:
            result = call(case.calls)
        except REFUSALS as error:
            raised = error
        damage.armed.discard(transport.rank)
        realign(transport)
        contribution = case.gradient(transport.rank, case.calls + 1)
        if residual is not None:
            with np.errstate(all="ignore"):
                contribution = contribution + residual
        return Outcome(result, raised, contribution, call(case.calls + 1).to_dense())

    with damage.applied():
        results = run(case.P, program, node_of_rank=case.nodes, catch=True)
    for rank, result in enumerate(results):
        if result.error is not None and not isinstance(result.error, sc.TimeoutError):  # which another rank caused
            raise AssertionError(f"rank {rank} raised {result.error!r}") from result.error
    outcomes = [result.value for result in results if result.value is not None]
    assert len(outcomes) == case.P, f"ranks waited in vain: {results}"
    return damage, outcomes


def realign(transport: SimulatedTransport) -> None:
    """Realign, also if this rank is late because it has waited for its timeout."""
    for _ in range(3):
        with suppress(sc.TimeoutError):
            return sc.realign(transport)
    raise AssertionError(f"rank {transport.rank} cannot realign")


def check_result(case: Case, result: SparseVector) -> None:
    indices, values = np.asarray(result.indices), np.asarray(result.values)
    assert len(indices) == len(values), "as many indices as values"
    assert np.all(np.diff(indices) > 0), f"indices that do not increase: {indices.tolist()[:20]} ..."
    assert not len(indices) or (indices[0] >= 0 and indices[-1] < case.n), "indices out of range"
    assert len(indices) <= case.max_entries, f"{len(indices)} entries, of {case.max_entries} at most"
    assert values.dtype == case.dtype, "values of another type"


class PeerMessages(Numbered):
    unit, chunk = "messages", 2000
    options = numbered(unit, 20_000)

    def check(self, number: int) -> None:
        case = self.case = Case(self.report.seed, number)
        damage, outcomes = make_calls(case)
        if not damage.done and damage.sent:  # the rank has sent fewer messages
            case.which %= damage.sent
            damage, outcomes = make_calls(case)
        for outcome in outcomes:
            if outcome.result is not None:
                check_result(case, outcome.result)
        if not damage.done:
            self.counts["calls in which the rank sends nothing"] += 1
        elif any(outcome.error is not None for outcome in outcomes):
            self.counts["refused"] += 1
        else:
            self.counts["taken, and the result is well formed"] += 1
        first, contributions = outcomes[0].next_result, [outcome.contribution for outcome in outcomes]
        for rank, outcome in enumerate(outcomes):
            same = np.array_equal(outcome.next_result, first, equal_nan=True)
            assert same, f"the next call: rank {rank} has another result than rank 0"
        small = all(np.isfinite(v).all() and np.abs(v).max() < 2**16 for v in contributions)
        exact = WIRES[case.wire].kind is EXACT or case.algorithm.startswith("dense")
        if small and exact and case.op == "sum":
            self.counts["next calls compared with the oracle"] += 1
            expected = expected_sum(case.algorithm, contributions, case.k, case.nodes)
            assert np.array_equal(first, expected), "the next call: not the oracle's result"
