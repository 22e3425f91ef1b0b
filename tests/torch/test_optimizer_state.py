"""States of torch optimizers on simulated ranks: all ranks load, or none does and nothing changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsecomm as sc  # noqa: E402
from sparsecomm.torch import DiLoCo, DistributedOptimizer  # noqa: E402
from sparsecomm.torch.optimizer_state import snapshot, try_step  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.ranks import run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.* divides gradients by the size")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def module() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Module()
    for name, shape in (("a", (3, 4)), ("b", (5,)), ("c", ())):
        model.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
    return model


def stepped(optimizer: Any, parameters: Any, steps: int, rank: int) -> None:
    for step in range(steps):
        for p in parameters:
            p.grad = torch.full_like(p, 1.0 + step + rank)
        optimizer.step()


def bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return (str(value.dtype), value.detach().numpy().tobytes()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("half", [False, True])
def test_outer_states_travel_without_pickles(half: bool) -> None:
    """All ranks refuse a bfloat16 state: loading would cast it, and ranks would differ."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        model = module()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = OPTIMIZERS["Adam"](model.parameters())
        diloco = DiLoCo(model, inner, outer, 0.5, sync_every=2, comm=transport)
        for p in outer.param_groups[0]["params"] if transport.rank == 0 else ():
            outer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(p), "exp_avg_sq": (p * p).detach()}
            outer.state[p] |= {"exp_avg": torch.ones_like(p).bfloat16()} if half else {}
        if half:
            with pytest.raises(sc.InvalidInputError, match=r"outer|rank 1"):
                diloco.rebuild(transport, joining=transport.rank == 1)
            return len(outer.state)
        diloco.rebuild(transport, joining=transport.rank == 1)
        return bits(diloco.state_dict()["outer"])

    results = run(2, program)
    assert results == [3, 0] if half else results[0] == results[1]


def test_a_step_is_tried_on_a_copy() -> None:
    parameters = list(module().parameters())
    optimizer = OPTIMIZERS["Adam"](parameters)
    stepped(optimizer, parameters, 2, 0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the optimizer's step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hook was called"))
    before = bits(optimizer.state_dict()), bits(parameters)
    try_step(optimizer, parameters)
    assert (bits(optimizer.state_dict()), bits(parameters)) == before
    optimizer.state[parameters[0]]["exp_avg"] = torch.zeros(2)
    with pytest.raises(RuntimeError):
        try_step(optimizer, parameters)
    np.testing.assert_array_equal(parameters[1].grad, torch.full_like(parameters[1], 2.0))


def test_a_step_is_tried_although_its_state_has_other_shapes_than_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.Adafactor([parameter])
    parameter.grad = torch.ones(3, 4)
    optimizer.step()
    before = bits(optimizer.state_dict()), bits(parameter)
    try_step(optimizer, [parameter])
    assert (bits(optimizer.state_dict()), bits(parameter)) == before


class InPlace(torch.optim.SGD):
    """Loads a state into the tensors that it has."""

    def load_state_dict(self, state_dict: Any) -> None:
        for entry, values in zip(self.state.values(), state_dict["state"].values(), strict=True):
            entry["momentum_buffer"].copy_(values["momentum_buffer"])


def test_a_snapshot_holds_although_a_load_writes_into_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = InPlace([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    before = bits(optimizer.state_dict())
    restore = snapshot(optimizer)
    optimizer.load_state_dict({"state": {0: {"momentum_buffer": torch.zeros(3)}}})
    assert bits(optimizer.state_dict()) != before
    restore()
    assert bits(optimizer.state_dict()) == before


def in_order(names: str, grouped: bool, kind: str, transport: Any) -> tuple[Any, Any]:
    """Return a model with parameters in this order, and its optimizer. "f" is frozen, "x" is not passed by name."""
    model = {name: torch.nn.Parameter(torch.zeros(40)) for name in names}
    model["f"].requires_grad_(False)
    known = list(model.values())
    groups = [{"params": known[:2], "lr": 0.25}, {"params": known[2:]}] if grouped else known
    optimizer = OPTIMIZERS[kind](groups)
    named = [(name, p) for name, p in model.items() if name != "x"]
    return model, DistributedOptimizer(optimizer, named, 0.5, comm=transport, dense_below=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_state_follows_names(kind: str, apart: bool, grouped: bool) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        model, optimizer = in_order("abcfx", grouped, kind, transport)
        other, other_optimizer = in_order("bafxc", grouped, kind, transport)
        if apart:
            optimizer.residuals_apart(), other_optimizer.residuals_apart()
        for step in range(3):
            for i, name in enumerate("abcx"):
                model[name].grad = torch.full((40,), 1.0 + i + step + (transport.rank if name != "x" else 0))
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        other_optimizer.load_state_dict(state)
        for name in model:
            assert bits(other_optimizer.state.get(other[name])) == bits(optimizer.state.get(model[name])), name
        assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        theirs = in_order("abcdf", grouped, kind, transport)[1]
        if apart:
            theirs.residuals_apart()
        with pytest.raises(sc.InvalidInputError, match=r"lack|lacks"):
            theirs.load_state_dict(state)
        del state["parameter_names"]  # as in states of plain optimizers, which go by position
        again = in_order("abcfx", grouped, kind, transport)
        if apart:
            again[1].residuals_apart()
        again[1].load_state_dict(state)
        assert bits(again[1].state[again[0]["a"]]) == bits(optimizer.state[model["a"]])

    run(2, program)


def test_a_parameter_of_another_group_is_refused() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        state = in_order("abcfx", True, "SGD", transport)[1].state_dict()
        with pytest.raises(sc.InvalidInputError, match=r"parameter group 0 lacks \['c'\]; unexpected: \['b'\]"):
            in_order("acbfx", True, "SGD", transport)[1].load_state_dict(state)

    run(2, program)


# -- warnings about optimizers ----------------------------------------------------------------------------------------


class Betas(torch.optim.Optimizer):
    """An optimizer of another package, with moments."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})


class Momentum(torch.optim.SGD):
    """An optimizer of another package, without moments."""


KINDS = [
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
]
PROPORTIONAL = {"SGD", "ASGD", "LBFGS", "Momentum"}


@pytest.mark.parametrize("kind", [Betas, Momentum, *(kind for kind in KINDS if kind is not torch.optim.Optimizer)])
def test_a_warning_for_steps_that_do_not_grow_with_the_gradient(kind: Any) -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for density in (0.1, 1.0):
            DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters(), density).remove()
    said = [w for w in caught if f"{kind.__name__} divides gradients" in str(w.message)]
    assert len(said) == (kind.__name__ not in PROPORTIONAL)
    assert all(w.filename == __file__ for w in said)
