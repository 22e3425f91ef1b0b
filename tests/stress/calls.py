"""Calls with random arguments, values, orders of events and faults, compared with the oracles.

Each case is a call on up to 33 ranks of one process. Without a fault, all ranks must have the oracle's result, and
result plus residuals must equal the contributions. Then the call is made with a fault, in another order of
events (`tests.stress.network`): an exception (interrupt, error) or the end of one rank (crash) at any step of its
transport, refused arguments of one rank, or another call of one rank (mismatch). Every rank must have raised, with
`residual + x` as its residual, or have the complete result and residual. After `realign`, the next call must be right.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsecomm as sc
from sparsecomm.algorithms import find, inner_algorithms
from sparsecomm.testing import expected_sum, num_contributors
from sparsecomm.wire import EXACT, MEAN_OF_CONTRIBUTORS, WIRES
from tests import data
from tests.reference import canonical, widened
from tests.stress.harness import SANITIZED, Numbered, numbered
from tests.stress.network import Crash, Network, Rank

Vector = NDArray[Any]
FAULTS = ("none", "interrupt", "error", "crash", "refused", "mismatch")
_SIZES = (1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 9, 11, 13, 16, 17, 33)
_CONTENTS = ("integers", "integers", "integers", "special", *data.KINDS)
_EXACT_UP_TO = {"float16": 2048, "bfloat16": 256, "float32": 2**24, "float64": 2**53}


class Case:
    """A call on P ranks and its fault: case ``number``.

    ``content``: "integers", "special" or one of `data.KINDS`. ``residual``, ``out``: a dtype, "x", or "" for none.
    ``victim`` meets ``fault`` at the part ``when`` of its steps. ``waits``: the call is made by `isparse_allreduce`.
    """

    def __init__(self, seed: int, number: int, max_ranks: int) -> None:
        rng = np.random.default_rng([seed, number])

        def pick(values: Any) -> Any:
            return values[int(rng.integers(len(values)))]

        P = self.P = pick([size for size in _SIZES if size <= max_ranks])
        self.algorithm = pick(["auto", *sc.algorithms(), *(f"hierarchical:{inner}" for inner in inner_algorithms())])
        dtype = self.dtype = pick(list(data.DTYPES))
        self.wire = pick(["auto", *(w for w in WIRES if dtype != "float64" or WIRES[w].kind is EXACT)])
        n = self.n = int(pick([1, 2, 7, 64, 97, 300, int(rng.integers(1, 1000)), 5000]))
        self.k = int(pick([1, min(n, 3), max(1, n // 50), max(1, n // 4), n, int(rng.integers(1, n + 1))]))
        self.residual = pick(["", dtype, dtype, "float32" if dtype in ("float16", "bfloat16") else dtype])
        self.out = pick(["", "x", dtype, "float32" if dtype != "float64" else dtype])
        per_node = int(rng.integers(1, P + 1))
        nodes = rng.permutation(P) // per_node if rng.random() < 0.3 else np.arange(P) // per_node
        first = {int(node): i for i, node in enumerate(dict.fromkeys(nodes.tolist()))}  # numbered in order of rank
        self.nodes = tuple(first[int(node)] for node in nodes)
        knowing = {"auto", *(name for name, a in sc.algorithms().items() if not a.cannot_count_contributors)}
        counts = self.algorithm in knowing and (self.wire == "auto" or WIRES[self.wire].kind is EXACT)
        self.op = pick(["sum", "sum", "mean", MEAN_OF_CONTRIBUTORS if counts else "mean"])
        self.content, self.amplitude = pick(_CONTENTS), int(pick([1, 3, 8, 60]))
        self.fault, self.victim, self.when = pick(FAULTS), int(rng.integers(P)), float(rng.random())
        self.waits, self.seed = rng.random() < 0.15, int(rng.integers(2**31))

    def __repr__(self) -> str:
        drawn = (f"{name}={value!r}" for name, value in vars(self).items() if not isinstance(value, (list, np.ndarray)))
        return f"Case({', '.join(drawn)})"

    # -- inputs -------------------------------------------------------------------------------------------------------

    def gradients(self, step: int) -> list[Vector]:
        return [self._vector(self.dtype, self.seed + 1000 * step + rank) for rank in range(self.P)]

    @cached_property
    def residuals(self) -> list[Vector | None]:
        """All ranks' residuals before the first step."""
        seeds = range(self.seed + 500_000, self.seed + 500_000 + self.P)
        return [self._vector(self.residual, seed) if self.residual else None for seed in seeds]

    def _vector(self, dtype: str, seed: int) -> Vector:
        if self.content == "integers":
            return data.integers(self.n, dtype, seed, self.amplitude)
        if self.content == "special":
            rng = np.random.default_rng([seed, self.n])
            special = rng.choice([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-42, 6e-8, 1.5, -1.5], self.n)
            with np.errstate(all="ignore"):
                v = np.where(rng.random(self.n) < 0.2, special, rng.standard_normal(self.n))
                return v.astype(data.DTYPES[dtype])
        return data.gradient(self.content, self.n, dtype, seed)

    # -- expected results ---------------------------------------------------------------------------------------------

    @property
    def finite(self) -> bool:
        """Whether all values, and all their sums, are finite."""
        return self.content not in ("special", "NaN and infinities", "only NaN", "huge range")

    @property
    def few_bits(self) -> bool:
        """Whether the values of a block share a magnitude, so that integers are rounded, and small values grow."""
        return self.wire in WIRES and bool(WIRES[self.wire].kind.planes)

    def rounds_by_history(self, name: str) -> bool:
        """Whether the rounding of an algorithm depends on earlier calls."""
        return "split" in name and self.wire in WIRES and WIRES[self.wire].kind is not EXACT

    def exact(self, ranks: int) -> bool:
        """Whether all sums over ``ranks`` ranks are exact, also in the residual's dtype."""
        limit = _EXACT_UP_TO[self.residual or self.dtype]
        return not self.few_bits and self.content == "integers" and 2 * ranks * self.amplitude <= limit

    @cached_property
    def stored(self) -> list[Vector]:
        """Every rank's residual + x in the first step, in the residual's dtype; x if there is no residual."""
        xs = self.gradients(0)
        if not self.residual:
            return xs
        with np.errstate(all="ignore"):
            sums = [widened(r) + widened(x) for r, x in zip(self.residuals, xs, strict=True)]
            return [canonical(v).astype(data.DTYPES[self.residual]) for v in sums]

    @cached_property
    def accumulated(self) -> list[Vector]:
        """Every rank's contribution to the call, in the accumulator's dtype."""
        return [widened(v) for v in self.stored]

    @cached_property
    def divisor(self) -> Any:
        if self.op == MEAN_OF_CONTRIBUTORS:
            return num_contributors(self.accumulated, self.k)
        return self.P if self.op == "mean" else 1

    def total(self, name: str) -> Vector | None:
        """Return the dense sum of the oracle for ``name``, or None if the algorithm rounds values."""
        if self.wire.removeprefix("packed_") != self.wire and not name.startswith("dense"):
            return None
        with np.errstate(all="ignore"):
            return canonical(expected_sum(name, self.accumulated, self.k, self.nodes))


# -- the call ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """A rank's state after a call."""

    residual: Vector | None
    out: Vector | None
    result: sc.SparseVector | None = None
    error: BaseException | None = None
    steps: int = 0

    @property
    def dense(self) -> Vector:
        assert self.result is not None
        return self.result.to_dense()


def call(case: Case, rank: Rank, x: Vector, residual: Vector | None, fault: str = "none") -> Outcome:
    """Make the call on one rank. The outcome contains all exceptions except `Crash`."""
    x = x.copy()
    residual = None if residual is None else residual.copy()
    out = x if case.out == "x" else np.full(case.n, 77, np.dtype(case.out)) if case.out else None
    outcome, before = Outcome(residual, out), rank.steps
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


def make(case: Case, order: int, xs: list[Vector], residuals: list[Vector | None]) -> list[Outcome]:
    """Make the call on all ranks without a fault; ``order``: the seed of the order of events."""
    network, outcomes = Network(case.nodes, order), {}

    def program(rank: Rank) -> None:
        outcomes[rank.rank] = call(case, rank, xs[rank.rank], residuals[rank.rank])

    network.run(program)
    assert not network.violations, network.violations
    return [outcomes[rank] for rank in range(case.P)]


# -- without a fault --------------------------------------------------------------------------------------------------


def same(a: Vector, b: Vector) -> bool:
    return a.shape == b.shape and np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)


def algorithm_of(case: Case) -> str:
    if case.algorithm != "auto":
        return case.algorithm
    names = []

    def program(rank: Rank) -> None:
        plan = sc.explain(case.n, case.k, comm=rank, dtype=case.dtype, op=case.op, wire=case.wire)
        names.append(plan.candidates[0].algorithm.name)

    Network(case.nodes, 0).run(program)
    return names[0]


def check_result(case: Case, outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank} raised {outcome.error!r} without a fault"
    first = check_equal(outcomes)
    name = algorithm_of(case)
    check_nans(case, name, first)
    total = case.total(name)
    if total is not None:
        with np.errstate(all="ignore"):
            expected = (total / case.divisor).astype(total.dtype)
        assert same(first, expected), f"the result of {name} is not the oracle's"
    if case.residual:
        check_residuals(case, name, outcomes, first)


def check_equal(outcomes: list[Outcome]) -> Vector:
    """Check that all ranks have the same result, and return it."""
    first = outcomes[0].dense
    bits = first.tobytes()
    for rank, outcome in enumerate(outcomes):
        assert outcome.dense.tobytes() == bits, f"rank {rank} has another result than rank 0"
        if outcome.out is not None:
            with np.errstate(all="ignore"):
                assert same(outcome.out, first.astype(outcome.out.dtype)), f"rank {rank}: out is not the result"
    return first


def check_nans(case: Case, name: str, result: Vector) -> None:
    """Check that NaNs reach all ranks: they rank first, so that k of them are in every global top-k."""
    algorithm = find(name)
    if case.finite or algorithm is None or not (algorithm.bounded_result and algorithm.rejects):
        return
    stored = np.array([v.astype(np.float64) for v in case.stored])
    with np.errstate(all="ignore"):
        possible = np.isnan(stored.sum(axis=0)) | np.isinf(stored).any(axis=0)
    is_nan = np.isnan(stored).any(axis=0)
    if possible.sum() <= case.k:
        assert np.all(np.isnan(result[is_nan])), f"NaNs of ranks are not in the result of {name}"


def check_residuals(case: Case, name: str, outcomes: list[Outcome], result: Vector) -> None:
    residuals = [outcome.residual for outcome in outcomes]
    algorithm, total = find(name), outcomes[0].result
    if algorithm is not None and algorithm.bounded_result and algorithm.rejects and total is not None:
        outside = np.ones(case.n, np.bool_)
        outside[total.indices] = False  # the mean of a non-zero sum may be 0
        for rank, (mine, stored) in enumerate(zip(residuals, case.stored, strict=True)):
            assert same(mine[outside], stored[outside]), f"rank {rank}: outside the result the residual is not r + x"
    check_sum(case, [v.astype(np.float64) for v in case.accumulated], residuals, result, exact=case.exact(case.P))


def check_sum(case: Case, entered: list[Vector], residuals: list[Any], result: Vector, *, exact: bool) -> None:
    """Check that the contributions ``entered`` are in the result or in residuals; ``exact``: to the bit."""
    if not all(np.isfinite(v).all() for v in entered):
        return
    applied = result.astype(np.float64) * case.divisor
    left = np.sum(residuals, axis=0, dtype=np.float64)
    if exact:
        assert same(left + np.rint(applied), np.sum(entered, axis=0)), "the sum is not conserved"
        return
    eps = max(np.finfo(np.float32).eps, {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(case.residual, 0.0))
    size = np.sum(np.abs(entered), axis=0) + np.abs(applied)
    size = size.max(initial=0) if case.few_bits else size
    error = np.abs(left + applied - np.sum(entered, axis=0))
    assert np.all(error <= 4 * case.P * eps * size + 1e-6), "the sum is not conserved, beyond rounding"


# -- with a fault -----------------------------------------------------------------------------------------------------


def check_fault(case: Case, clean: list[Outcome], counts: Counter[str]) -> None:
    xs, again = case.gradients(0), case.gradients(1)
    network = Network(case.nodes, case.seed + 1)
    first, second = dict[int, Outcome](), dict[int, Outcome]()
    victim = network.ranks[case.victim]
    faults = {"interrupt": KeyboardInterrupt(), "error": OSError("of the fault"), "crash": Crash()}
    victim.fault = faults.get(case.fault)
    victim.fault_step = 1 + int(case.when * clean[case.victim].steps)

    def program(rank: Rank) -> None:
        first[rank.rank] = call(case, rank, xs[rank.rank], case.residuals[rank.rank], case.fault)
        rank.fault = None
        network.barrier(rank)
        if case.fault == "crash":
            return
        sc.realign(rank)
        second[rank.rank] = call(case, rank, again[rank.rank], first[rank.rank].residual)

    network.run(program)
    assert not network.violations, network.violations
    for rank, outcome in first.items():
        check_outcome(case, rank, outcome, clean[rank], counts)
    if second:
        expected = make(case, case.seed + 2, again, [first[rank].residual for rank in range(case.P)])
        for rank, outcome in second.items():
            assert outcome.error is None, f"the next call: rank {rank} raised {outcome.error!r}"
        if case.rounds_by_history(algorithm_of(case)):
            check_equal([second[rank] for rank in range(case.P)])
            if case.residual:
                entered = [np.float64(first[rank].residual) + np.float64(again[rank]) for rank in range(case.P)]
                left = [second[rank].residual for rank in range(case.P)]
                check_sum(case, entered, left, second[0].dense, exact=case.exact(2 * case.P))
            expected = [second[rank] for rank in range(case.P)]
        for rank, outcome in second.items():
            assert same(outcome.dense, expected[rank].dense), f"the next call: rank {rank} has a wrong result"
            if outcome.residual is not None and expected[rank].residual is not None:
                assert same(outcome.residual, expected[rank].residual), f"the next call: rank {rank}'s residual"
        counts["next calls after a fault"] += 1


def check_outcome(case: Case, rank: int, outcome: Outcome, clean: Outcome, counts: Counter[str]) -> None:
    if outcome.error is None:
        counts["ranks done in spite of a fault"] += 1
        assert same(outcome.dense, clean.dense), f"rank {rank}: another result than without the fault"
    elif rank == case.victim and case.fault != "mismatch":
        counts[f"victims that raised {type(outcome.error).__name__}"] += 1
    else:
        counts[f"ranks that raised {type(outcome.error).__name__}"] += 1
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
        unchanged = same(outcome.residual, case.stored[rank])
        assert unchanged or (committed and rank == case.victim), (
            f"rank {rank} raised {outcome.error!r}, and its residual is neither residual + x nor committed with out"
        )


class Calls(Numbered):
    unit, chunk = "calls", 2000
    options = (*numbered(unit, 10_000), ("max_ranks", 33, "ranks, at most"), SANITIZED)

    def check(self, number: int) -> None:
        case = self.case = Case(self.report.seed, number, self.arguments.max_ranks)
        clean = make(case, case.seed, case.gradients(0), case.residuals)
        check_result(case, clean)
        self.counts["calls without a fault"] += 1
        if case.fault in ("interrupt", "error") or (case.fault != "none" and case.P > 1):
            check_fault(case, clean, self.counts)
            self.counts[f"calls with fault {case.fault}"] += 1
