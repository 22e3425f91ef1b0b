"""Calls with arguments, values, orders of events and faults drawn at random, against the oracles.

Each case is a call on up to 33 ranks of one process: see `tests.stress.ranks` for the order of events. First it is made
without a fault. Its result must be the oracle's, the same on all ranks, and with the residuals it must add up to what
entered. Then it is made with the fault of the case, in another order of events:

- interrupt, error: an exception at one step of one rank, from then on as if by a signal or by the library;
- crash: one rank does nothing from that step on;
- refused: one rank's arguments are refused, and the others wait for it;
- mismatch: one rank makes another call.

Every rank must then have raised, with its residual `residual + x`, or have all of the result and of the residual of
the call without the fault. Nothing may hang. After `realign`, the next call must give what it gives on ranks that have
had no fault.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.algorithms import find
from tests.stress.cases import Case, Vector
from tests.stress.harness import SANITIZED, Numbered, numbered
from tests.stress.ranks import Crash, Network, Rank

__all__ = ["Calls"]


@dataclass
class _Outcome:
    """What a rank has after a call."""

    residual: Vector | None
    out: Vector | None
    result: sc.SparseVector | None = None
    error: BaseException | None = None
    steps: int = 0

    @property
    def dense(self) -> Vector:
        """The result, dense."""
        assert self.result is not None
        return self.result.to_dense()


def _call(case: Case, rank: Rank, x: Vector, residual: Vector | None, fault: str = "none") -> _Outcome:
    """Make the call on one rank. What it raises is in the outcome, but for `Crash`."""
    x = x.copy()
    residual = None if residual is None else residual.copy()
    out = x if case.out == "x" else np.full(case.n, 77, np.dtype(case.out)) if case.out else None
    outcome, before = _Outcome(residual, out), rank.steps
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
    outcome.steps = rank.steps - before
    return outcome


def _made(case: Case, order: int, xs: list[Vector], residuals: list[Vector | None]) -> list[_Outcome]:
    """Make the call on all ranks without a fault, with events in that order."""
    network, outcomes = Network(case.nodes, order), {}

    def program(rank: Rank) -> None:
        outcomes[rank.rank] = _call(case, rank, xs[rank.rank], residuals[rank.rank])

    network.run(program)
    assert not network.violations, network.violations
    return [outcomes[rank] for rank in range(case.P)]


# -- without a fault --------------------------------------------------------------------------------------------------


def _same(a: Vector, b: Vector) -> bool:
    return a.shape == b.shape and np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)


def _named(case: Case) -> str:
    """Return the algorithm that the call is made with."""
    if case.algorithm != "auto":
        return case.algorithm
    names = []
    Network(case.nodes, 0).run(
        lambda rank: names.append(
            sc.explain(case.n, case.k, comm=rank, dtype=case.dtype, op=case.op, wire=case.wire)
            .candidates[0]
            .algorithm.name
        )
    )
    return str(names[0])


def _check_result(case: Case, outcomes: list[_Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank} raised {outcome.error!r} without a fault"
    first = _check_alike(outcomes)
    name = _named(case)
    _check_nans(case, name, first)
    total = case.total(name)
    if total is not None:
        with np.errstate(all="ignore"):
            expected = (total / case.divisor).astype(total.dtype)
        assert _same(first, expected), f"the result of {name} is not the oracle's"
    if case.residual:
        _check_residuals(case, name, outcomes, first)


def _check_alike(outcomes: list[_Outcome]) -> Vector:
    """Check that all ranks have one result, and return it."""
    first = outcomes[0].dense
    bits = first.tobytes()
    for rank, outcome in enumerate(outcomes):
        assert outcome.dense.tobytes() == bits, f"rank {rank} has another result than rank 0"
        if outcome.out is not None:
            with np.errstate(all="ignore"):
                assert _same(outcome.out, first.astype(outcome.out.dtype)), f"rank {rank}: out is not the result"
    return first


def _check_nans(case: Case, name: str, result: Vector) -> None:
    """Check that NaNs reach all ranks: they rank first, so that k of them are in every global top-k."""
    algorithm = find(name)
    if case.finite or algorithm is None or not (algorithm.reselects and algorithm.rejects):
        return
    stored = np.array([v.astype(np.float64) for v in case.stored])
    with np.errstate(all="ignore"):
        possible = np.isnan(stored.sum(axis=0)) | np.isinf(stored).any(axis=0)
    found = np.isnan(stored).any(axis=0)
    if possible.sum() <= case.k:
        assert np.all(np.isnan(result[found])), f"NaNs of ranks are not in the result of {name}"


def _check_residuals(case: Case, name: str, outcomes: list[_Outcome], result: Vector) -> None:
    kept: list[Any] = [outcome.residual for outcome in outcomes]
    algorithm, total = find(name), outcomes[0].result
    if algorithm is not None and algorithm.reselects and algorithm.rejects and total is not None:
        outside = np.ones(case.n, np.bool_)
        outside[total.indices] = False  # the mean of a sum that is not 0 may be 0
        for rank, (mine, its) in enumerate(zip(kept, case.stored, strict=True)):
            assert _same(mine[outside], its[outside]), f"rank {rank}: outside the result the residual is not r + x"
    _check_sum(case, [v.astype(np.float64) for v in case.accumulated], kept, result, exact=case.exact(case.P))


def _check_sum(case: Case, entered: list[Vector], kept: list[Any], result: Vector, *, exact: bool) -> None:
    """Check that what has entered is in the result or in residuals; ``exact``: to the bit."""
    if not all(np.isfinite(v).all() for v in entered):
        return
    applied = result.astype(np.float64) * case.divisor
    left = np.sum(kept, axis=0, dtype=np.float64)
    if exact:
        assert _same(left + np.rint(applied), np.sum(entered, axis=0)), "the sum is not conserved"
        return
    eps = max(np.finfo(np.float32).eps, {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(case.residual, 0.0))
    size = np.sum(np.abs(entered), axis=0) + np.abs(applied)
    size = size.max(initial=0) if case.few_bits else size
    error = np.abs(left + applied - np.sum(entered, axis=0))
    assert np.all(error <= 4 * case.P * eps * size + 1e-6), "the sum is not conserved, beyond rounding"


# -- with a fault -----------------------------------------------------------------------------------------------------


def _check_fault(case: Case, clean: list[_Outcome], counts: Counter[str]) -> None:
    xs, again = case.gradients(0), case.gradients(1)
    network = Network(case.nodes, case.seed + 1)
    first: dict[int, _Outcome] = {}
    second: dict[int, _Outcome] = {}
    victim = network.ranks[case.victim]
    victim.fault = {"interrupt": KeyboardInterrupt(), "error": OSError("of the fault"), "crash": Crash()}.get(
        case.fault
    )
    victim.fault_step = 1 + int(case.when * clean[case.victim].steps)

    def program(rank: Rank) -> None:
        first[rank.rank] = _call(case, rank, xs[rank.rank], case.residuals[rank.rank], case.fault)
        rank.fault = None
        network.barrier(rank)
        if case.fault == "crash":
            return
        sc.realign(rank)
        second[rank.rank] = _call(case, rank, again[rank.rank], first[rank.rank].residual)

    network.run(program)
    assert not network.violations, network.violations
    for rank, outcome in first.items():
        _check_outcome(case, rank, outcome, clean[rank], counts)
    if second:
        expected = _made(case, case.seed + 2, again, [first[rank].residual for rank in range(case.P)])
        for rank, outcome in second.items():
            assert outcome.error is None, f"the next call: rank {rank} raised {outcome.error!r}"
        if case.rounds_by_history(_named(case)):
            _check_alike([second[rank] for rank in range(case.P)])
            if case.residual:
                entered = [np.float64(first[rank].residual) + np.float64(again[rank]) for rank in range(case.P)]
                left = [second[rank].residual for rank in range(case.P)]
                _check_sum(case, entered, left, second[0].dense, exact=case.exact(2 * case.P))
            expected = [second[rank] for rank in range(case.P)]
        for rank, outcome in second.items():
            assert _same(outcome.dense, expected[rank].dense), f"the next call: rank {rank} has a wrong result"
            if outcome.residual is not None and expected[rank].residual is not None:
                assert _same(outcome.residual, expected[rank].residual), f"the next call: rank {rank}'s residual"
        counts["next calls after a fault"] += 1


def _check_outcome(case: Case, rank: int, outcome: _Outcome, clean: _Outcome, counts: Counter[str]) -> None:
    if outcome.error is None:
        counts["ranks done in spite of a fault"] += 1
        assert _same(outcome.dense, clean.dense), f"rank {rank}: another result than without the fault"
    elif rank == case.victim and case.fault != "mismatch":
        counts[f"victims that raised {type(outcome.error).__name__}"] += 1
    else:
        counts[f"ranks that raised {type(outcome.error).__name__}"] += 1
        kinds = sc.CollectiveMismatchError if case.fault == "mismatch" else sc.TransportError
        assert isinstance(outcome.error, kinds), f"rank {rank} raised {outcome.error!r}"
    if outcome.residual is None or clean.residual is None:
        return
    committed = _same(outcome.residual, clean.residual)
    if outcome.out is not None and clean.out is not None:
        committed = committed and _same(outcome.out, clean.out)
    if outcome.error is None:
        assert committed, f"rank {rank}: another residual or out than without the fault"
    elif rank == case.victim and isinstance(outcome.error, sc.InvalidInputError):
        assert _same(outcome.residual, case.residuals[rank]), f"rank {rank} was refused, and its residual has changed"
    else:
        held = _same(outcome.residual, case.stored[rank])
        assert held or (committed and rank == case.victim), (
            f"rank {rank} raised {outcome.error!r}, and its residual is neither residual + x nor committed with out"
        )


class Calls(Numbered):
    unit, chunk = "calls", 2000
    options = (*numbered(unit, 10_000), ("max_ranks", 33, "ranks, at most"), SANITIZED)

    def check(self, number: int) -> None:
        """Make a call without and with its fault."""
        case = Case(self.report.seed, number, self.given.max_ranks)
        try:
            clean = _made(case, case.seed, case.gradients(0), case.residuals)
            _check_result(case, clean)
            self.counts["calls without a fault"] += 1
            if case.fault in ("interrupt", "error") or (case.fault != "none" and case.P > 1):
                _check_fault(case, clean, self.counts)
                self.counts[f"calls with fault {case.fault}"] += 1
        except Exception as error:
            raise AssertionError(f"{error!r}\n  in {case}") from error
