"""Calls in which one rank meets a fault, with random arguments and orders of events.

Each case is a call on up to 17 ranks of one process, after up to two others, without and with a fault, in two orders of
events (`tests.stress.network`). The fault is an exception (interrupt, error) or the end of one rank (crash) at any step
of its transport, refused arguments of one rank, another call of one rank (mismatch), or a damaged message: other bytes,
or a correct message of other entries or numbers, as from a hostile rank.

Without a fault, and in the next call after one, all ranks must have the oracle's result, and result plus residuals must
equal the contributions. In the call with the fault, every rank must have raised, with `residual + x` as its residual,
or have the complete result and residual. After a damaged message, the result must be well formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import sparsecomm as sc
from sparsecomm.algorithms import find, inner_algorithms
from sparsecomm.backends import CpuBackend
from sparsecomm.testing import expected_sum
from sparsecomm.wire import EXACT, HEADER_BYTES, WIRES, Messages, Wire
from sparsecomm.wire.header import CALL_BYTES
from tests import data
from tests.damage import NUMBERS, damaged
from tests.reference import canonical, widened
from tests.stress.network import Crash, Network, Rank

Vector = NDArray[Any]
FAULTS = ("none", "interrupt", "error", "crash", "refused", "mismatch")
DAMAGES = ("bytes", "payload", "vectors", "vectors", "words")
AMPLITUDE = 3  # of gradients: integers, whose sums are exact in every dtype
SIZES = (1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 13, 17)
BACKEND = CpuBackend(1)


class Case:
    """A call on P ranks and its fault: case ``number``.

    ``residual``, ``out``: a dtype, "x", or "" for none. ``victim`` meets ``fault`` at the part ``when`` of its steps or
    of its messages. ``waits``: the call is made by `isparse_allreduce`. ``before``: the number of calls before it.
    """

    def __init__(self, seed: int, number: int) -> None:
        rng = self.rng = np.random.default_rng([seed, number])

        def pick(values: Any) -> Any:
            return values[int(rng.integers(len(values)))]

        P = self.P = pick(SIZES)
        self.algorithm = pick(["auto", "split:2", *sc.algorithms(), *(f"hierarchical:{i}" for i in inner_algorithms())])
        dtype = self.dtype = pick(list(data.DTYPES))
        self.wire = pick([wire for wire in WIRES if dtype != "float64" or WIRES[wire].kind is EXACT])
        n = self.n = int(pick([1, 2, 7, 64, 97, 300, int(rng.integers(1, 1000)), 5000]))
        self.k = int(pick([1, min(n, 3), max(1, n // 50), max(1, n // 4), n, int(rng.integers(1, n + 1))]))
        self.residual = pick(["", dtype, dtype, "float32" if dtype in ("float16", "bfloat16") else dtype])
        self.out = pick(["", "x", dtype, "float32" if dtype != "float64" else dtype])
        per_node = int(rng.integers(1, P + 1))
        nodes = rng.permutation(P) // per_node if rng.random() < 0.3 else np.arange(P) // per_node
        first = {int(node): i for i, node in enumerate(dict.fromkeys(nodes.tolist()))}  # numbered in order of rank
        self.nodes = tuple(first[int(node)] for node in nodes)
        self.op = pick(["sum", "sum", "mean"])
        self.fault = pick(DAMAGES if rng.random() < 0.5 else FAULTS)
        self.victim, self.when = int(rng.integers(P)), float(rng.random())
        self.waits, self.seed = rng.random() < 0.15, int(rng.integers(2**31))
        self.before = int(rng.integers(3))

    def __repr__(self) -> str:
        return f"Case({', '.join(f'{k}={v!r}' for k, v in vars(self).items() if isinstance(v, (int, float, str)))})"

    def gradients(self, step: int) -> list[Vector]:
        seeds = range(self.seed + 1000 * step, self.seed + 1000 * step + self.P)
        return [data.integers(self.n, self.dtype, seed, AMPLITUDE) for seed in seeds]

    @cached_property
    def residuals(self) -> list[Vector | None]:
        """All ranks' residuals before the first step."""
        seeds = range(self.seed + 500_000, self.seed + 500_000 + self.P)
        return [data.integers(self.n, self.residual, seed, AMPLITUDE) if self.residual else None for seed in seeds]

    def stored(self, xs: list[Vector], residuals: list[Vector | None]) -> list[Vector]:
        """Return every rank's residual + x, in the residual's dtype; x if there is no residual."""
        if not self.residual:
            return xs
        with np.errstate(all="ignore"):
            sums = [widened(r) + widened(x) for r, x in zip(residuals, xs, strict=True)]
            return [canonical(v).astype(data.DTYPES[self.residual]) for v in sums]

    @property
    def max_entries(self) -> int:
        if self.algorithm == "split:2":
            return 2 * self.k
        algorithm = find(self.algorithm.removeprefix("hierarchical:"))
        bounded = algorithm is not None and algorithm.bounded_result and algorithm.name != "dense"
        return self.k if bounded else self.n

    def check_result(self, outcomes: list[Outcome], contributions: list[Vector]) -> None:
        """Check that all ranks have the oracle's result, and that nothing is lost."""
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is None, f"rank {rank} raised {outcome.error!r}"
            assert same(outcome.dense, outcomes[0].dense), f"rank {rank} has another result than rank 0"
            if outcome.out is not None:
                with np.errstate(all="ignore"):
                    assert same(outcome.out, outcome.dense.astype(outcome.out.dtype)), f"rank {rank}: out"
        # Formats of few bits round. A damaged message may have left numbers in residuals whose sums are not exact.
        small = all((np.abs(v) <= 4 * self.P * AMPLITUDE).all() and same(v, np.rint(v)) for v in contributions)
        if WIRES[self.wire].kind.planes or not small:
            return
        divisor = self.P if self.op == "mean" else 1
        if self.algorithm != "auto":
            total = canonical(expected_sum(self.algorithm, [widened(v) for v in contributions], self.k, self.nodes))
            assert same(outcomes[0].dense, (total / divisor).astype(total.dtype)), "the result is not the oracle's"
        if self.residual:
            left = np.sum([outcome.residual for outcome in outcomes], axis=0, dtype=np.float64)
            total = np.sum(contributions, axis=0, dtype=np.float64)
            assert same(left + np.rint(outcomes[0].dense.astype(np.float64) * divisor), total), "a sum is not conserved"


def same(a: Vector, b: Vector) -> bool:
    return a.shape == b.shape and np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)


@dataclass
class Outcome:
    """A rank's state after a call. ``steps``, ``sent``: steps of its transport and messages in the call."""

    residual: Vector | None
    out: Vector | None
    result: sc.SparseVector | None = None
    error: BaseException | None = None
    steps: int = 0
    sent: int = 0

    @property
    def dense(self) -> Vector:
        assert self.result is not None
        return self.result.to_dense()


def call(case: Case, rank: Rank, x: Vector, residual: Vector | None, fault: str = "none") -> Outcome:
    """Make the call on one rank. The outcome contains all exceptions except `Crash`."""
    x = x.copy()
    residual = None if residual is None else residual.copy()
    out = x if case.out == "x" else np.full(case.n, 77, np.dtype(case.out)) if case.out else None
    outcome, before = Outcome(residual, out), (rank.steps, rank.sent)
    meets = fault if rank.rank == case.victim else "none"
    k, label = 0 if meets == "refused" else case.k, "another" if meets == "mismatch" else ""
    options = {"algorithm": case.algorithm, "wire": case.wire, "op": case.op, "residual": residual, "out": out}
    try:
        if case.waits:
            outcome.result = sc.isparse_allreduce(x, k, comm=rank, label=label, **options).wait()
        else:
            outcome.result = sc.sparse_allreduce(x, k, comm=rank, label=label, **options)
    except Crash:
        raise
    except BaseException as error:
        outcome.error = error
    outcome.steps, outcome.sent = rank.steps - before[0], rank.sent - before[1]
    return outcome


def warm_up(case: Case, rank: Rank) -> None:
    """Make the calls before, with residuals of their own. Some algorithms remember their sums."""
    for step in range(case.before):
        residual = case.residuals[rank.rank]
        outcome = call(case, rank, case.gradients(2 + step)[rank.rank], residual if residual is None else 0 * residual)
        assert outcome.error is None, f"rank {rank.rank} raised {outcome.error!r} in a call before"


def check(seed: int, number: int) -> str:
    """Check a case, and return its kind."""
    case = Case(seed, number)
    try:
        network, clean = Network(case.nodes, case.seed), dict[int, Outcome]()
        xs = case.gradients(0)

        def program(rank: Rank) -> None:
            warm_up(case, rank)
            clean[rank.rank] = call(case, rank, xs[rank.rank], case.residuals[rank.rank])

        network.run(program)
        assert not network.violations, network.violations
        case.check_result([clean[rank] for rank in range(case.P)], case.stored(xs, case.residuals))
        if case.fault == "none" or (case.P == 1 and case.fault not in ("interrupt", "error")):
            return "without a fault"
        return check_fault(case, clean)
    except Exception as error:
        raise AssertionError(f"{error}\n  in {case}") from error


def check_fault(case: Case, clean: dict[int, Outcome]) -> str:
    xs, again = case.gradients(0), case.gradients(1)
    stored = case.stored(xs, case.residuals)
    network = Network(case.nodes, case.seed + 1)
    first, second = dict[int, Outcome](), dict[int, Outcome]()
    steps, sent = clean[case.victim].steps, clean[case.victim].sent
    damage = Damage(case, int(case.when * sent)) if case.fault in DAMAGES else None
    faults = {"interrupt": KeyboardInterrupt(), "error": OSError("of the fault"), "crash": Crash()}

    def program(rank: Rank) -> None:
        warm_up(case, rank)
        if rank.rank == case.victim:
            rank.fault, rank.damage = faults.get(case.fault), damage
            rank.fault_step = rank.steps + 1 + int(case.when * steps)
        first[rank.rank] = call(case, rank, xs[rank.rank], case.residuals[rank.rank], case.fault)
        rank.fault = rank.damage = None
        network.barrier(rank)
        if case.fault == "crash":
            return
        sc.realign(rank)
        second[rank.rank] = call(case, rank, again[rank.rank], first[rank.rank].residual)

    with messages_noted(damage):
        network.run(program)
    assert not network.violations, network.violations
    for rank, outcome in first.items():
        if damage is None or not damage.done:
            check_outcome(case, rank, outcome, clean[rank], stored[rank])
        elif outcome.result is not None:
            check_well_formed(case, outcome.result)
        else:
            expected = sc.CollectiveMismatchError, sc.TransportError
            assert isinstance(outcome.error, expected), f"rank {rank} raised {outcome.error!r}"
            unchanged = outcome.residual is None or same(outcome.residual, stored[rank])
            assert unchanged, f"rank {rank} raised {outcome.error!r}, and its residual is not residual + x"
    if second:
        residuals = [first[rank].residual for rank in range(case.P)]
        case.check_result([second[rank] for rank in range(case.P)], case.stored(again, residuals))
    raised = any(outcome.error for outcome in first.values())
    return f"{case.fault}: {'raised' if raised else 'no rank raised'}"


def check_outcome(case: Case, rank: int, outcome: Outcome, clean: Outcome, stored: Vector) -> None:
    """Check that a call that another fault than a damaged message ended is complete or undone."""
    if outcome.error is None:
        assert same(outcome.dense, clean.dense), f"rank {rank}: another result than without the fault"
    elif rank != case.victim or case.fault == "mismatch":
        kinds = sc.CollectiveMismatchError if case.fault == "mismatch" else sc.TransportError
        assert isinstance(outcome.error, kinds), f"rank {rank} raised {outcome.error!r}"
    if outcome.residual is None or clean.residual is None:
        return
    committed = same(outcome.residual, clean.residual)
    if outcome.out is not None and clean.out is not None:
        committed = committed and same(outcome.out, clean.out)
    if outcome.error is None:
        assert committed, f"rank {rank}: another residual or out than without the fault"
    elif rank == case.victim and isinstance(outcome.error, sc.InvalidInputError):
        assert same(outcome.residual, case.residuals[rank]), f"rank {rank} was refused, and its residual has changed"
    else:
        assert same(outcome.residual, stored) or (committed and rank == case.victim), (
            f"rank {rank} raised {outcome.error!r}, and its residual is neither residual + x nor committed with out"
        )


# -- damaged messages -------------------------------------------------------------------------------------------------


def check_well_formed(case: Case, result: sc.SparseVector) -> None:
    indices, values = np.asarray(result.indices), np.asarray(result.values)
    assert len(indices) == len(values), "as many indices as values"
    assert np.all(np.diff(indices) > 0), f"indices that do not increase: {indices.tolist()[:20]} ..."
    assert not len(indices) or (indices[0] >= 0 and indices[-1] < case.n), "indices out of range"
    assert len(indices) <= case.max_entries, f"{len(indices)} entries, of {case.max_entries} at most"


class Damage:
    """Replaces message number ``which`` of the victim. ``done``: whether it was replaced."""

    def __init__(self, case: Case, which: int) -> None:
        self.case, self.which, self.sent, self.done = case, which, 0, False
        # Id of a message -> (the message, so that its id is not reused; function that makes another).
        self.others: dict[int, tuple[Any, Callable[[], Any]]] = {}

    def __call__(self, message: Any) -> Any:
        """Return the message to send in place of ``message``."""
        case, rng = self.case, self.case.rng
        self.sent += 1
        if self.sent != self.which + 1:
            return message
        self.done = True
        if case.fault in ("vectors", "words") and id(message) in self.others:
            return self.others[id(message)][1]()
        if case.fault == "payload" and len(message) > HEADER_BYTES + 4:
            other = message.copy()
            for _ in range(rng.integers(1, 3)):
                at = int(rng.integers(HEADER_BYTES, len(message) - 3))
                other[at : at + 4] = rng.integers(0, 256, 4, np.uint8)
            return other
        (other,) = damaged(message, 1, CALL_BYTES, [case.n - 1, case.n, case.k, case.k + 1], rng)
        return other


@contextmanager
def messages_noted(damage: Damage | None) -> Iterator[None]:
    """Let ``damage`` know how to make other messages in place of those that ranks encode meanwhile."""
    if damage is None:
        yield
        return
    entries, parcel, case, rng = Messages.entries, Messages.parcel, damage.case, damage.case.rng

    def noted(message: Any, other: Callable[[], Any]) -> Any:
        damage.others[id(message)] = message, other
        return message

    def new_entries(messages: Messages, vector: sc.SparseVector, wire: Wire, round_no: int) -> Any:
        other = lambda: entries(messages, other_vector(vector, wire, rng), wire, round_no)  # noqa: E731
        return noted(entries(messages, vector, wire, round_no), other)

    def new_parcel(messages: Messages, vectors: Any, words: Any, wire: Wire, round_no: int) -> Any:
        def other() -> Any:
            drawn, sent = list(vectors), list(words)
            if case.fault == "words" or not drawn:
                sent = other_words(words, rng, [case.n - 1, case.n, case.k])
            else:
                at = int(rng.integers(len(drawn)))
                drawn[at] = other_vector(drawn[at], wire, rng)
            if rng.random() < 0.05:
                drawn = drawn[:-1] if rng.random() < 0.5 else drawn + drawn[:1]
            return parcel(messages, drawn, sent, wire, round_no)

        return noted(parcel(messages, vectors, words, wire, round_no), other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Messages, "entries", new_entries)
        patch.setattr(Messages, "parcel", new_parcel)
        yield


def other_vector(vector: sc.SparseVector, wire: Wire, rng: np.random.Generator) -> sc.SparseVector:
    """Return another vector, as from a faulty or hostile rank."""
    n, nnz = vector.size, vector.nnz
    indices, values = vector.indices.copy(), vector.values.copy()
    how = rng.choice(["elsewhere", "moved", "values", "none", "doubled", "swapped", "outside", "zero"])
    if how in ("elsewhere", "moved") or not nnz:
        drawn = rng.integers(0, n, int(rng.integers(0, 2 * nnz + 3)))
        indices = np.unique(drawn if how != "moved" else indices + rng.integers(-(n // 2) - 1, n // 2 + 1))
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
    other = sc.SparseVector.trusted(indices, values, n, vector.shape)
    return other if wire.kind is EXACT or how == "zero" else BACKEND.quantize(other, wire.kind)[0]


def other_words(words: Any, rng: np.random.Generator, numbers: list[int]) -> list[int]:
    other = list(words)
    if other and rng.random() < 0.8:
        at = int(rng.integers(len(other)))
        chosen = [*NUMBERS, *numbers, other[at] + 1, max(0, other[at] - 1)]
        other[at] = int(chosen[rng.integers(len(chosen))]) % 2**64
        return other
    return [*other, int(rng.integers(0, 2**62))] if rng.random() < 0.5 else other[:-1]
