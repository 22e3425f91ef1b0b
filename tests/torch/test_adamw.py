"""`sparsecomm.torch.SparseAdamW` on simulated ranks, in addition to `tests/optimizers/test_contract.py`.

For exchanges in backward passes of several ranks see `training_adamw.py`.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsecomm as sc  # noqa: E402
from sparsecomm.torch import SparseAdamW  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.optimizers.adapters import OfTorch, OfTorchWithOverlap, gradients, weights  # noqa: E402
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
    """The rank whose gradients overflow does not contribute to that step."""

    def program(transport: simulated.SimulatedTransport) -> tuple[list[bytes], list[float]]:
        mine, scaler = OfTorch(transport, **RULE), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        scales = []
        for step in range(8):
            mine.it.zero_grad()
            arrays = gradients(step, transport.rank)
            if step in (0, 4) and transport.rank == 1:
                arrays["matrix"][2, 3] = np.inf
            scaler.scale(mine.loss(arrays)).backward()
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
    """Whether `unscale_` or `step` divides, weights equal those without a scaler."""

    def program(transport: simulated.SimulatedTransport) -> None:
        results = []
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
            results.append(bits(mine))
        assert results[0] == results[1]

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


def test_weights_of_another_dtype_are_refused_on_all_ranks() -> None:
    """A rank without gradients raises, too, instead of waiting for the others."""

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


# -- parts ------------------------------------------------------------------------------------------------------------

LARGE = {"number": (), "matrix": (70, 90), "bias": (11,), "nothing": (0, 3)}  # two or three ranks own parts of each


class Parts:
    """`SparseAdamW` at density 1.0, and dense AdamW on float32 copies with the mean of all ranks' gradients."""

    def __init__(self, transport: simulated.SimulatedTransport, dtype: torch.dtype = torch.float32) -> None:
        self.transport, self.count = transport, 0
        tensors = {name: torch.from_numpy(w).to(dtype) for name, w in weights(LARGE).items()}
        self.named = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
        self.copies = [torch.nn.Parameter(tensor.float()) for tensor in tensors.values()]
        self.it = SparseAdamW(self.named.items(), 0.01, density=1.0, comm=transport, check_weights_every=None)
        self.dense = torch.optim.AdamW(self.copies, 0.01, foreach=False)

    def steps(self, count: int) -> None:
        for step in range(self.count, self.count + count):
            ranks = range(self.transport.size)
            by_rank = [gradients(step, rank, LARGE) for rank in ranks]
            for (name, p), copied in zip(self.named.items(), self.copies, strict=True):
                tensors = [torch.from_numpy(arrays[name]).to(p.dtype) for arrays in by_rank]
                p.grad = tensors[self.transport.rank]
                copied.grad = torch.stack([g.float() for g in tensors]).sum(0) / len(ranks)
            self.it.step()
            self.dense.step()
        self.count += count

    def check(self) -> None:
        for (name, p), copied in zip(self.named.items(), self.copies, strict=True):
            torch.testing.assert_close(p.detach(), copied.detach(), rtol=3e-6, atol=3e-6, msg=name)

    @property
    def states(self) -> list[dict[str, Any]]:
        return [self.it.state[p] for p in self.named.values()]


@pytest.mark.parametrize(("old", "new"), [(3, 2), (1, 3)])
def test_dense_adamw_goes_on_with_a_consolidated_state_and_the_other_way_round(old: int, new: int) -> None:
    """For states with parts of moments see `tests/checkpoints/test_checkpoints.py`."""

    def save(transport: simulated.SimulatedTransport) -> Any:
        mine = Parts(transport)
        mine.steps(4)
        for to in (-1, old, "all"):
            with pytest.raises(sc.InvalidInputError, match=rf"to=.*from 0 to {old - 1}"):
                mine.it.consolidate_state_dict(to)  # type: ignore[arg-type]
        consolidated, dense = mine.it.consolidate_state_dict(to=old - 1), mine.dense.state_dict()
        assert (consolidated is None) == (transport.rank < old - 1)
        weights = [p.detach() for p in mine.named.values()]
        return saved_and_read((consolidated, dense, weights, [p.detach() for p in mine.copies]))

    consolidated, dense, trained, copies = run(old, save)[-1]

    def program(transport: simulated.SimulatedTransport) -> None:
        mine = Parts(transport)
        mine.count = 4
        for ours, theirs in zip((*mine.named.values(), *mine.copies), (*trained, *copies), strict=True):
            ours.data.copy_(theirs)
        mine.dense.load_state_dict(copy.deepcopy(consolidated))
        mine.it.residuals_apart()
        mine.it.load_state_dict(dense)
        mine.steps(3)
        mine.check()

    run(new, program)


def test_parts_of_another_rank_are_refused() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        first, second = Parts(transport), Parts(transport)
        first.steps(2)
        state = first.it.state_dict()
        second.it.residuals_apart()
        with pytest.raises(sc.InvalidInputError, match=r"only a part of the moments of .*consolidate_state_dict"):
            second.it.load_state_dict(state)
        entry = first.it.state[first.named["matrix"]]
        entry["exp_avg"] = torch.zeros(17)
        with pytest.raises(sc.InvalidInputError, match=r"mean of matrix has shape \(17,\); expected"):
            first.steps(1)

    run(2, program)


def test_settings_change_before_a_backward_pass_that_exchanges() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine, other = (OfTorchWithOverlap(transport, **RULE) for _ in range(2))
        for adapter in (mine, other):
            adapter.step(gradients(0, 0))
            adapter.it.zero_grad()
            adapter.loss(gradients(1, 0)).backward()
        for group in mine.it.param_groups:
            group["lr"] = 0.5
        before = bits(mine)
        with pytest.raises(sc.InvalidInputError, match="change lr and other settings before the backward pass"):
            mine.it.step()
        assert bits(mine) == before
        for group in mine.it.param_groups:
            group["lr"] = RULE["lr"]
        for adapter in (mine, other):
            adapter.it.step()
        assert bits(mine) == bits(other) != before

    run(1, program)


# -- unusable states --------------------------------------------------------------------------------------------------


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


def test_wrong_settings_after_the_first_step() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = OfTorch(transport, **RULE)
        mine.step(gradients(0, 0))
        group, before = mine.it.param_groups[0], bits(mine)
        saved = dict(group)
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
            group.update(saved)
        assert bits(mine) == before
        mine.step(gradients(1, 0))

    run(1, program)


# -- errors -----------------------------------------------------------------------------------------------------------


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
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})  # named as by DDP
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
