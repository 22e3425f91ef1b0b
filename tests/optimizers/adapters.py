"""`SparseAdamW` for arrays, PyTorch and JAX behind one interface, for the tests of what all three promise."""

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

SHAPES = {"number": (), "matrix": (30, 11), "bias": (11,)}  # JAX has them in the order in which a Reducer has them
Arrays = dict[str, np.ndarray]
MIN_OWNED = 80  # elements of an owner, so that 5 ranks have 4 owners of these weights
# Layouts give the number of each rank's node. In these, the ranks of a node count as one.
NODES: list[Any] = ["0011", "001122", "010110", "00001111", exhaustive("00000000111111112222222233333333")]


def run_on(layout: str, program: Callable[[simulated.SimulatedTransport], Any]) -> list[Any]:
    return ranks.run(len(layout), program, nodes=[*map(int, layout)])


def part_of(state: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the begin and the end of the elements of a tensor whose residuals and units a rank has."""
    if state["slices"] is None:
        return 0, state["residuals"][name].size
    begin, end = state["slices"][name]["part"]
    return begin, end


def members_of(layout: str) -> list[list[int]]:
    """Return the ranks of each node. If nodes do not count as one rank, each rank is alone."""
    nodes = [[rank for rank, number in enumerate(layout) if number == node] for node in dict.fromkeys(layout)]
    return nodes if len(nodes) > 1 and len({*map(len, nodes)}) == 1 else [[rank] for rank in range(len(layout))]


def parts_of(layout: str, rank: int) -> dict[str, tuple[int, int]]:
    """Return the begin and the end of the elements of `SHAPES` whose residuals and units a rank has."""
    members, total = next(each for each in members_of(layout) if rank in each), 342
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


def given(step: int, rank: int, P: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Arrays:
    """Return gradients without some tensors: on all ranks in some steps, on some ranks or nodes in others."""
    found = gradients(step, rank, shapes)
    if (step % 3 == 1 and rank % 2) or (step == 3 and rank < P // 2):
        del found["bias"]
    if 4 <= step < 6 or (step == 7 and rank == P - 1):
        del found["matrix"]
    return found


class OfArrays:
    """The optimizer of arrays, and the interface of all adapters."""

    saves = lacks = True  # has states and `rebuild`; allows missing gradients

    def __init__(self, transport: simulated.SimulatedTransport, **rule: Any) -> None:
        self.weights = weights()
        self.it: Any = sc.SparseAdamW(self.weights, comm=transport, **rule)

    def step(self, given: Arrays, lr: float | None = None) -> None:
        self.it.lr = self.it.lr if lr is None else lr
        self.it.step(given)

    @property
    def moments(self) -> dict[str, tuple[np.ndarray, ...]]:
        """Mean, squares and last step of each weight of this rank's part, by name."""
        moments = self.it.state_dict()["moments"]
        return {name: (its["mean"], its["squares"], its["last"]) for name, its in moments.items()}

    @property
    def units(self) -> Arrays:
        """The exponents of units that this rank has, with the bias of float32, in flat arrays."""
        return {name: self.it.reducer.exponents(name) for name in SHAPES}

    @property
    def residuals(self) -> Arrays:
        """The residuals that this rank has, in flat arrays."""
        return {name: residual.reshape(-1) for name, residual in self.it.state_dict()["residuals"].items()}

    def steps(self) -> int:
        return max((its["step"] for its in self.it.state_dict()["moments"].values()), default=0)

    def damage(self, what: str) -> None:
        """Change a weight, or a unit, of this rank only."""
        (self.weights["bias"] if what == "weights" else self.units["bias"])[2] += 1


class OfTorch(OfArrays):
    """The optimizer of PyTorch. A backward pass makes its gradients."""

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

    def step(self, given: Arrays, lr: float | None = None) -> None:
        for group in self.it.param_groups if lr is not None else ():
            group["lr"] = self.torch.tensor(lr, dtype=self.torch.float64) if self.overlap else lr
        self.it.zero_grad()
        self.loss(given).backward()
        self.it.step()

    def loss(self, given: Arrays) -> Any:
        """Return a loss with these gradients."""
        products = [(self.named[name].float() * self.torch.from_numpy(g)).sum() for name, g in given.items()]
        return self.torch.stack(products).sum()

    @property
    def moments(self) -> dict[str, tuple[np.ndarray, ...]]:
        state = {name: self.it.state[p] for name, p in self.named.items() if "exp_avg" in self.it.state.get(p, {})}
        fields = ("exp_avg", "exp_avg_sq", "last_step")
        return {name: tuple(its[field].numpy().reshape(-1).copy() for field in fields) for name, its in state.items()}

    @property
    def residuals(self) -> Arrays:
        residuals = self.it.state_dict()["sparsecomm"]["residuals"]
        return {name: residual.numpy().reshape(-1) for name, residual in residuals.items()}

    def steps(self) -> int:
        return max((int(state["step"]) for state in self.it.state.values()), default=0)

    def damage(self, what: str) -> None:
        (self.named["bias"].data if what == "weights" else self.units["bias"])[2] += 1


class OfTorchWithOverlap(OfTorch):
    """On one rank: backward passes of simulated ranks cannot wait for each other."""

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

    def step(self, given: Arrays, lr: float | None = None) -> None:
        self.lr = self.lr if lr is None else lr
        changes, self.state = self.it.update(self.jax.tree.map(self.jax.numpy.array, given), self.state, self.params)
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
