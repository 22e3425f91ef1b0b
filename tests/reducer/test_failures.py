"""Refused arguments, NaN, and the state of a `Reducer` after an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.calls.collectives import SumCall
from sparsecomm.calls.label import Label
from sparsecomm.transport import simulated
from tests.ranks import run
from tests.reducer.programs import SHAPES, Arrays, bits, copies, gradients, reducer_of, residuals, same, total

several = pytest.mark.parametrize("P", [3])
every_scope = pytest.mark.parametrize("scope", ["tensor", "bucket", "model"])


# -- refused ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[sc.Reducer, Arrays], Any], str]] = {
    "pushed twice": (lambda r, g: r.push("a", g["a"]), "'a' was pushed in step 0 already"),
    "unknown": (lambda r, g: r.push("aa", g["a"]), "'aa' is not the name .* did you mean 'a'"),
    "unknown residual": (lambda r, g: r.residual("cc"), "did you mean 'c'"),
    "shape": (lambda r, g: r.push("c", g["a"]), r"c: got shape \(20, 30\).*expected shape \(500,\)"),
    "type": (lambda r, g: r.push("c", g["c"].astype(np.float64)), "c: got .*float64.*expected .*float32"),
    "integers": (lambda r, g: r.push("c", g["c"].astype(int)), "c: got elements of type int64"),
    "shape of out": (lambda r, g: r.push("c", g["c"], out=np.zeros(3, np.float32)), r"got shape \(3,\)"),
    "type of out": (lambda r, g: r.push("c", None, out=np.zeros(500)), "out of c: got .*float64"),
    "state": (lambda r, g: r.state_dict(), "state_dict in the middle of step 0"),
    "load": (lambda r, g: r.load_state_dict({}), "load_state_dict in the middle of step 0"),
    "scale": (lambda r, g: r.scale(2.0), "scale in the middle of step 0"),
    "no scale": (lambda r, g: r.scale(0.0), "must be a positive number"),
    "discard": (lambda r, g: r.discard(["b"]), "discard in the middle of step 0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what: str) -> None:
    def program(transport: simulated.SimulatedTransport, wrong: bool) -> Any:
        reducer, mine = reducer_of(transport, momentum=0.5), gradients(transport.rank)
        reducer.push("a", mine["a"])
        if wrong and transport.rank == 1:
            act, message = REFUSED[what]
            with pytest.raises(sc.InvalidInputError, match=message):
                act(reducer, mine)
        for name in SHAPES:
            if name != "a":
                reducer.push(name, mine[name])
        reducer.wait()
        return bits(mine), bits(residuals(reducer))

    assert run(2, lambda r: program(r, True)) == run(2, lambda r: program(r, False))


# -- ranks that differ ------------------------------------------------------------------------------------------------


@several
def test_two_reducers_in_another_order(P: int) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        both = [reducer_of(transport), reducer_of(transport)]
        for reducer in both:
            reducer.reduce(gradients(transport.rank))
        for reducer in reversed(both) if transport.rank == 1 else both:
            with pytest.raises(sc.CollectiveMismatchError, match=r"is in a step of Reducer \d, and rank \d in a"):
                reducer.reduce(gradients(transport.rank))
        for reducer in both:
            reducer.reduce(gradients(transport.rank))
        assert transport.describe_call() == f"call {transport.number}, step 2 of Reducer 1"

    run(P, program)


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rank 1's call for the tensor "c" differ from the other ranks' in the first step."""
    run_ = SumCall.run

    def fails(self: SumCall) -> Any:
        if self.transport.rank == 1 and self.contribution.size == 500 and self.transport.number < 4:
            self.label = Label.of(("call", "another"))
        return run_(self)

    monkeypatch.setattr(SumCall, "run", fails)


MISMATCH = "rank 0 is in .*, and rank 1 in another|rank 1 is in another"


@several
@pytest.mark.usefixtures("another")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("whole", "infinite"), [(False, False), (True, False), (True, True)])
def test_an_error_in_one_call_loses_nothing_and_the_next_step_works(
    P: int, momentum: float, whole: bool, infinite: bool
) -> None:
    """The sums of other calls are applied, unless ``skip_nonfinite`` makes the step all or nothing."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        options = {"momentum": momentum, "masking": False, "skip_nonfinite": whole}
        reducer = reducer_of(transport, scope="tensor", algorithm="split", **options)
        applied, pushed, u = [], [], dict.fromkeys(SHAPES, 0.0)
        for step in range(3):
            mine = gradients(transport.rank + 10 * step)
            u = {name: momentum * u[name] + mine[name] for name in SHAPES}
            pushed.append(copies(u))
            outs = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            if step == 0 and infinite and transport.rank == 0:
                mine["f"][3, 3] = np.inf
                pushed[0]["f"] = 0 * pushed[0]["f"]
                u["f"] = pushed[0]["f"]
            for name in SHAPES:
                reducer.push(name, mine[name], out=outs[name])
            if step == 0:
                with pytest.raises(sc.CollectiveMismatchError, match=MISMATCH):
                    reducer.wait()
                assert not outs["c"].any()
                assert outs["a"].any()
                assert set(reducer.unsummed) == ({"a", "b", "c", "e", "f"} if whole else {"c"})
                for name in reducer.unsummed:
                    outs[name][...] = 0
            else:
                assert reducer.wait().number == step
            applied.append(outs)
        return total(pushed), total(applied), residuals(reducer)

    results = run(P, program)
    same(total([*(r[2] for r in results), results[0][1]]), total(r[0] for r in results))


# -- NaN --------------------------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
@every_scope
@pytest.mark.parametrize(
    ("algorithm", "wire"),
    [
        ("butterfly", "packed_int8"),
        ("split", "plain"),
        ("dense", "plain"),
        ("tree", "packed_float16"),
        ("allgather", "packed"),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_is_used_by_none(P: int, scope: str, algorithm: str, wire: str) -> None:
    for poisoned, bad in (("a", np.nan), ("b", np.inf), ("c", -np.inf)):

        def program(transport: simulated.SimulatedTransport, poisoned: str = poisoned, bad: float = bad) -> Any:
            options = {"scope": scope, "algorithm": algorithm, "wire": wire}
            reducer = reducer_of(transport, skip_nonfinite=True, **options)
            steps = []
            for step in range(4):
                mine = gradients(transport.rank + 10 * step)
                pushed = copies(mine)
                if step in (1, 2) and transport.rank == P - 1:
                    mine[poisoned].reshape(-1)[3] = bad
                    pushed[poisoned][...] = 0
                before = residuals(reducer)
                usable, cause = (done := reducer.reduce(mine)).usable, done.cause
                where = f"the gradient of {poisoned} on this" if transport.rank == P - 1 else "a gradient of another"
                expected = "" if usable else f"rank {transport.rank}: {where} rank is not finite"
                assert cause[: len(expected) or None] == expected
                steps.append((usable, before, pushed, mine, residuals(reducer)))
            assert reducer.counters.skipped == 2
            return steps

        for step, by_rank in enumerate(zip(*run(P, program), strict=True)):
            assert len({str(bits(mine)) for _, _, _, mine, _ in by_rank}) == 1
            if step in (1, 2):
                assert not any(usable for usable, *_ in by_rank)
                assert not all(np.isfinite(a).all() for a in by_rank[0][3].values())
                for _, before, pushed, _, after in by_rank:  # each rank's gradient returns to its residual
                    same(after, total([before, pushed]))
            else:
                assert all(usable for usable, *_ in by_rank)
                before, pushed, after = (total(rank[i] for rank in by_rank) for i in (1, 2, 4))
                same(total([after, by_rank[0][3]]), total([before, pushed]))


@pytest.mark.parametrize("algorithm", ["auto", "split", "ssar_split_allgather", "dense"])
@pytest.mark.parametrize("what", ["residual", "sum"])
def test_finite_gradients_that_overflow_make_a_step_unusable_once(algorithm: str, what: str) -> None:
    """The overflow is in one rank's residual, or only in the sum over ranks. The next step works."""

    def program(transport: simulated.SimulatedTransport) -> None:
        options = {"skip_nonfinite": True, "dense_below": 0, "wire": "packed"}
        zeros = {"x": np.zeros(64, np.float32)}
        density = sc.Warmup(0.2, 0)
        reducer = sc.Reducer(zeros, density, comm=transport, op="sum", algorithm=algorithm, **options)
        outcomes = []
        for step in range(4):
            x, big = np.full(64, 1.0 + transport.rank, np.float32), np.float32(3e38)
            if step == 1 and (what == "sum" or transport.rank == 0):
                if what == "residual":
                    reducer.residual("x")[9] = big
                x[9] = big
            reducer.push("x", x)
            outcomes.append(reducer.wait().usable)
            assert np.isfinite(reducer.residual("x")).all()
        assert outcomes == [True, False, True, True]

    simulated.run(2, program)
