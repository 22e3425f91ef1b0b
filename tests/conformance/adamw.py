"""`sparsecomm.torch.SparseAdamW` at density 1.0 against `torch.optim.AdamW`, in every configuration of `optim_db`.

PyTorch's AdamW in float64 is the truth from which the errors of PyTorch's AdamW in float32 and of `SparseAdamW` are
measured. `SparseAdamW` gets each rank's gradients; PyTorch's optimizers get the mean over the ranks.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal import common_optimizers as theirs  # once, before ranks are forked

from sparsecomm.errors import InvalidInputError
from sparsecomm.torch import SparseAdamW
from tests.conformance.outcomes import Outcome, outcomes_of_ranks, report

SUITE = f"PyTorch {torch.__version__}, AdamW in `optim_db`"
SECONDS = 3000
REFUSED = ("amsgrad", "foreach", "fused", "capturable", "differentiable")
SHAPES = {"weight": (10, 7), "bias": (7,), "number": (), "none": (0, 3), "deep": (3, 2, 2)}
Tensors = dict[str, torch.Tensor]
Case = Callable[[], "str | None"]


def outcomes(*, quick: bool) -> Iterator[Outcome]:
    """Run all cases on 1 to 3 ranks; if ``quick``, configurations in float64 on one rank, and the rest on two."""
    for P in (1, 2) if quick else (1, 2, 3):
        steps, rest = (20 if quick else 3000), P == 2 or not quick
        dtypes = ((torch.float64,) if P == 1 else (torch.float32,)) if quick else (torch.float32, torch.float64)

        def program(rank: int, P: int = P, steps: int = steps, dtypes: Any = dtypes, rest: bool = rest) -> None:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", rank=rank, world_size=P)
            for name, case in _cases(rank, P, steps, dtypes, rest=rest):
                try:
                    refused = case()
                    report(name, "not applicable" if refused else "passed", refused or "")
                except (Exception, pytest.fail.Exception):
                    report(name, "failed", traceback.format_exc(limit=-3))
                dist.barrier()
            dist.destroy_process_group()

        yield from outcomes_of_ranks(f"{SUITE}, P = {P}", P, program, SECONDS)


def _cases(rank: int, P: int, steps: int, dtypes: tuple[torch.dtype, ...], *, rest: bool) -> Iterator[tuple[str, Case]]:
    infos = {info.optim_cls: info for info in theirs.optim_db}
    info = infos[torch.optim.AdamW]
    seen: set[str] = set()
    # The inputs for GPUs consist of options only, and need no GPU.
    for device in ("cpu", "mps", "cuda"):
        for entry in theirs._get_optim_inputs_including_global_cliquey_kwargs(device, torch.float32, info):
            options = {name: value for name, value in entry.kwargs.items() if value is not False}
            refused = {name for name in REFUSED if name in options}
            if str(options) in seen or (refused and refused <= seen):  # one for each option that is refused
                continue
            seen |= {str(options), *refused}
            for dtype in dtypes:
                name = f"{options}, {dtype}"
                yield name, lambda k=entry.kwargs, d=dtype: _configuration(k, d, rank, P, steps)
    if not rest:
        return
    schedulers = [*info.scheduler_inputs, *infos[torch.optim.Adam].scheduler_inputs]
    for i, inputs in enumerate(schedulers):
        with_scheduler = f"scheduler input {i}"
        yield (
            with_scheduler,
            lambda inputs=inputs: _follows({"lr": 0.01}, torch.float32, rank, P, 40, schedulers=inputs),
        )
    for number, error in enumerate(info.optim_error_inputs_func("cpu", torch.float32)):
        entry = error.optimizer_error_input
        yield f"error input {number}: {entry.desc}", lambda entry=entry, e=error: _error(entry, e)
    checks = tensor_lr_changed_in_place, missing_gradients_are_no_step, state_dict_is_of_pytorch, state_dict_hooks
    for check in checks:
        yield check.__name__, lambda check=check: check(rank, P)


# -- one training, twice -----------------------------------------------------------------------------------------------


def weights(dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(dtype).requires_grad_() for n, s in SHAPES.items()}


def gradients(step: int, rank: int, dtype: torch.dtype) -> Tensors:
    """Return gradients with magnitudes from 1e-10 to 100, and some zeros; the first row is always zero."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    gradients_ = {}
    for name, shape in SHAPES.items():
        scale = torch.logspace(-10, 2, torch.Size(shape).numel()).reshape(shape)
        gradient = torch.randn(shape, generator=generator) * scale
        gradient[torch.rand(shape, generator=generator) < 0.2] = 0
        if gradient.dim():
            gradient[:1] = 0
        gradients_[name] = gradient.to(dtype)
    return gradients_


def sparse_adamw(named: Tensors, **options: Any) -> SparseAdamW:
    """Return a `SparseAdamW` that sends all entries exactly."""
    return SparseAdamW(list(named.items()), density=1.0, wire="packed", comm=dist.group.WORLD, **options)


class Trainings:
    """Three optimizers with the same gradients: `SparseAdamW`, PyTorch's AdamW, and PyTorch's AdamW in float64."""

    def __init__(self, rank: int, P: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.rank, self.P, self.dtype, self.step_number = rank, P, dtype, 0
        exact_weights = {n: w.detach().double().requires_grad_() for n, w in weights(dtype).items()}
        self.named = [weights(dtype), weights(dtype), exact_weights]
        first = sparse_adamw(self.named[0], **copy.deepcopy(options))
        # A learning rate in a tensor is float32, and PyTorch computes 1 - lr * weight_decay in float32 even for float64
        # weights. `SparseAdamW` uses the rate as a number. So the reference gets the rate in float64, and `SparseAdamW`
        # may differ by the rounding error of PyTorch's other optimizer.
        exact = {name: value.double() if torch.is_tensor(value) else value for name, value in options.items()}
        others = [
            torch.optim.AdamW(list(named.items()), foreach=False, **copy.deepcopy(arguments))
            for named, arguments in zip(self.named[1:], (options, exact), strict=True)
        ]
        self.optimizers: list[Any] = [first, *others]

    def step(self, without: Callable[[int, str], bool] = lambda rank, name: False) -> None:
        """Make a step. With ``without(rank, name)``, a rank has no gradient: zeros, if another rank has one."""
        of_ranks = [gradients(self.step_number, rank, self.dtype) for rank in range(self.P)]
        for i, (named, optimizer) in enumerate(zip(self.named, self.optimizers, strict=True)):
            optimizer.zero_grad()
            for name, weight in named.items():
                have = [r for r in range(self.P) if not without(r, name)]
                available = [of_ranks[r][name] for r in have]
                if i == 0 and self.rank in have:
                    weight.grad = available[have.index(self.rank)]
                elif i and have:
                    weight.grad = torch.stack([g.to(weight.dtype) for g in available]).sum(0) / self.P
            optimizer.step()
        self.step_number += 1

    def check(self) -> None:
        """Check that weights and moments of `SparseAdamW` are about as exact as PyTorch's. Rank 0 has all moments."""
        consolidated = self.optimizers[0].consolidate_state_dict()
        for i, name in enumerate(SHAPES):
            mine, pytorchs, truth = (named[name].detach().double() for named in self.named)
            if truth.numel():
                limit = 4 * (pytorchs - truth).abs().max() + 8 * torch.finfo(self.dtype).eps * (1 + truth.abs())
                _check_within(name, mine, pytorchs, truth, limit)
            if consolidated is None:
                continue
            states = [o.state[named[name]] for o, named in zip(self.optimizers, self.named, strict=True)]
            states[0] = consolidated["state"].get(i, {})
            if not states[1]:  # SparseAdamW has state for all parameters, here of step 0
                assert not states[0].get("step"), f"{name}: state {states[0]} where AdamW has none"
                continue
            steps = states[0]["step"], states[1]["step"]
            assert torch.is_tensor(steps[0]), f"step of {name} is {steps[0]!r}, not a tensor as in PyTorch"
            assert steps[0].dtype == steps[1].dtype, f"step of {name}: {steps[0].dtype}, not {steps[1].dtype}"
            assert steps[0] == steps[1], f"step of {name}: {steps[0]}, not {steps[1]}"
            root = states[2]["exp_avg_sq"].sqrt()  # AdamW divides the mean by it, so it is the unit of errors
            tiny = torch.finfo(torch.float32).tiny
            for field, unit in (("exp_avg", root), ("exp_avg_sq", root**2)):
                mine, pytorchs, truth = (state[field].double() for state in states)
                far = (
                    ((pytorchs - truth).abs() / (unit + tiny)).max() if truth.numel() else 0.0
                )  # PyTorch's error, in units
                limit = (64 * torch.finfo(self.dtype).eps + 4 * far) * unit + tiny
                _check_within(f"{field} of {name}", mine, pytorchs, truth, limit)


def _check_within(
    name: str, mine: torch.Tensor, pytorchs: torch.Tensor, truth: torch.Tensor, limit: torch.Tensor
) -> None:
    far = ((mine - truth).abs() - limit).flatten()
    if (far > 0).any():
        at = far.argmax()
        numbers = [tensor.flatten()[at].item() for tensor in (mine, pytorchs, truth)]
        raise AssertionError("{}: {!r}, PyTorch {!r}, in float64 {!r}".format(name, *numbers))


def _follows(options: dict[str, Any], dtype: torch.dtype, rank: int, P: int, steps: int, schedulers: Any = ()) -> None:
    both = Trainings(rank, P, dtype, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rates = [[scheduler(optimizer) for scheduler in schedulers] for optimizer in both.optimizers]
    for step in range(steps):
        both.step()
        for of_one in rates:
            for scheduler in of_one:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(1.0)
                else:
                    scheduler.step()
        if step in (0, 1, 9):
            both.check()
    both.check()
    if schedulers:
        used = [optimizer.param_groups[0]["lr"] for optimizer in both.optimizers]
        assert used[0] == used[1], f"learning rates {used}"


def _configuration(options: dict[str, Any], dtype: torch.dtype, rank: int, P: int, steps: int) -> str | None:
    refused = [name for name in REFUSED if options.get(name)]
    if not refused:
        _follows({name: value for name, value in options.items() if name not in REFUSED}, dtype, rank, P, steps)
        sparse_adamw(weights(dtype), **options)  # the unsupported flags may be passed as False
        return None
    with pytest.raises(InvalidInputError) as error:
        sparse_adamw(weights(dtype), **options)
    named = [name for name in refused if name in str(error.value)]
    if isinstance(options.get("betas", [0])[0], torch.Tensor) and "betas" in str(error.value):
        named.append("betas in tensors")  # PyTorch accepts them only with capturable=True
    assert named, f"the refusal names none of {refused}: {error.value}"
    return f"refused with an error that names the option: {named[0]}"


def _error(entry: Any, error: Any) -> None:
    defaults = weights(torch.float32)
    params = list(defaults.items()) if entry.params is None else entry.params
    try:
        SparseAdamW(params, density=1.0, wire="packed", comm=dist.group.WORLD, **entry.kwargs)
    except InvalidInputError:
        return
    raise AssertionError(f"taken, where PyTorch raises {error.error_type.__name__}: {error.error_regex}")


# -- other checks of PyTorch's optimizer tests ------------------------------------------------------------------------


def tensor_lr_changed_in_place(rank: int, P: int) -> None:
    both = Trainings(rank, P, lr=torch.tensor(0.01))
    for _ in range(20):
        both.step()
        for optimizer in both.optimizers:
            optimizer.param_groups[0]["lr"].mul_(0.9)
    both.check()


def missing_gradients_are_no_step(rank: int, P: int) -> None:
    both = Trainings(rank, P)
    for without in (
        lambda r, name: name == "bias",
        lambda r, name: name == "weight" and r == P - 1,  # missing on one rank, where it counts as zeros
        lambda r, name: name in ("bias", "deep"),
        lambda r, name: False,
    ):
        both.step(without)
        both.check()


def state_dict_is_of_pytorch(rank: int, P: int) -> None:
    both = Trainings(rank, P)
    for _ in range(5):
        both.step()
    both.check()
    mine, pytorchs = (optimizer.state_dict() for optimizer in both.optimizers[:2])
    assert mine.keys() >= pytorchs.keys()
    for group, other in zip(mine["param_groups"], pytorchs["param_groups"], strict=True):
        for key in ("lr", "betas", "eps", "weight_decay", "params"):
            assert group[key] == other[key], f"{key} of a group: {group[key]}, not {other[key]}"
    for i, state in pytorchs["state"].items():
        assert mine["state"][i].keys() >= state.keys(), f"{mine['state'][i].keys()}, not {state.keys()}"


def state_dict_hooks(rank: int, P: int) -> None:
    both = Trainings(rank, P)
    both.step()
    seen: list[str] = []
    optimizer = both.optimizers[0]
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert list(dict.fromkeys(seen)) == ["before saving", "after saving", "before loading", "after loading"], seen
