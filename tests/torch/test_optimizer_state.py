"""States of torch optimizers, on simulated ranks: loaded by all or by none; what was tried is undone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsecomm as sc  # noqa: E402
from sparsecomm.torch import DiLoCo, DistributedOptimizer, SparseState  # noqa: E402
from sparsecomm.torch.optimizer_state import follows_gradient, snapshot, try_step  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.reducer.programs import run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.* divides gradients by the size")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def module() -> Any:
    torch.manual_seed(0)
    made = torch.nn.Module()
    for name, shape in (("a", (3, 4)), ("b", (5,)), ("c", ())):
        made.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
    return made


def stepped(optimizer: Any, parameters: Any, steps: int, rank: int) -> None:
    for step in range(steps):
        for p in parameters:
            p.grad = torch.full_like(p, 1.0 + step + rank)
        optimizer.step()


def bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return (str(value.dtype), value.detach().numpy().tobytes()) if isinstance(value, torch.Tensor) else value


def first(state: Any) -> Any:
    """The first tensor of a state, and where it is."""
    each = state["state"][0]
    key = next(key for key in each if each[key].ndim)
    return each, key


def change(what: str, state: Any) -> Any:
    if what == "foreign":
        return state | {"state": {99: {"x": 1}, **state["state"]}}
    if what == "group":
        return state | {"param_groups": []}
    if what == "plain":
        del state["sparsecomm"]
        return state
    if what in ("world_size", "step"):
        return state | {"sparsecomm": state["sparsecomm"] | {what: 7}}
    if what == "rate":
        state["param_groups"][0]["lr"] = 9.0
    else:
        each, key = first(state)
        each[key] = {"shape": torch.zeros(2), "text": "x", "value": each[key] + 1}[what]
    return state


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("plain", "there are no residuals"),
        ("world_size", "the state has world size 7"),
        ("step", "the state of rank 1 has step 7, but that of rank 0 has 2"),
        *((what, "rank 1") for what in ("group", "rate", "value", "foreign", "text")),
    ],
)
def test_a_distributed_optimizer_loads_on_all_ranks_or_on_none(kind: str, what: str, said: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        model = module()
        plain = OPTIMIZERS[kind](model.parameters())
        optimizer: Any = DistributedOptimizer(plain, model.named_parameters(), 0.5, comm=transport, dense_below=0)
        stepped(optimizer, model.parameters(), 2, transport.rank)
        state = copy.deepcopy(optimizer.state_dict())
        stepped(optimizer, model.parameters(), 1, transport.rank)
        before = bits(optimizer.state_dict())
        with pytest.raises(sc.InvalidInputError, match=said if transport.rank == 1 else "rank 1"):
            optimizer.load_state_dict(change(what, copy.deepcopy(state)) if transport.rank == 1 else state)
        assert bits(optimizer.state_dict()) == before
        optimizer.load_state_dict(state)
        assert bits(optimizer.state_dict()) == bits(state)
        stepped(optimizer, model.parameters(), 2, transport.rank)
        return bits(list(model.parameters())), bits(plain.state_dict()["state"])

    results = run(2, program)
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("what", ["group", "rate", "value", "text", "shape"])
@pytest.mark.parametrize("whom", [(1,), (0, 1)])
def test_an_outer_optimizer_loads_on_all_ranks_or_on_none(kind: str, what: str, whom: tuple[int, ...]) -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        model = module()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, inner, OPTIMIZERS[kind](model.parameters()), 0.5, sync_every=2, comm=transport)
        stepped(inner, model.parameters(), 4, transport.rank)
        state = copy.deepcopy(diloco.state_dict())
        stepped(inner, model.parameters(), 2, transport.rank)
        before = bits(diloco.state_dict())
        mine = state | {"outer": change(what, copy.deepcopy(state["outer"]))} if transport.rank in whom else state
        if len(whom) == 2 and what in ("rate", "value"):
            diloco.load_state_dict(mine)  # alike on all ranks, and nothing that cannot be
        else:
            with pytest.raises(sc.InvalidInputError, match="rank 1" if len(whom) == 1 else "outer"):
                diloco.load_state_dict(mine)
            assert bits(diloco.state_dict()) == before
            diloco.load_state_dict(state)
        stepped(inner, model.parameters(), 2, transport.rank)
        return bits(diloco.state_dict()["global_parameters"])

    results = run(2, program)
    assert results[0] == results[1]


def test_a_loss_scale_is_compared() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        state = SparseState(module().named_parameters(), comm=transport)
        good = state.state_dict()
        for scale, match in (
            (8.0 * (1 + transport.rank), "has loss_scale 16, but that of rank 0 has 8"),
            ("x", "loss_scale"),
        ):
            with pytest.raises(sc.InvalidInputError, match=match):
                state.load_state_dict(good | {"loss_scale": scale})
            assert state._scale is None
        state.load_state_dict(good | {"loss_scale": 4.0})
        assert state._scale == 4.0

    run(2, program)


@pytest.mark.parametrize("half", [False, True])
def test_outer_states_travel_without_pickles(half: bool) -> None:
    """A state in bfloat16 would be cast where it is loaded, so that ranks would differ: all refuse it."""

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


class Writing(torch.optim.SGD):
    """Loads into the tensors that it has."""

    def load_state_dict(self, state_dict: Any) -> None:
        for each in self.state.values():
            each["momentum_buffer"].fill_(7)
        raise RuntimeError("half done")


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "Writing"])
def test_a_snapshot_puts_everything_back(kind: str) -> None:
    parameters = list(module().parameters())
    optimizer = Writing(parameters, 0.1, 0.9) if kind == "Writing" else OPTIMIZERS[kind](parameters)
    stepped(optimizer, parameters, 2, 0)
    before, groups, undo = bits(optimizer.state_dict()), optimizer.param_groups, snapshot(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    each, key = first(state)
    each[key] += 1
    try:
        optimizer.load_state_dict(state)
    except RuntimeError:
        assert kind == "Writing"
    assert bits(optimizer.state_dict()) != before
    for _ in range(2):
        undo()
    assert bits(optimizer.state_dict()) == before
    assert optimizer.param_groups is groups


def test_a_step_is_tried_on_a_copy() -> None:
    parameters = list(module().parameters())
    optimizer = OPTIMIZERS["Adam"](parameters)
    stepped(optimizer, parameters, 2, 0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # holds the optimizer's step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hook was called"))
    before = bits(optimizer.state_dict()), bits(parameters)
    try_step(optimizer, parameters)
    assert (bits(optimizer.state_dict()), bits(parameters)) == before
    optimizer.state[parameters[0]]["exp_avg"] = torch.zeros(2)
    with pytest.raises(RuntimeError):
        try_step(optimizer, parameters)
    np.testing.assert_array_equal(parameters[1].grad, torch.full_like(parameters[1], 2.0))


def in_order(names: str, grouped: bool, kind: str, transport: Any) -> tuple[Any, Any]:
    """A model whose parameters of these names come in this order, and its optimizer. "f" is frozen, "x" not named."""
    model = {name: torch.nn.Parameter(torch.zeros(40)) for name in names}
    model["f"].requires_grad_(False)
    known = list(model.values())
    groups = [{"params": known[:2], "lr": 0.25}, {"params": known[2:]}] if grouped else known
    optimizer = OPTIMIZERS[kind](groups)
    named = [(name, p) for name, p in model.items() if name != "x"]
    return model, DistributedOptimizer(optimizer, named, 0.5, comm=transport, dense_below=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_state_follows_names(kind: str, apart: bool, grouped: bool) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        (model, optimizer), (other, its) = (in_order(names, grouped, kind, transport) for names in ("abcfx", "bafxc"))
        if apart:
            optimizer.residuals_apart(), its.residuals_apart()
        for step in range(3):
            for i, name in enumerate("abcx"):
                model[name].grad = torch.full((40,), 1.0 + i + step + (transport.rank if name != "x" else 0))
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        its.load_state_dict(state)
        for name in model:
            assert bits(its.state.get(other[name])) == bits(optimizer.state.get(model[name])), name
        assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        theirs = in_order("abcdf", grouped, kind, transport)[1]
        if apart:
            theirs.residuals_apart()
        with pytest.raises(sc.InvalidInputError, match=r"lack|lacks"):
            theirs.load_state_dict(state)
        del state["parameter_names"]  # as it was saved before there were names: by position
        again = in_order("abcfx", grouped, kind, transport)
        if apart:
            again[1].residuals_apart()
        again[1].load_state_dict(state)
        assert bits(again[1].state[again[0]["a"]]) == bits(optimizer.state[model["a"]])

    run(2, program)


def test_a_parameter_of_another_group_is_refused() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        state = in_order("abcfx", True, "SGD", transport)[1].state_dict()
        with pytest.raises(sc.InvalidInputError, match=r"parameter group 0 lacks \['c'\] and has \['b'\]"):
            in_order("acbfx", True, "SGD", transport)[1].load_state_dict(state)

    run(2, program)


# -- which optimizers sparse means mislead -----------------------------------------------------------------------------


class Unusual(torch.optim.SGD):
    """Cannot be made from its settings: whether it has betas tells."""

    def __init__(self, parameters: Any, group: object) -> None:
        super().__init__(parameters, lr=0.1)


KINDS = [
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
]
PROPORTIONAL = {"SGD", "ASGD", "LBFGS"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not torch.optim.Optimizer])
def test_a_warning_for_steps_that_do_not_grow_with_the_gradient(kind: Any) -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for density in (0.1, 1.0):
            DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters(), density).remove()
    said = [w for w in found if f"{kind.__name__} divides gradients" in str(w.message)]
    assert len(said) == (kind.__name__ not in PROPORTIONAL)
    assert all(w.filename == __file__ for w in said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_counts_as_proportional(dtype: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 3, dtype=dtype))
    for settings in (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5, "maximize": True},
        {"lr": torch.tensor(0.0)},
    ):
        assert follows_gradient(torch.optim.SGD([weight], **{"lr": 0.1, **settings}))
    unusual = Unusual([weight], object())
    assert follows_gradient(unusual)
    unusual.param_groups[0]["betas"] = (0.9, 0.99)
    assert not follows_gradient(unusual)
    assert weight.grad is None
