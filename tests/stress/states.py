"""Damaged states on one rank or on all: either all ranks load equal states, or all refuse and nothing changes.

In each case, ranks train, save their states, train further, and load the states, some of them damaged. Either every
rank raises `InvalidInputError` (or the `KeyboardInterrupt` of its state), and not a bit changes. Or all ranks load, and
the next steps have the same results on all ranks. The same holds for `reshard`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.stress.harness import Numbered, Ranks, numbered
from tests.stress.mutations import damaged_state
from tests.stress.subjects import KINDS, ON_HOST, Subject, digest

TIMEOUT = 30  # seconds: SPARSECOMMTIMEOUT, on real ranks
REFUSED = ("InvalidInputError", "KeyboardInterrupt")


class Outcome(NamedTuple):
    """A rank's outcome: type and text of its error, whether its state changed, and whether it was late."""

    error: str
    raised: str
    changed: bool
    late: bool


@dataclass
class Case:
    """A case, determined by its number: a subject, and the ranks whose states are damaged."""

    seed: int
    number: int
    P: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.number])
        parts = np.array([part for _, part in KINDS.values()])
        self.kind = list(KINDS)[rng.choice(len(parts), p=parts / parts.sum())]
        self.ranks_damaged = str(rng.choice(["one", "all alike", "all", "none"], p=[0.6, 0.2, 0.17, 0.03]))
        self.victim = int(rng.integers(self.P))
        self.steps = [int(n) for n in rng.integers(0, 6, 2)]
        self.resharded = self.kind in ON_HOST and bool(rng.random() < 0.15)
        self.of_subject = int(rng.integers(2**31))

    def play(self, comm: Any, rank: int, gather: Callable[[Any], list[Any]]) -> tuple[list[Outcome], str]:
        """Play the case on a rank. ``gather`` all-gathers objects.

        Returns:
            The outcome on each rank, and a digest of this rank's common values after further steps, if all loaded.
        """
        subject = KINDS[self.kind][0](comm, rank, np.random.default_rng(self.of_subject))
        for _ in range(self.steps[0]):
            subject.step()
        state = subject.it.state_dict()
        states = gather(state) if self.resharded else [state] * self.P
        for _ in range(self.steps[1]):
            subject.step()
        subject.finish()
        before, error, raised = digest(subject.own()), "", "loaded"
        mine = [self._damaged(state, r if self.resharded else rank, subject.part) for r, state in enumerate(states)]
        began = time.monotonic()
        try:
            subject.it.load_state_dict(sc.reshard(mine, rank, self.P) if self.resharded else mine[rank])
        except BaseException as e:
            error = type(e).__name__
            raised = f"{error}: {e!s:.300}".encode(errors="replace").decode()
        late = time.monotonic() - began > TIMEOUT / 2
        outcomes = gather(Outcome(error, raised, digest(subject.own()) != before, late))
        return outcomes, "" if any(one.error for one in outcomes) else _train_further(subject)

    def _damaged(self, state: Any, rank: int, part: str | None) -> Any:
        if self.ranks_damaged == "none" or (self.ranks_damaged == "one" and rank != self.victim):
            return state
        seed = [self.seed, self.number, 1] + [rank] * (self.ranks_damaged == "all")
        return damaged_state(state, np.random.default_rng(seed), part if self.ranks_damaged == "all alike" else None)

    def simulate(self) -> list[Outcome]:
        gathered: list[dict[int, Any]] = []

        def program(transport: simulated.SimulatedTransport) -> tuple[list[Outcome], str]:
            count = 0

            def gather(mine: Any) -> list[Any]:
                nonlocal count
                gathered.extend([{}] * (count == len(gathered)))
                gathered[count][transport.rank] = mine
                sc.check_weights({"a": np.zeros(1)}, comm=transport)  # a barrier
                count += 1
                return [gathered[count - 1][rank] for rank in range(self.P)]

            return self.play(transport, transport.rank, gather)

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            outcomes, after = zip(*(result.value for result in simulated.run(self.P, program)), strict=True)
        self.judge(outcomes[0], after)
        return outcomes[0]

    def judge(self, outcomes: list[Outcome], after: Sequence[str]) -> None:
        errors_text = "; ".join(f"rank {rank}: {one.raised}" for rank, one in enumerate(outcomes))
        what, errors = f"{self.kind}, {self.ranks_damaged}: ", [one.error for one in outcomes]
        assert not any(one.late for one in outcomes), f"{what}took as long as a timeout: {errors_text}"
        if not any(errors):
            assert not any(text.startswith("further steps raised") for text in after), (
                f"{what}loaded, and further steps fail: {after}"
            )
            assert len(set(after)) == 1, f"{what}all loaded, and differ afterwards: {after}"
            return
        assert all(error in REFUSED for error in errors), f"{what}some ranks neither loaded nor refused: {errors_text}"
        assert self.ranks_damaged != "none", f"{what}a good state was refused: {errors_text}"
        changed = [rank for rank, one in enumerate(outcomes) if one.changed]
        assert not changed, f"{what}refused, and changed on {changed}: {errors_text}"


def _train_further(subject: Subject) -> str:
    """Train further, and return a digest of the common values, or the error as text."""
    try:
        common = [subject.common(), *(subject.step() for _ in range(5))]
        subject.finish()
        return digest([*common, subject.common()])
    except BaseException as e:
        return f"further steps raised {type(e).__name__}: {e!s:.500}"


class States(Numbered):
    unit, chunk, timeout = "states", 250, TIMEOUT
    options = (*numbered(unit, 10_000), ("over", "simulated", "or mpi, or gloo"))

    def run(self) -> None:
        if self.arguments.over == "simulated":
            super().run()
        else:
            self.start_ranks(2, 120 + 2.0 * self.arguments.states, self.arguments.over)

    def check(self, number: int) -> None:
        case = Case(self.report.seed, number, 2 + number % 2)
        self._count(case, case.simulate())

    def on_rank(self, ranks: Ranks) -> None:
        warnings.simplefilter("ignore")
        np.seterr(all="ignore")
        for number in range(self.arguments.first, self.arguments.first + self.arguments.states):
            case = Case(self.report.seed, number, ranks.size)
            case.resharded = False
            outcomes, further = case.play(ranks.comm, ranks.rank, ranks.gather)
            after = ranks.gather(further)
            if ranks.rank == 0:
                self._count(case, outcomes)
                try:
                    case.judge(outcomes, after)
                except AssertionError as wrong:
                    self.fail(f"state {number}, {wrong}", first=number, states=1)
            if any(one.error not in ("", *REFUSED) for one in outcomes):
                sc.realign(ranks.comm)
            self.progress(f"{number + 1 - self.arguments.first} of {self.arguments.states} states")

    def _count(self, case: Case, outcomes: list[Outcome]) -> None:
        outcome = "refused" if outcomes[0].error else "loaded"
        self.counts[f"{case.kind}{' after reshard' if case.resharded else ''}: {outcome}"] += 1
        self.counts["cases"] += 1
