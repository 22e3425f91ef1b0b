"""`LocalSteps` of arrays: all options of a reducer, errors of exchanges, NaN, refused arguments, outer optimizers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.local_steps.programs import DTYPES, PLAIN, SHAPES, initial, made, move, train
from tests.ranks import run
from tests.reducer.programs import bits

TWO = (("f", "a"), ("b", "c", "d", "e"))


# -- errors -----------------------------------------------------------------------------------------------------------


def failing(local: sc.LocalSteps, parameters: Any, rank: int, step: int, error: type[Exception], match: str) -> None:
    """Check that an exchange that fails resets local parameters to the global ones, and keeps changes in residuals."""
    before, globals_ = local.state_dict()["reducers"], local.global_parameters()
    unchanged = bits(globals_)
    move(parameters, rank, step)
    moved = {name: globals_[name] - parameters[name] for name in globals_}
    with pytest.raises(error, match=match):
        local.step(parameters)
    assert bits(globals_) == unchanged
    for name, array in globals_.items():
        np.testing.assert_array_equal(parameters[name], array.astype(DTYPES[name]))
    for reducer, old in zip(local.reducers, before, strict=True):
        for name in reducer.names:
            np.testing.assert_array_equal(reducer.residual(name), old["residuals"][name] + moved[name])


@pytest.mark.parametrize(
    ("uneven", "error", "match"),
    [
        (True, sc.CollectiveMismatchError, "sync_every is .*2 on rank 1.*same sync_every"),
        (False, sc.WeightMismatchError, "parameters of rank 1 in fragment 0 differ"),
    ],
)
def test_ranks_that_differ_are_told_on_all_ranks_and_nothing_is_lost(uneven: bool, error: Any, match: str) -> None:
    """Ranks take different numbers of local steps, or begin with different parameters."""

    def program(transport: simulated.SimulatedTransport) -> int:
        parameters, odd = initial(), transport.rank == 1
        parameters["c"][5] += odd and not uneven
        sync_every = 2 if odd and uneven else 3
        local = made(transport, parameters, sync_every=sync_every, decay=1.0)
        train(local, parameters, transport.rank, 1, sync_every - 1)
        failing(local, parameters, transport.rank, sync_every, error, match)
        return local.round

    assert run(3, program) == [1, 1, 1]


@pytest.mark.parametrize("fragments", [1, TWO])
def test_nan_on_one_rank_counts_for_nobody(fragments: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sparsecomm")

    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        options = {"sync_every": 2, "decay": 1.0, "fragments": fragments, "fragment_update_alpha": 0.5}
        local = made(transport, parameters, **options)
        train(local, parameters, transport.rank, 1, 4)
        before, globals_ = local.state_dict(), {name: array.copy() for name, array in local.global_parameters().items()}
        move(parameters, transport.rank, 5)
        if transport.rank == 1:
            for name in ("a", "e", "f"):
                parameters[name][...] = np.nan
        replaced = local.step(parameters)
        if fragments == 1:
            assert replaced == ()
            moved = {name: array - parameters[name] for name, array in globals_.items()}
            replaced = local.step(parameters)
            assert bits(local.global_parameters()) == bits(globals_)
            for name, residual in before["reducers"][0]["residuals"].items():
                dropped = transport.rank == 1 and name in ("a", "e", "f")
                expected = residual if dropped else residual + moved[name]
                np.testing.assert_array_equal(local.reducers[0].residual(name), expected)
        for name in replaced:
            np.testing.assert_array_equal(parameters[name], globals_[name].astype(DTYPES[name]))
        assert all(np.isfinite(values).all() for values in parameters.values())
        return replaced, [reducer.counters.skipped for reducer in local.reducers]

    replaced = run(2, program)
    if fragments == 1:
        assert replaced == [(tuple(SHAPES), [1])] * 2
    else:
        assert replaced == [(TWO[0], [1, 0]), ((*TWO[0], "e"), [1, 0])]
    first = next(name for name in (SHAPES if fragments == 1 else TWO[0]) if name in "aef")
    assert f"fragment 0 was not applied: rank 1: the pseudo-gradient of {first} on this rank is not fin" in caplog.text
    assert "fragment 0 was not applied: rank 0: a pseudo-gradient of another rank is not finite" in caplog.text


@pytest.mark.parametrize("what", ["parameter", "float16 parameter", "velocity"])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_an_outer_step_that_would_overflow_counts_for_nobody(what: str, density: float) -> None:
    """All pseudo-gradients are finite. The next round is applied again."""
    dtype = np.float16 if what == "float16 parameter" else np.float32
    big = float(np.finfo(dtype).max) * 0.9

    def program(transport: simulated.SimulatedTransport) -> bytes:
        parameters = {"a": np.ones(40, dtype), "b": np.ones(3, dtype)}
        parameters["a"][5] = big
        outer = sc.NesterovSGD(0.7, 0.9, nesterov=False) if what == "velocity" else None
        options = PLAIN | {"sync_every": 1, "decay": 1.0, "outer": outer}
        local = sc.LocalSteps(parameters, density, comm=transport, **options)
        for round_no in range(4):
            before = {name: array.copy() for name, array in local.global_parameters().items()}
            overflows = round_no == (2 if what == "velocity" else 1)
            for name in parameters:
                parameters[name] += dtype(1 + transport.rank)
            if what == "velocity":
                parameters["a"][5] = before["a"][5] + dtype(-0.15 * big if overflows else 1)
                if overflows:
                    outer._velocities["a"][5] = np.finfo(dtype).max
            elif overflows:
                local.reducers[0].residual("a")[5] = -0.2 * big
            local.step(parameters)
            same = all(np.array_equal(before[name], array) for name, array in local.global_parameters().items())
            assert same == overflows
            arrays = [*parameters.values(), *local.global_parameters().values(), local.reducers[0].residual("a")]
            assert all(np.isfinite(array).all() for array in arrays)
        assert all(np.isfinite(velocity).all() for velocity in outer._velocities.values()) if outer else True
        return local.global_parameters()["a"].tobytes()

    first, second = run(2, program)
    assert first == second


def test_a_program_that_ends_in_the_middle_of_an_exchange_applies_it() -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = made(transport, parameters, sync_every=4, fragment_sync_delay=2, fragments=2)
        train(local, parameters, transport.rank, 1, 3)  # to the middle of the second fragment's exchange
        first = local.finish(parameters)
        assert local.finish(parameters) == ()
        assert train(local, parameters, transport.rank, 4, 4) == [()]
        return first, local.fragments[1], bits(local.global_parameters())

    results = run(2, program)
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_of_a_large_model_takes_as_few_trips_as_one_of_a_small_one(delay: int) -> None:
    def program(transport: simulated.SimulatedTransport) -> list[float]:
        random = np.random.default_rng(transport.rank)
        parameters = {name: np.zeros(400_000, np.float32) for name in "abcd"}
        local = sc.LocalSteps(parameters, sync_every=2, comm=transport, algorithm="split:2", fragment_sync_delay=delay)
        seconds = []
        for _ in range(4):
            for values in parameters.values():
                values += random.standard_normal(values.size, np.float32)
            before = transport.clock()
            local.step(parameters)
            local.step(parameters)
            seconds.append(transport.clock() - before)
        return seconds

    for result in simulated.run(3, program, alpha=1.0):
        assert result.value is not None
        assert min(result.value) <= 3.0  # latencies: two for the sums, one for the agreement


# -- refused arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"fragments": 7}, "from 1 to 6"),
        ({"fragments": "abc"}, "fragments='abc'"),
        ({"fragments": [["a", "b"], []]}, "lists of at least one name"),
        ({"fragments": [["a", "zz"]]}, "'zz' is not one of the 6"),
        ({"fragments": [["a", "b"], ["b"]]}, "'b' repeated"),
        ({"fragments": [["a", "b", "c"]]}, "'d', 'e', 'f' missing"),
        ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1"),
        ({"fragment_sync_delay": 4}, "fragment_sync_delay=4 with sync_every=4"),
        ({"fragments": 5}, "sync_every=4 with 5 fragments"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha=1.5"),
        ({"op": "sum"}, "op='sum'"),
        ({"decay": 0.0}, "decay=0.0"),
    ],
)
def test_what_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=message):
        sc.LocalSteps(initial(), **({"sync_every": 4, "scope": "tensor"} | options))


def test_parameters_that_are_others_are_refused_and_the_step_does_not_count() -> None:
    parameters = initial()
    readonly = np.zeros(3, np.float32)
    readonly.flags.writeable = False
    with pytest.raises(sc.InvalidInputError, match="x: got a read-only"):
        sc.LocalSteps({"x": readonly}, scope="tensor")

    def program(transport: simulated.SimulatedTransport) -> None:
        local = made(transport, parameters, sync_every=2)
        for others, message in (
            ({name: a for name, a in parameters.items() if name != "b"}, "missing 'b'; unknown nothing"),
            (parameters | {"z": np.zeros(3)}, "missing nothing; unknown 'z'"),
            (parameters | {"b": np.zeros(8, np.float32)}, r"'b' has shape \(8,\)"),
            (list(parameters), "got list"),
        ):
            with pytest.raises(sc.InvalidInputError, match=message):
                local.step(others)
        local.step(parameters)
        with pytest.raises(sc.InvalidInputError, match=r"b: got shape \(7,\), float64 .* sums in float32"):
            local.step(parameters | {"b": np.zeros(7, np.float64)})
        assert (local.local_step, transport.number) == (1, 0)

    run(1, program)


@pytest.mark.parametrize("arguments", [(0.0,), (-1,), ("1",), (0.7, 1.0), (0.7, -0.1)])
def test_an_outer_optimizer_that_cannot_be(arguments: Any) -> None:
    with pytest.raises(sc.InvalidInputError, match=r"learning_rate=|momentum="):
        sc.NesterovSGD(*arguments)
