"""Shared by cases of training, each process being one rank: a model with chosen gradients, its training, the oracle.

``main(FOLDER, NAME, ...)`` runs the cases of files by name.
"""

from __future__ import annotations

import copy
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.torch import DistributedOptimizer, register, register_fsdp
from tests import reference

RANK, P = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ODD = 1 % P  # the rank that deviates
SHAPES = {"a": (20, 14), "b": (7,), "c": (5, 3, 4, 2), "d": (290,), "e": (1,)}
DENSITY = 0.1
EXACT = {"density": DENSITY, "scope": "tensor", "dense_below": 0}  # as in the oracle
SMALL = 0.0004  # MB in a bucket of DDP: several buckets
WAYS = ("hook", "hook of views", "optimizer")
Gradients = dict[str, torch.Tensor]

FOLDER = Path()  # set by `main`
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case for any number of ranks."""
    CASES.append(function)
    return function


def case_of_several(function: Callable[[], None]) -> Callable[[], None]:
    return case(function) if P > 1 else function


def main(folder: str, *names: str) -> None:
    """Run the cases of ``names``. The starter kills ranks that wait for a failed one: see `tests.forks`."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for known in ("Adam divides gradients", "DTensor random operators"):
        warnings.filterwarnings("ignore", known)
    os.environ.update(SPARSECOMM_PROFILE="none", GLOO_SOCKET_IFNAME="lo")  # makes the choice of "auto" reproducible
    torch.set_num_threads(1)
    global FOLDER
    FOLDER = Path(folder)
    dist.init_process_group("gloo", store=dist.FileStore(str(FOLDER / "store"), P), rank=RANK, world_size=P)
    for name in names:
        importlib.import_module(f"tests.torch.{name}")
    for function in CASES:
        began = time.monotonic()
        function()
        dist.barrier()
        print(f"rank {RANK}: passed {function.__name__} {time.monotonic() - began:.2f} s\n", end="", flush=True)
    dist.destroy_process_group()


# -- a model ----------------------------------------------------------------------------------------------------------


class Chosen(nn.Module):
    """A model whose gradients are its input, whatever the weights are."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtypes: Iterable[torch.dtype] = ()) -> None:
        super().__init__()
        random, types = torch.Generator().manual_seed(1), list(dtypes) or [torch.float32]
        for i, (name, shape) in enumerate(shapes.items()):
            weight = torch.randint(-3, 4, shape, generator=random).to(types[i % len(types)])
            if len(shape) == 4:
                weight = weight.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, gradients: Gradients) -> torch.Tensor:
        parts = [(getattr(self, name) * g.to(getattr(self, name).dtype)).sum() for name, g in gradients.items()]
        return torch.stack([part.double() for part in parts]).sum()


def gradients(step: int, rank: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Gradients:
    """Return integers, whose sums are exact. None is all zeros, which the hook treats as no gradient."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    arrays = {name: torch.randint(-4, 5, shape, generator=random).float() for name, shape in shapes.items()}
    for gradient in arrays.values():
        if not gradient.any():
            gradient.view(-1)[:1] = 1
    return arrays


def gradients_by_rank(
    step: int, without: Mapping[int, str] | None = None, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[Gradients]:
    """Return the gradients of all ranks; ``without``: the names that each rank does not use, as letters of a string."""
    unused, ranks = without or {}, range(P)
    return [{n: g for n, g in gradients(step, rank, shapes).items() if n not in unused.get(rank, "")} for rank in ranks]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@cache
def _mesh() -> Any:
    """Replicas of one shard."""
    return init_device_mesh("cpu", (P, 1), mesh_dim_names=("replicate", "shard"))


class Training:
    """Training of a model with one way of exchanging gradients, and its oracle.

    Attributes:
        run: the callable for forward passes: DDP or the model itself.
        exchange: the object with the reducer and its state.
    """

    def __init__(
        self,
        way: str = "optimizer",
        model: nn.Module | None = None,
        make: Any = sgd,
        ddp: Mapping[str, Any] = {},
        **options: Any,
    ) -> None:
        self.way, self.model, self.scaler = way, Chosen() if model is None else model, options.get("scaler")
        settings = {"algorithm": "split", **EXACT, **options}
        self.oracle = Oracle(self.model, settings["algorithm"], make)
        self.run: Any = self.model
        if way == "fsdp":
            fully_shard(self.model, mesh=_mesh()["shard"])
            self.exchange: Any = register_fsdp(self.model, comm=_mesh()["replicate"].get_group(), **settings)
        self.optimizer: Any = make([p for p in self.model.parameters() if p.requires_grad])
        if way == "optimizer":
            named = self.model.named_parameters(remove_duplicate=False)
            self.optimizer = self.exchange = DistributedOptimizer(self.optimizer, named, **settings)
        elif way != "fsdp":
            views = {"gradient_as_bucket_view": way == "hook of views", "bucket_cap_mb": SMALL}
            self.run = DistributedDataParallel(self.model, **{**views, **ddp})
            self.exchange = register(self.run, **settings) if way != "ddp" else None

    def backward(self, gradients: Gradients) -> None:
        loss = self.run(gradients)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def step(self, gradients: Gradients, none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=none)
        self.backward(gradients)
        self.update()

    def follow(self, by_rank: list[Gradients], none: bool = True) -> None:
        """Make a step and the oracle's, and compare them."""
        self.step(by_rank[RANK], none)
        self.compare(by_rank)

    def compare(self, by_rank: list[Gradients]) -> None:
        """Make the oracle's step with the same gradients, and compare."""
        self.oracle.step(by_rank)
        self.check()

    def check(self) -> None:
        self.oracle.check(self.model, self.state())

    def state(self) -> Any:
        state = self.exchange.state_dict()
        return state["sparsecomm"] if self.way == "optimizer" else state

    def load(self, state: Any) -> None:
        complete = {**self.optimizer.state_dict(), "sparsecomm": state} if self.way == "optimizer" else state
        self.exchange.load_state_dict(complete)

    def end(self) -> None:
        if hasattr(self.exchange, "remove"):
            self.exchange.remove()

    def set(self, gradients: Gradients) -> None:
        """Set gradients without a backward pass."""
        for name, p in self.model.named_parameters():
            p.grad = torch.empty_like(p).copy_(gradients[name])


# -- the oracle -------------------------------------------------------------------------------------------------------


class Oracle:
    """All ranks at once, in plain NumPy: per tensor, add gradient and residual, select the top k, sum, and average.

    Entries that "split" drops from the sum return to the ranks that selected them. This rank is ``rank`` of ``ranks``.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str = "split",
        make: Callable[[Any], torch.optim.Optimizer] = sgd,
        *,
        rank: int = RANK,
        ranks: int = P,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.model, self.algorithm = copy.deepcopy(model), algorithm
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = make(list(self.named.values()))
        self.residuals = [{name: self._accumulated(p) * 0 for name, p in self.named.items()} for _ in range(ranks)]

    @staticmethod
    def _accumulated(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        flat = tensor.detach().contiguous().reshape(-1)
        return (flat if flat.dtype == torch.float64 else flat.float()).numpy().copy()

    def exchange(self, by_rank: list[Gradients]) -> None:
        """Set gradients to means. A rank without a gradient keeps its residual. Without gradients there is no mean."""
        for name, parameter in self.named.items():
            n, with_gradient = parameter.numel(), [name in gradients for gradients in by_rank]
            if n == 0 or not any(with_gradient):
                parameter.grad = None
                continue
            for gradients, residual in zip(by_rank, self.residuals, strict=True):
                if name in gradients:
                    residual[name] += self._accumulated(gradients[name])
            k = max(1, round(DENSITY * n))
            residuals = [residual for residual, has in zip(self.residuals, with_gradient, strict=True) if has]
            zeros = self._accumulated(parameter) * 0
            inputs = [r[name] if has else zeros for r, has in zip(self.residuals, with_gradient, strict=True)]
            chosen = [reference.topk(residual[name], k) for residual in residuals]
            total = reference.dense(reference.allreduce("allgather", inputs, k, range(self.ranks)), n)
            for residual, (indices, values) in zip(residuals, chosen, strict=True):
                residual[name][indices] -= values
            if self.algorithm == "split":
                winners = reference.dense(reference.topk(total, k), n)
                for residual, (indices, values) in zip(residuals, chosen, strict=True):
                    back = winners[indices] == 0
                    residual[name][indices[back]] = values[back]
                total = winners
            mean = torch.from_numpy(total / total.dtype.type(self.ranks)).reshape(parameter.shape).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(mean)

    def step(self, by_rank: list[Gradients]) -> None:
        self.exchange(by_rank)
        self.optimizer.step()

    def check(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Check that this rank's weights and residuals equal the oracle's bit for bit."""
        for name, parameter in model.named_parameters():
            if name in self.named:
                assert torch.equal(parameter, self.named[name]), name
        for name, residual in self.residuals[self.rank].items():
            scale = state["loss_scale"] or 1
            assert np.array_equal(state["residuals"][name].numpy().reshape(-1) / scale, residual), name


# -- all ranks --------------------------------------------------------------------------------------------------------


def all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * P
    dist.all_gather_object(values, value)
    return values


def flat(model: nn.Module) -> np.ndarray[Any, Any]:
    return np.concatenate([p.detach().double().reshape(-1).numpy() for p in model.parameters()])


def same_everywhere(model: nn.Module) -> np.ndarray[Any, Any]:
    """Return the weights, after a check that all ranks have the same."""
    mine = flat(model)
    assert all(np.array_equal(mine, other) for other in all_gather(mine))
    return mine


def alone(model: nn.Module) -> None:
    """Let one rank make a backward pass without the others."""
    if RANK == ODD:
        with soon():
            model.zero_grad()
            model(gradients(1, RANK)).backward()
            assert torch.equal(model.a.grad, gradients(1, RANK)["a"])


class Fails(torch.autograd.Function):
    """An operation whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


def all_residuals(state: Mapping[str, Any]) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return the residuals of all ranks, without the scale of the loss."""
    scale = state["loss_scale"] or 1
    return all_gather({name: residual.numpy().reshape(-1) / scale for name, residual in state["residuals"].items()})


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSECOMM_TIMEOUT", str(seconds))
        yield


@contextmanager
def soon(seconds: float = 60) -> Iterator[None]:
    """Check that the block ends long before any timeout."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds
