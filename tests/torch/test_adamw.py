"""`sparsecomm.torch.SparseAdamW` on simulated ranks, besides what `tests/optimizers/test_contract.py` tests.

Exchanges in backward passes of several ranks: training_adamw.py.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
MPI = pytest.importorskip("mpi4py.MPI")

import sparsecomm as sc  # noqa: E402
from sparsecomm.torch import SparseAdamW  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.ranks import run  # noqa: E402


class Model(torch.nn.Module):
    """Parameters of which a loss takes the products with given gradients, so that these are the gradients."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(20, 30, dtype=dtype)
        self.second = torch.nn.Linear(30, 5, dtype=dtype)

    def forward(self, given: dict[str, Any]) -> Any:
        products = [
            (p.float() * given[name]).sum() for name, p in self.named_parameters() if given.get(name) is not None
        ]
        return torch.stack(products).sum()


def gradients(step: int, rank: int, dtype: Any = torch.float32) -> dict[str, Any]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(p.shape, generator=made).to(dtype).float() for name, p in Model().named_parameters()}


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


def check_same(results: list[Any]) -> None:
    for other in results[1:]:
        for name, array in results[0].items():
            np.testing.assert_array_equal(other[name], array)


def train(model: Any, optimizer: Any, rank: int, steps: range, dtype: Any = torch.float32) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(gradients(step, rank, dtype)).backward()
        optimizer.step()


def test_a_pass_that_would_lose_what_was_exchanged_is_refused() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        model = Model()
        optimizer = SparseAdamW(model.named_parameters(), 0.01, comm=transport, overlap=True)
        for step in range(2):
            model(gradients(step, 0)).backward()
            optimizer.step()
        model(gradients(2, 0)).backward()
        with pytest.raises(sc.InvalidInputError, match="before step"):
            model(gradients(3, 0)).backward()
        optimizer.step()
        model(gradients(4, 0)).backward()
        optimizer.step()

    run(1, program)


def test_loss_scaling() -> None:
    """What overflows on one rank is left out: its part in that step."""

    def program(transport: simulated.SimulatedTransport) -> tuple[Any, list[float], int]:
        model, scales = Model(), []
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        optimizer = SparseAdamW(model.named_parameters(), 0.01, density=0.2, comm=transport)
        for step in range(8):
            optimizer.zero_grad()
            given = gradients(step, transport.rank)
            if step in (0, 4) and transport.rank == 1:
                given["second.weight"][2, 3] = torch.inf
            scaler.scale(model(given)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return arrays(model), scales, optimizer.state_dict()["state"][0]["step"]

    (weights, first, steps), (others, second, _) = run(2, program)
    check_same([weights, others])
    assert (first[0], second[0], steps) == (256, 128, 8)
    assert all(np.isfinite(array).all() for array in weights.values())
    optimizer = SparseAdamW((model := Model()).named_parameters(), comm=MPI.COMM_SELF, overlap=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(gradients(0, 0))).backward()
    with pytest.raises(sc.InvalidInputError, match="overlap=True does not support a GradScaler"):
        scaler.step(optimizer)


def test_gradients_are_divided_by_the_scale_once() -> None:
    """By `unscale_` or by `step`: weights are those without a scaler."""

    def program(transport: simulated.SimulatedTransport) -> list[Any]:
        made = []
        for scaled in (False, True):
            model = Model()
            optimizer = SparseAdamW(model.named_parameters(), 0.01, density=0.2, comm=transport)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(model(gradients(step, transport.rank))).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            made.append(arrays(model))
        return made

    for each in run(2, program):
        check_same(each)


# -- state ------------------------------------------------------------------------------------------------------------


def saved_and_read(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_moments_of_bfloat16_parameters_are_saved_in_float32() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        model, other = Model(torch.bfloat16), Model(torch.bfloat16)
        first, second = (SparseAdamW(each.named_parameters(), comm=transport, density=0.2) for each in (model, other))
        train(model, first, transport.rank, range(5), torch.bfloat16)
        second.load_state_dict(saved_and_read(first.state_dict()))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert second.state[q]["exp_avg"].dtype is torch.float32
            assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])

    run(2, program)


def test_a_state_of_dense_adamw_is_gone_on_with() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        dense, mine = Model(), Model()
        theirs = torch.optim.AdamW(dense.parameters(), 0.01)
        for step in range(4):
            theirs.zero_grad()
            dense(gradients(step, 0)).backward()
            theirs.step()
        mine.load_state_dict(dense.state_dict())
        optimizer = SparseAdamW(mine.named_parameters(), 0.01, density=1.0, comm=transport)
        optimizer.residuals_apart()
        optimizer.load_state_dict(saved_and_read(theirs.state_dict()))
        for step in range(4, 8):
            theirs.zero_grad()
            dense(gradients(step, 0)).backward()
            theirs.step()
            optimizer.zero_grad()
            mine(gradients(step, 0)).backward()
            optimizer.step()
        for name, array in arrays(dense).items():
            np.testing.assert_allclose(arrays(mine)[name], array, rtol=3e-6, atol=3e-6)

    run(2, program)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_after_its_end() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        model = Model()
        optimizer = SparseAdamW(model.named_parameters(), comm=transport)
        with pytest.raises(sc.InvalidInputError, match="exchanged by another"):
            SparseAdamW(model.named_parameters(), comm=transport)
        with pytest.raises(sc.InvalidInputError, match="make a new SparseAdamW"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(sc.InvalidInputError, match="cannot be copied"):
            copy.deepcopy(optimizer)
        optimizer.remove()
        with pytest.raises(sc.InvalidInputError, match="after remove"):
            optimizer.step()
        train(model, SparseAdamW(model.named_parameters(), comm=transport), 0, range(2))

    run(1, program)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"lr": -1.0}, r"lr=-1\.0"),
        ({"scaler": object()}, "scaler is not an option of SparseAdamW"),
        ({"overlap": np.ones(2)}, "overlap="),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr="),
        ({"named_parameters": Model().parameters()}, "names"),
        ({"named_parameters": [{"params": Model().named_parameters(), "lr": -3.0}]}, r"lr=-3\.0"),
        ({"named_parameters": [{"parameters": []}]}, "named_parameters"),
        ({"fused": True}, "fused=True is not supported"),
        ({"named_parameters": [{"params": Model().named_parameters(), "amsgrad": True}]}, "amsgrad=True is not"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], why: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        SparseAdamW(**{"named_parameters": Model().named_parameters(), "comm": transport, **wrong})

    with pytest.raises(sc.InvalidInputError, match=why):
        run(1, program)
