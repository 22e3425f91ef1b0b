"""Named parameters of compiled and wrapped models, and under changed defaults of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sparsecomm as sc  # noqa: E402
from sparsecomm.torch import DiLoCo, DistributedOptimizer, SparseState, broadcast_parameters  # noqa: E402
from sparsecomm.torch.exchange import is_zero  # noqa: E402
from sparsecomm.torch.parameters import unwrapped_names  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.ranks import run  # noqa: E402


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 4))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "hook": lambda m, comm: SparseState(m.named_parameters(), 0.5, comm=comm),
    "optimizer": lambda m, comm: DistributedOptimizer(sgd(m), m.named_parameters(), 0.5, comm=comm),
    "DiLoCo": lambda m, comm: DiLoCo(m, sgd(m), sync_every=2, comm=comm),
}


def test_names_without_wrappers() -> None:
    for names, expected in (
        (["module._orig_mod.a", "module._orig_mod.b"], ["a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["a._checkpoint_wrapped_module.w", "b._fsdp_wrapped_module._orig_mod.w"], ["a.w", "b.w"]),
        (["module.a", "head.module.b"], ["module.a", "head.module.b"]),  # the model's own
        (["module.module.a"], ["a"]),
        ([], []),
    ):
        assert unwrapped_names(names) == expected


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def use(transport: simulated.SimulatedTransport, m: Any) -> None:
    broadcast_parameters(m.state_dict(), comm=transport)
    for maker in MAKERS.values():
        maker(m, transport)
        for p in m.parameters():
            p.grad = None
    optimizer = DistributedOptimizer(sgd(m), m.named_parameters(), 0.5, comm=transport, wire="packed_int8")
    m[0].weight.grad = torch.full_like(m[0].weight, 1.0 + transport.rank)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_another_default_dtype(float64_by_default: None) -> None:
    run(2, lambda transport: use(transport, model().float()))


def test_another_default_device() -> None:
    models = [model() for _ in range(2)]
    with torch.device("meta"):
        run(2, lambda transport: use(transport, models[transport.rank]))


def test_a_wire_that_does_not_fit_the_parameters_is_refused_at_once() -> None:
    with pytest.raises(sc.InvalidInputError, match="packed_int8"):
        SparseState(model().double().named_parameters(), 0.1, wire="packed_int8")


def test_zeros() -> None:
    zeros = torch.zeros(3000)
    assert is_zero(zeros)
    assert is_zero(-zeros)
    assert is_zero(zeros[:0])
    for place in (0, 15, 16, 143, 144, 2999):
        for value in (1e-45, torch.nan, -torch.inf):
            x = zeros.clone()
            x[place] = value
            for shaped in (x, x.view(30, 100).t(), x.to(torch.float64)):
                assert not is_zero(shaped)


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU, and counts how often the host reads its elements."""

    is_cpu = False
    waits = 0

    def tolist(self) -> Any:
        OnGpu.waits += 1
        return super().tolist()

    def __bool__(self) -> bool:
        OnGpu.waits += 1
        return bool(super().__bool__())


def test_the_host_waits_once_to_see_which_gradients_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of gradients does not matter. A gradient of zeros counts as one, a missing one does not."""
    monkeypatch.setattr(OnGpu, "waits", 0)
    gradients = {f"{i}": (torch.zeros if i % 3 else torch.ones)(10 + i) for i in range(20)}
    gradients |= {"0": torch.full((3,), 1e-40), "1": torch.zeros(0), "2": torch.zeros(5, dtype=torch.bfloat16)}
    gradients |= {"3": torch.full((4,), math.nan), "4": torch.full((4,), 6e-8, dtype=torch.float16)}
    present: list[dict[str, bool]] = []

    def program(transport: simulated.SimulatedTransport) -> None:
        named = {name: torch.nn.Parameter(torch.zeros_like(g)) for name, g in gradients.items()}
        settings: Any = {"comm": transport, "scope": "tensor", "check_weights_every": None}
        sgd = torch.optim.SGD(named.values(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, named.items(), 0.5, **settings)
        for name, parameter in list(named.items())[: 20 - 2 * transport.rank]:
            parameter.grad = gradients[name].clone().as_subclass(OnGpu)
        done = optimizer.synchronize()
        present.append({name: name not in done.without_gradient for name in named})

    run(2, program)
    assert OnGpu.waits == 2
    expected = {name: bool(g.any()) or not g.numel() for name, g in gradients.items()}
    assert present == [expected] * 2


def test_an_exchange_is_refused_in_a_captured_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        named = {"a": torch.nn.Parameter(torch.zeros(4))}
        sgd = torch.optim.SGD(named.values(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, named.items(), 0.5, comm=transport)
        named["a"].grad = torch.ones(4)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(sc.InvalidInputError, match="captured into a CUDA graph"):
                optimizer.synchronize()
        assert optimizer.synchronize().number == 0

    run(1, program)
