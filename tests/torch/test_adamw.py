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

import sparsecomm as sc  # noqa: E402
from sparsecomm.backends.adamw import unit  # noqa: E402
from sparsecomm.torch import SparseAdamW  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.optimizers.adapters import OfTorch, OfTorchWithOverlap, gradients  # noqa: E402
from tests.ranks import run  # noqa: E402

RULE: dict[str, Any] = {"lr": 0.01, "density": 0.2}


def bits(optimizer: OfTorch) -> list[bytes]:
    return [w.tobytes() for w in optimizer.weights.values()]


def saved_and_read(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_pass_that_would_lose_what_was_exchanged_is_refused() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OfTorchWithOverlap(transport, **RULE)
        for step in range(2):
            mine.step(gradients(step, 0))
        mine.loss(gradients(2, 0)).backward()
        with pytest.raises(sc.InvalidInputError, match="before step"):
            mine.loss(gradients(3, 0)).backward()
        mine.it.step()
        mine.step(gradients(4, 0))

    run(1, program)


def test_loss_scaling() -> None:
    """What overflows on one rank is left out: its part in that step."""

    def program(transport: simulated.SimulatedTransport) -> tuple[list[bytes], list[float]]:
        mine, scaler = OfTorch(transport, **RULE), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        scales = []
        for step in range(8):
            mine.it.zero_grad()
            given = gradients(step, transport.rank)
            if step in (0, 4) and transport.rank == 1:
                given["matrix"][2, 3] = np.inf
            scaler.scale(mine.loss(given)).backward()
            scaler.step(mine.it)
            scaler.update()
            scales.append(scaler.get_scale())
        assert mine.steps() == 8
        assert all(np.isfinite(w).all() for w in mine.weights.values())
        return bits(mine), scales

    (weights, first), (others, second) = run(2, program)
    assert weights == others
    assert (first[0], second[0]) == (256, 128)

    def overlaps(transport: simulated.SimulatedTransport) -> None:
        mine, scaler = OfTorchWithOverlap(transport, **RULE), torch.amp.GradScaler("cpu")
        scaler.scale(mine.loss(gradients(0, 0))).backward()
        with pytest.raises(sc.InvalidInputError, match="overlap=True does not support a GradScaler"):
            scaler.step(mine.it)

    run(1, overlaps)


def test_gradients_are_divided_by_the_scale_once() -> None:
    """By `unscale_` or by `step`: weights are those without a scaler."""

    def program(transport: simulated.SimulatedTransport) -> None:
        found = []
        for scaled in (False, True):
            mine = OfTorch(transport, **RULE)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
            for step in range(4):
                mine.it.zero_grad()
                scaler.scale(mine.loss(gradients(step, transport.rank))).backward()
                if step % 2:
                    scaler.unscale_(mine.it)
                scaler.step(mine.it)
                scaler.update()
            found.append(bits(mine))
        assert found[0] == found[1]

    run(2, program)


def test_moments_of_bfloat16_parameters_are_saved_in_float32() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        first, second = (OfTorch(transport, dtype="bfloat16", **RULE) for _ in range(2))
        for step in range(5):
            first.step(gradients(step, transport.rank))
        second.it.load_state_dict(saved_and_read(first.it.state_dict()))
        for name, p in first.named.items():
            theirs = second.it.state[second.named[name]]["exp_avg"]
            assert theirs.dtype is torch.float32
            assert torch.equal(theirs, first.it.state[p]["exp_avg"])

    run(2, program)


def test_a_state_of_dense_adamw_is_gone_on_with() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        dense, mine = OfTorch(transport), OfTorch(transport, lr=0.01, density=1.0, check_weights_every=None)
        dense.it = torch.optim.AdamW(dense.named.values(), 0.01)
        for step in range(4):
            dense.step(gradients(step, 0))
        for name, w in dense.weights.items():
            mine.weights[name][...] = w
        mine.it.residuals_apart()
        state = dense.it.state_dict()
        groups = [group | {"params": [i]} for i in range(3) for group in state["param_groups"]]
        mine.it.load_state_dict(saved_and_read(state | {"param_groups": groups}))
        for step in range(4, 8):
            dense.step(gradients(step, 0))
            mine.step(gradients(step, 0))
        for name, w in dense.weights.items():
            np.testing.assert_allclose(mine.weights[name], w, rtol=3e-6, atol=3e-6)

    run(2, program)


def test_weights_of_another_dtype_are_refused_on_all_ranks() -> None:
    """Also on a rank without gradients, which would wait for the others."""

    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OfTorch(transport, **RULE)
        mine.step(gradients(0, transport.rank))
        for p in mine.named.values():
            p.data, p.grad = p.data.double(), None
        mine.it.zero_grad()
        if transport.rank:
            mine.loss(gradients(1, transport.rank)).backward()
        with pytest.raises(sc.InvalidInputError, match=r"got shape .*, float64 on cpu; expected"):
            mine.it.step()

    run(2, program)


@pytest.mark.parametrize("change", ["replaced", "eps", "in place", "deleted"])
def test_residuals_keep_their_value_if_their_units_change(change: str) -> None:
    """Or they are dropped, if their units are not known any more. Checkpoints agree with the next step."""

    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OfTorch(transport, **RULE)
        for step in range(4):
            mine.step(gradients(step, transport.rank))
        p, group = mine.named["matrix"], mine.it.param_groups[1]

        def value() -> np.ndarray:
            squares = mine.it.state[p]["exp_avg_sq"].numpy()
            return mine.residuals["matrix"] * unit(np, squares, np.float32(group["eps"]))

        before, squares = value(), mine.it.state[p]["exp_avg_sq"]
        assert np.count_nonzero(before) > 100
        if change == "replaced":
            mine.it.state[p]["exp_avg_sq"] = squares.double() * 1000
        elif change == "eps":
            group["eps"] = 3.0
        elif change == "in place":
            squares.mul_(1000)
        else:
            del mine.it.state[p]
        if change in ("replaced", "eps"):
            assert np.array_equal(value(), before)
        else:
            assert not mine.residuals["matrix"].any()
        assert mine.residuals["bias"].any()
        for step in range(4, 8):
            mine.step(gradients(step, transport.rank))
        sc.check_weights(mine.weights, comm=transport)

    run(2, program)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("exp_avg_sq", 0.0, "'float' object"),
        ("exp_avg_sq", torch.ones(3), "squares of matrix"),
        ("exp_avg_sq", torch.full((30, 11), -1.0), "squares of matrix"),
        ("exp_avg_sq", None, "squares of matrix is missing"),
        ("exp_avg", torch.full((30, 11), torch.nan), "mean of matrix"),
        ("step", torch.tensor(-1.0), "step of matrix is -1"),
        ("step", torch.tensor(0.5), "step of matrix is 0.5"),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_that_cannot_be_used_is_refused(key: str, value: Any, why: str, steps: int) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine, state = OfTorch(transport, **RULE), {"step": torch.tensor(0.0)}
        for step in range(steps):
            mine.step(gradients(step, 0))
        p = mine.named["matrix"]
        state |= {"exp_avg": torch.ones(p.shape), "exp_avg_sq": torch.ones(p.shape)}
        mine.it.state[p] = {**state, **mine.it.state.get(p, {}), key: value}
        before = bits(mine)
        with pytest.raises(sc.InvalidInputError, match=why):
            mine.step(gradients(steps, 0))
        assert bits(mine) == before

    run(1, program)


def test_settings_that_a_program_changes_between_steps() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        moved, changed = (OfTorch(transport, weight_decay={"matrix": 0.5}, lr=0.01, density=0.2) for _ in range(2))
        for step in range(6):
            if step == 3:  # the same change in two ways
                first, second = moved.it.param_groups[:2]
                first["params"], second["params"] = second["params"], first["params"]
                first, second = changed.it.param_groups[:2]
                first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]
            for mine in (moved, changed):
                mine.step(gradients(step, transport.rank))
        assert bits(moved) == bits(changed)

    run(2, program)


def test_wrong_settings_after_the_first_step() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OfTorch(transport, **RULE)
        mine.step(gradients(0, 0))
        group, before = mine.it.param_groups[0], bits(mine)
        kept = dict(group)
        for key, value, why in (
            ("lr", torch.tensor([0.1, 0.2]), "lr="),
            ("lr", np.array([0.1, 0.2]), "lr="),
            ("betas", np.array([0.9, 0.99]), "betas="),
            ("maximize", 0, "maximize=0"),
            ("params", [], "number is in no group any more"),
            ("params", [*group["params"], torch.nn.Parameter(torch.ones(2))], "shape \\(2,\\)"),
        ):
            group[key] = value
            with pytest.raises(sc.InvalidInputError, match=why):
                mine.it.step()
            group.update(kept)
        assert bits(mine) == before
        mine.step(gradients(1, 0))

    run(1, program)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_after_its_end() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OfTorch(transport)
        with pytest.raises(sc.InvalidInputError, match="exchanged already"):
            SparseAdamW(mine.named.items(), comm=transport)
        with pytest.raises(sc.InvalidInputError, match="make a new SparseAdamW"):
            mine.it.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(sc.InvalidInputError, match="cannot be copied"):
            copy.deepcopy(mine.it)
        mine.it.remove()
        with pytest.raises(sc.InvalidInputError, match="after remove"):
            mine.it.step()
        mine.it = SparseAdamW(mine.named.items(), comm=transport)
        mine.step(gradients(0, 0))

    run(1, program)


def test_parameters_of_a_ddp_model_are_warned_of() -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})  # has the names that DDP gives
    with pytest.warns(UserWarning, match="plain model"):
        SparseAdamW(model.named_parameters()).remove()
    SparseAdamW(model["module"].named_parameters()).remove()


def test_wrong_arguments() -> None:
    named: dict[str, Any] = {"w": torch.nn.Parameter(torch.ones(5))}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lr": -1.0}, r"lr=-1\.0"),
        ({"scaler": object()}, "scaler is not an option of SparseAdamW"),
        ({"overlap": np.ones(2)}, "overlap="),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr="),
        ({"named_parameters": named.values()}, "names"),
        ({"named_parameters": [{"params": named.items(), "lr": -3.0}]}, r"lr=-3\.0"),
        ({"named_parameters": [{"parameters": []}]}, "named_parameters"),
        ({"fused": True}, "fused=True is not supported"),
        ({"named_parameters": [{"params": named.items(), "amsgrad": True}]}, "amsgrad=True is not"),
    ]
    for arguments, why in wrong:
        with pytest.raises(sc.InvalidInputError, match=why):
            SparseAdamW(**{"named_parameters": named.items(), **arguments})
