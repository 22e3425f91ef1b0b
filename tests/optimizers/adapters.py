"""One interface to `SparseAdamW` for arrays, PyTorch and JAX."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import ranks
from tests.thinning import exhaustive

SHAPES = {"number": (), "matrix": (30, 11), "bias": (11,)}  # in JAX's order, which is also the Reducer's
Arrays = dict[str, np.ndarray]
MIN_OWNED = 80  # elements per owner: on 5 ranks, these weights have 4 owners
# A layout lists each rank's node. In these layouts, the ranks of a node count as one.
NODES: list[Any] = ["0011", "001122", "010110", "00001111", exhaustive("00000000111111112222222233333333")]


def run_on(layout: str, program: Callable[[simulated.SimulatedTransport], Any]) -> list[Any]:
    return ranks.run(len(layout), program, nodes=[*map(int, layout)])


def part_of(state: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the range of a tensor's elements whose residuals and units a rank stores."""
    if state["slices"] is None:
        return 0, state["residuals"][name].size
    begin, end = state["slices"][name]["part"]
    return begin, end


def members_of(layout: str) -> list[list[int]]:
    """Return the ranks of each node. If nodes do not count as one rank, each rank is alone."""
    nodes = [[rank for rank, number in enumerate(layout) if number == node] for node in dict.fromkeys(layout)]
    return nodes if len(nodes) > 1 and len({*map(len, nodes)}) == 1 else [[rank] for rank in range(len(layout))]


def parts_of(layout: str, rank: int) -> dict[str, tuple[int, int]]:
    """Return, for each tensor of `SHAPES`, the range of elements whose residuals and units a rank stores."""
    members, total = next(ranks for ranks in members_of(layout) if rank in ranks), 342
    length, at, parts = -(-total // len(members)), 0, {}
    first = length * members.index(rank)
    for name, shape in reversed(SHAPES.items()):
        size = int(np.prod(shape))
        begin, end = (min(max(bound - at, 0), size) for bound in (first, first + length))
        parts[name] = begin, end
        at += size
    return parts


def gradients(step: int, rank: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Arrays:
    rng, sizes = np.random.default_rng([step, rank]), {"matrix": 1.0, "bias": 1e-3, "number": 50.0, "nothing": 1.0}
    return {name: np.array(rng.standard_normal(shape) * sizes[name], np.float32) for name, shape in shapes.items()}


def weights(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Arrays:
    rng = np.random.default_rng(7)
    return {name: np.array(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def partial_gradients(step: int, rank: int, P: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Arrays:
    """Return gradients without some tensors: on all ranks in some steps, on some ranks or nodes in others."""
    arrays = gradients(step, rank, shapes)
    if (step % 3 == 1 and rank % 2) or (step == 3 and rank < P // 2):
        del arrays["bias"]
    if 4 <= step < 6 or (step == 7 and rank == P - 1):
        del arrays["matrix"]
    return arrays


class OfArrays:
    """The optimizer of arrays, and the interface of all adapters."""

    saves = lacks = True  # whether it has states and `rebuild`, and accepts missing gradients

    def __init__(self, transport: simulated.SimulatedTransport, **rule: Any) -> None:
        self.weights = weights()
        self.it: Any = sc.SparseAdamW(self.weights, comm=transport, **rule)

    def step(self, gradients: Arrays, lr: float | None = None) -> None:
        self.it.lr = self.it.lr if lr is None else lr
        self.it.step(gradients)

    @property
    def moments(self) -> dict[str, tuple[np.ndarray, ...]]:
        """Mean, squares and last step of this rank's part of each weight."""
        moments = self.it.state_dict()["moments"]
        return {name: (moment["mean"], moment["squares"], moment["last"]) for name, moment in moments.items()}

    @property
    def units(self) -> Arrays:
        """The exponents of this rank's units, with the bias of float32, as flat arrays."""
        return {name: self.it.reducer.exponents(name) for name in SHAPES}

    @property
    def residuals(self) -> Arrays:
        """This rank's residuals, as flat arrays."""
        return {name: residual.reshape(-1) for name, residual in self.it.state_dict()["residuals"].items()}

    def steps(self) -> int:
        return max((moment["step"] for moment in self.it.state_dict()["moments"].values()), default=0)

    def damage(self, what: str) -> None:
        """Change a weight, or a unit, of this rank only."""
        (self.weights["bias"] if what == "weights" else self.units["bias"])[2] += 1


class OfTorch(OfArrays):
    """The optimizer for PyTorch. A backward pass makes its gradients."""

    overlap = False

    def __init__(
        self, transport: simulated.SimulatedTransport, weight_decay: Any = 0.01, dtype: str = "float32", **rule: Any
    ) -> None:
        self.torch = torch = pytest.importorskip("torch")
        tensors = {name: torch.from_numpy(w).to(getattr(torch, dtype)) for name, w in weights().items()}
        self.named = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
        decay = weight_decay if isinstance(weight_decay, dict) else dict.fromkeys(SHAPES, weight_decay)
        groups = [{"params": [(n, p)], "weight_decay": decay.get(n, 0.0)} for n, p in self.named.items()]
        self.it = sc.torch.SparseAdamW(groups, comm=transport, overlap=self.overlap, **rule)

    @property
    def weights(self) -> Arrays:  # type: ignore[override]
        return {name: p.detach().numpy() for name, p in self.named.items()}

    def step(self, gradients: Arrays, lr: float | None = None) -> None:
        for group in self.it.param_groups if lr is not None else ():
            group["lr"] = self.torch.tensor(lr, dtype=self.torch.float64) if self.overlap else lr
        self.it.zero_grad()
        self.loss(gradients).backward()
        self.it.step()

    def loss(self, gradients: Arrays) -> Any:
        """Return a loss that has these gradients."""
        products = [(self.named[name].float() * self.torch.from_numpy(g)).sum() for name, g in gradients.items()]
        return self.torch.stack(products).sum()

    @property
    def moments(self) -> dict[str, tuple[np.ndarray, ...]]:
        state = {name: self.it.state[p] for name, p in self.named.items() if "exp_avg" in self.it.state.get(p, {})}
        fields = ("exp_avg", "exp_avg_sq", "last_step")
        return {name: tuple(m[field].numpy().reshape(-1).copy() for field in fields) for name, m in state.items()}

    @property
    def residuals(self) -> Arrays:
        residuals = self.it.state_dict()["sparsecomm"]["residuals"]
        return {name: residual.numpy().reshape(-1) for name, residual in residuals.items()}

    def steps(self) -> int:
        return max((int(state["step"]) for state in self.it.state.values()), default=0)

    def damage(self, what: str) -> None:
        (self.named["bias"].data if what == "weights" else self.units["bias"])[2] += 1


class OfTorchWithOverlap(OfTorch):
    """With overlap, on one rank only: backward passes of simulated ranks cannot wait for each other."""

    overlap = True


class OfJax(OfArrays):
    saves = lacks = False

    def __init__(
        self,
        transport: simulated.SimulatedTransport,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: Any = 0.01,
        **rule: Any,
    ) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        self.jax, self.optax = pytest.importorskip("jax"), pytest.importorskip("optax")
        pytest.importorskip("greenlet")
        decays = weight_decay if isinstance(weight_decay, dict) else dict.fromkeys(SHAPES, weight_decay)
        mask, self.lr = {name: bool(decays.get(name)) for name in SHAPES}, lr
        decay = max(decays.values())
        rates = lambda step: self.lr  # noqa: E731 # read in each step, without jit
        self.it = sc.jax.sparse_adamw(rates, *betas, weight_decay=decay, mask=mask, comm=transport, **rule)
        self.params = self.jax.tree.map(self.jax.numpy.array, weights())
        self.state = self.it.init(self.params)

    @property
    def weights(self) -> Arrays:  # type: ignore[override]
        return {name: np.asarray(p) for name, p in self.params.items()}

    def step(self, gradients: Arrays, lr: float | None = None) -> None:
        self.lr = self.lr if lr is None else lr
        tree = self.jax.tree.map(self.jax.numpy.array, gradients)
        changes, self.state = self.it.update(tree, self.state, self.params)
        self.params = self.optax.apply_updates(self.params, changes)

    @property
    def moments(self) -> dict[str, tuple[np.ndarray, ...]]:
        trees = self.state.mu, self.state.nu, self.state.last
        return {name: tuple(np.asarray(tree[name]).reshape(-1) for tree in trees) for name in SHAPES}

    @property
    def units(self) -> Arrays:
        return {name: np.asarray(units).reshape(-1) for name, units in self.state.units.items()}

    @property
    def residuals(self) -> Arrays:
        return {name: np.asarray(residual).reshape(-1) for name, residual in self.state.residuals.items()}

    def steps(self) -> int:
        return int(self.state.step)

    def damage(self, what: str) -> None:
        tree = dict(self.params if what == "weights" else self.state.units)
        tree["bias"] = tree["bias"] + 1
        if what == "weights":
            self.params = tree
        else:
            self.state = self.state._replace(units=tree)
