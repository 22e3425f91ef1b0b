"""The state of a `Reducer`: resume, scale and discard; counters, loggers and ``repr``."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.quantities import percent_text
from sparsecomm.transport import simulated
from tests import data
from tests.ranks import number_reducers_from_0, run
from tests.reducer.programs import MIXED, SHAPES, bits, gradients, reducer_of, residuals, same

CHECK = settings(max_examples=6, phases=[Phase.generate])
DTYPES = {name: MIXED[name] for name in SHAPES}
OPTIONS = {
    "scope": st.sampled_from(["tensor", "bucket", "model"]),
    "density": st.sampled_from([0.1, sc.Warmup(0.01, 4, dense_steps=1)]),
    "skip_nonfinite": st.booleans(),
}
SUMS = st.sampled_from(
    [
        {"op": "mean"},
        {"op": "mean", "algorithm": "split"},
        {"op": "mean_of_contributors", "algorithm": "split:2", "wire": "packed_int2"},
    ]
)
MOMENTA = [{}, {"momentum": 0.9}]


@pytest.mark.parametrize("layout", ["0", "00", "00011", "0011", "010110"])
def test_a_run_that_resumes_from_a_state_is_bit_identical(layout: str) -> None:
    @CHECK
    @given(data.seeds, st.integers(0, 5), st.fixed_dictionaries(OPTIONS), SUMS, st.sampled_from(MOMENTA))
    def check(seed: int, stop: int, options: dict[str, Any], sums: dict[str, Any], momenta: dict[str, Any]) -> None:
        options = options | sums | momenta
        dtypes = (
            DTYPES if "wire" not in sums else {**DTYPES, **{n: "float32" for n, t in DTYPES.items() if t == "float64"}}
        )

        def program(transport: simulated.SimulatedTransport, *, stops: bool) -> Any:
            def made() -> sc.Reducer:
                return reducer_of(transport, tensors=gradients(0, dtypes=dtypes), **options)

            reducer, history = made(), []
            for step in range(6):
                if step == stop:
                    state = copy.deepcopy(reducer.state_dict())
                if step == stop and stops:
                    number_reducers_from_0(transport)  # as in a new process
                    reducer = made()
                    reducer.load_state_dict(state)
                    assert bits(reducer.state_dict()["residuals"]) == bits(state["residuals"])
                mine = gradients(seed + 10 * step + transport.rank, dtypes=dtypes, normal=True)
                if options["skip_nonfinite"] and step == 2 and transport.rank == 0:
                    mine["a"][0, 0] = np.inf
                for name in sorted(mine, reverse=bool(seed % 2)):
                    reducer.push(name, mine[name])
                done = reducer.wait()
                history.append((done.number, done.density, done.usable, bits(mine), reducer.groups))
            return history, bits(residuals(reducer)), bits(reducer.state_dict()["velocities"])

        stopped, others = (
            run(len(layout), partial(program, stops=resumes), nodes=[*map(int, layout)]) for resumes in (True, False)
        )
        assert stopped == others

    check()


@pytest.mark.parametrize("load", [True, False])
def test_measured_links_are_in_the_state(load: bool) -> None:
    """A resumed run chooses as before even if its links have changed, unless "costs" is ``None`` in the state."""

    def program(transport: simulated.SimulatedTransport, state: dict[str, Any] | None) -> Any:
        reducer = reducer_of(transport, algorithm="fastest")
        if state is not None:
            reducer.load_state_dict(state if load else state | {"costs": None})
        reducer.reduce(gradients(transport.rank))
        return reducer.state_dict()

    def measured(state: dict[str, Any]) -> Any:
        return state["costs"]["link"][0]

    P = 3
    before = simulated.run(P, lambda transport: program(transport, None), alpha=1e-4, beta=1e-9)
    assert {measured(result.value) for result in before} == {1e-4}
    states = [result.value for result in before]
    after = simulated.run(P, lambda transport: program(transport, states[transport.rank]), alpha=1e-2, beta=1e-9)
    assert {measured(result.value) for result in after} == {1e-4 if load else 1e-2}
    assert sc.reshard(states, 0, 2)["costs"] is None


def test_scale_and_discard_change_residuals_and_velocities() -> None:
    """An unknown name changes nothing."""

    def program(transport: simulated.SimulatedTransport) -> None:
        for names, remaining in ((["a", "c"], "bdef"), ("f", "bde"), (None, "")):
            reducer = reducer_of(transport, algorithm="double", momentum=0.5, masking=False)
            reducer.reduce(gradients(transport.rank))
            before = reducer.state_dict()
            with pytest.raises(sc.InvalidInputError, match="'x' is not the name of one of this Reducer"):
                reducer.discard(["a", "x"])
            reducer.scale(0.5)
            if names == "f":
                reducer.discard(["a", "c"])
            reducer.discard(names)
            after = reducer.state_dict()
            for kind in ("residuals", "velocities"):
                same(after[kind], {name: 0.5 * array * (name in remaining) for name, array in before[kind].items()})
            reducer.reduce(gradients(5))

    run(3, program)


@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize("algorithm", ["split", "dense", "allgather"])
def test_counters_and_loggers(P: int, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")  # excludes messages that measure links

    def program(transport: simulated.SimulatedTransport) -> Any:
        logged: list[tuple[int, dict[str, float]]] = []
        options = {"scope": "tensor", "algorithm": algorithm, "wire": "plain"}
        reducer = reducer_of(transport, on_step=lambda step, numbers: logged.append((step, numbers)), **options)
        applied, size = 0, sum(int(np.prod(shape)) for shape in SHAPES.values())
        for step in range(3):
            mine = gradients(10 * step + transport.rank)
            reducer.reduce(mine)
            applied_now = sum(np.count_nonzero(a) for a in mine.values())
            assert logged[-1][0] == step
            numbers = logged[-1][1]
            assert all(name.startswith("sparsecomm/") for name in numbers)
            assert all(isinstance(value, (int, float)) for value in numbers.values())
            if algorithm != "dense":
                # Dense sums have zeros.
                small = [mine[name].size - np.count_nonzero(mine[name]) for name in ("b", "e")]
                assert numbers["sparsecomm/applied"] - applied_now in (0, sum(small))
            assert numbers["sparsecomm/density"] == numbers["sparsecomm/applied"] / size
            applied += numbers["sparsecomm/applied"]
        counters = reducer.counters
        assert (counters.steps, counters.calls, counters.elements, counters.applied) == (3, 12, 3 * size, applied)
        assert (counters.bytes_sent, counters.bytes_received, counters.messages_sent) == (
            transport.counters.bytes_sent,
            transport.counters.bytes_received,
            transport.counters.messages_sent,
        )
        assert counters.bytes_sent == sum(numbers["sparsecomm/bytes_sent"] for _, numbers in logged)
        assert counters.bytes_dense == pytest.approx(3 * 2 * (P - 1) / P * 4 * size, abs=counters.calls)
        if algorithm == "dense":
            assert abs(counters.bytes_sent - counters.bytes_dense) < 256 * max(1, counters.messages_sent)  # for headers
        report = reducer.report()
        assert "this rank, per step  mean of 3 steps" in report
        assert ("; sparse is " in report.partition("dense would send")[2]) == (P > 1)
        assert f"({percent_text(counters.density)})" in report
        counters.reset()
        assert counters.calls == 0
        assert counters.density == 0
        return applied

    assert len(set(run(P, program))) == 1


def test_repr_says_settings_and_place() -> None:
    def program(transport: simulated.SimulatedTransport) -> str:
        reducer = sc.Reducer({"x": np.zeros((3, 4), np.float32)}, sc.Warmup(0.5, 1), comm=transport)
        assert repr(reducer).endswith("scope='bucket'; step 0, not connected yet)")
        reducer.reduce({"x": np.ones((3, 4), np.float32)})
        return repr(reducer)

    said = run(2, program)[1]
    assert said.startswith("Reducer(1 tensors of 12 elements, density=Warmup(density=0.5, steps=1")
    assert said.endswith("algorithm='auto', op='mean', wire='auto', scope='bucket'; step 1, rank 1 of 2)")
