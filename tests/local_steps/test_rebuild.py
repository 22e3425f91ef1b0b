"""`rebuild` of local steps: with lost ranks, with new ranks, and with ranks that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.local_steps import exchange, local_steps
from sparsecomm.transport import simulated
from tests.local_steps.programs import SHAPES, Arrays, initial, made, train
from tests.ranks import run
from tests.reducer.programs import bits

ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())
SETTINGS: dict[str, Any] = {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1}


def trained(P: int, steps: int, outer: Any = sc.NesterovSGD, density: Any = 0.1) -> list[tuple[sc.LocalSteps, Arrays]]:
    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = made(transport, parameters, density, outer=outer and outer(), **SETTINGS)
        train(local, parameters, transport.rank, 1, steps)
        return local, parameters

    results: list[tuple[sc.LocalSteps, Arrays]] = run(P, program)
    return results


def residuals(local: sc.LocalSteps) -> Arrays:
    return {name: reducer.residual(name).copy() for reducer in local.reducers for name in reducer.names}


@pytest.mark.parametrize("steps", [4, 6])  # between rounds, and in the middle of one
@pytest.mark.parametrize("outer", [None, sc.NesterovSGD])
def test_survivors_keep_what_they_have_and_a_new_rank_gets_the_rest(steps: int, outer: Any) -> None:
    """Rank 1 of 4 is gone. A new rank with other parameters becomes rank 0."""
    density = sc.Warmup(0.1, 2)
    ranks_of = trained(4, steps, outer, density)
    stay = [ranks_of[rank] for rank in (0, 2, 3)]

    def program(transport: simulated.SimulatedTransport) -> Any:
        new = transport.rank == 0
        if new:
            parameters = {name: np.asarray(values * 7) for name, values in initial().items()}
            local = made(transport, parameters, density, outer=outer and outer(), **SETTINGS)
        else:
            local, parameters = stay[transport.rank - 1]
        before = bits(residuals(local)), bits(local.global_parameters()), bits(parameters)
        rebuilt = local.rebuild(transport, parameters, joining=new)
        if new:
            assert not any(residual.any() for residual in residuals(local).values())
            for name, array in local.global_parameters().items():
                np.testing.assert_array_equal(parameters[name], array.astype(parameters[name].dtype))
        else:
            assert (bits(residuals(local)), bits(local.global_parameters()), bits(parameters)) == before
        train(local, parameters, transport.rank, steps + 1, 12)
        velocities = bits(local.state_dict()["outer"]["velocities"]) if outer else None
        return rebuilt, (local.round, local.local_step), bits(local.global_parameters()), velocities

    results = run(4, program)
    assert results == [results[0]] * 4
    assert results[0][:2] == (sc.Rebuilt(4, (1,), ELEMENTS, (0,), steps // 4, 0, "round"), (3, 0))


def test_what_is_under_way_is_ended_and_one_that_is_behind_catches_up() -> None:
    """An exchange has failed. Rank 1 has not noticed yet, and rank 2 has different global parameters."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = made(transport, parameters, decay=1.0, **SETTINGS)
        train(local, parameters, transport.rank, 1, 4)
        globals_, old_residuals = local.global_parameters(), residuals(local)
        before = bits(globals_)
        local.reducers[0]._open.number += transport.rank == 1
        train(local, parameters, transport.rank, 5, 5)
        moved = {name: array - parameters[name] for name, array in globals_.items()}
        if transport.rank != 1:
            with pytest.raises(sc.CollectiveMismatchError):
                train(local, parameters, transport.rank, 6, 6)
        if transport.rank == 2:
            globals_["a"][...] = 0
        rebuilt = local.rebuild(transport, parameters)
        assert bits(local.global_parameters()) == before
        for name in local.fragments[0]:
            np.testing.assert_array_equal(local.reducers[0].residual(name), old_residuals[name] + moved[name])
            np.testing.assert_array_equal(parameters[name], globals_[name].astype(parameters[name].dtype))
        train(local, parameters, transport.rank, 7, 12)
        return rebuilt.step, rebuilt.steps_apart, local.round, bits(local.global_parameters())

    results = run(3, program)
    assert results == [(1, 1, 3, results[0][3])] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.5}, r"density is 0\.1 on rank [01] and 0\.5 on rank 2:"),
        ({"sync_every": 5}, r"sync_every is \d on rank [01] and 5 on rank 2"),
        ({"fragment_update_alpha": 0.5}, r"fragment_update_alpha is 0\.\d+ on rank [01] and 0\.5 on rank 2"),
        ({"fragments": 3}, r"fragments is \d on rank [01] and 3 on rank 2"),
        ({"outer": None}, "type of outer optimizer is NesterovSGD on rank [01] and NoneType on rank 2"),
        ({"decay": 0.5}, r"decay is \d\.\d+ on rank [01] and 0\.5 on rank 2"),
        ({"model": "b"}, r"b is float32 \(\d+,.*\) on rank [01] and float32 \(8,\) on rank 2"),
        ({"version": "9.9"}, r"version of sparsecomm is .* on rank [01] and 9\.9 on rank 2"),
    ],
)
def test_a_new_rank_that_does_not_fit_is_told_to_all(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = trained(2, 4)
    others = dict(options)
    parameters = initial()
    if others.pop("model", None):
        parameters["b"] = np.zeros(8, np.float32)

    def program(transport: simulated.SimulatedTransport) -> Any:
        if transport.rank < 2:
            local, mine = old[transport.rank]
        else:
            if version := others.pop("version", None):
                monkeypatch.setattr(local_steps, "version", lambda _: version)
            local = made(transport, parameters, **(SETTINGS | {"outer": sc.NesterovSGD()} | others))
            mine = parameters
        with pytest.raises(sc.CollectiveMismatchError, match=message):
            local.rebuild(transport, mine, joining=transport.rank == 2)

    run(3, program)


class Outer(sc.NesterovSGD):
    """An outer optimizer that returns ``sends`` as its state, and calls ``loads`` after loading."""

    sends: Any = None
    loads: Any = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.sends is None else self.sends

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if self.loads is not None:
            self.loads()


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Evil, "ran", True)


def fails() -> None:
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("sends", "loads", "message"),
    [
        (Evil(), None, "the state of rank 0's outer optimizer cannot be sent"),
        ({"a": np.array([Evil()])}, None, "the state of rank 0's outer optimizer cannot be sent"),
        (None, fails, "no disk"),
        ({"velocities": {"a": np.zeros(3, np.float32)}}, None, "the velocity of 'a' has shape (3,); expected (600,)"),
    ],
)
def test_an_outer_state_that_cannot_be_sent_or_loaded_is_an_error_on_all_ranks(
    sends: Any, loads: Any, message: str
) -> None:
    old = trained(2, 6, Outer)

    def state_of(local: sc.LocalSteps) -> Any:
        return local.round, bits(local.global_parameters()), bits(residuals(local)), repr(local._outer._velocities)

    def program(transport: simulated.SimulatedTransport) -> Any:
        local, parameters = old[transport.rank]
        before, outer = state_of(local), local._outer
        outer.sends, outer.loads = (sends, None) if transport.rank == 0 else (None, loads)
        with pytest.raises(sc.InvalidInputError) as raised:
            local.rebuild(transport, parameters)
        assert message in str(raised.value)
        outer.sends = outer.loads = None
        assert loads is not None or state_of(local) == before
        local.rebuild(transport, parameters)
        train(local, parameters, transport.rank, 7, 12)
        return bits(local.global_parameters())

    results = run(2, program)
    assert results[0] == results[1]
    assert not Evil.ran


def test_global_parameters_are_broadcast_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the whole model may not fit into host memory."""
    events: list[str] = []

    class Ranks:
        def broadcast(self, data: np.ndarray, root: int) -> None:
            events.append(f"send {data.size}")
            data.view(np.float32)[:] = root

    copy = exchange.to_host
    monkeypatch.setattr(exchange, "to_host", lambda array: events.append(f"copy {array.size}") or copy(array))
    shared = exchange.GlobalParameters({name: np.zeros(n, np.float32) for name, n in (("a", 2), ("b", 3))})
    shared.broadcast(Ranks(), 7)
    assert events == ["copy 2", "send 8", "copy 3", "send 12"]
    assert [array.tolist() for array in shared.shaped().values()] == [[7, 7], [7, 7, 7]]
