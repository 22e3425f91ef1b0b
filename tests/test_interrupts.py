"""One rank is interrupted at every place of a scene, and recovers as docs/reference/errors.md says.

Scenes return values that must equal those without an interrupt bit for bit. For single calls see
`tests/calls/test_interrupts.py`, for several ranks `tests/stress/calls.py` and `tests/stress/lives.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

MPI = pytest.importorskip("mpi4py.MPI")

import sparsecomm as sc  # noqa: E402
from tests import interrupts  # noqa: E402
from tests.interrupts import InterruptError, Points, interrupted  # noqa: E402
from tests.states.subjects import KINDS, Subject, digest  # noqa: E402
from tests.thinning import exhaustive  # noqa: E402

SHAPES = {"a": (30,), "b": (7, 3), "c": (2,)}
TORCH: dict[str, Any] = {"scope": "tensor", "dense_below": 3}
LOCAL: dict[str, Any] = {"scope": "tensor", "algorithm": "allgather", "op": "mean", "wire": "plain", "dense_below": 0}

Arrays = dict[str, np.ndarray]
Within = Callable[[], AbstractContextManager[Any]]  # a block that is interrupted
Scene = Callable[[Within], Any]


def gradients(step: int) -> Arrays:
    random = np.random.default_rng(step)
    return {name: random.integers(-9, 10, shape).astype(np.float32) for name, shape in SHAPES.items()}


def zeros() -> Arrays:
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def new_comm() -> Any:
    return MPI.COMM_SELF.Dup()


def residuals(reducer: sc.Reducer) -> Arrays:
    return {name: np.asarray(reducer.residual(name)) for name in SHAPES}


def until(done: Callable[[], bool], act: Callable[[], Any]) -> None:
    """Repeat an action after interrupts, until it is done."""
    while True:
        try:
            if done():
                return
            act()
        except InterruptError:  # noqa: PERF203
            continue


def again(comm: Any, within: Within, act: Callable[[], Any]) -> None:
    """Perform an action that makes one call; after an interrupt, realign and repeat it."""
    try:
        with within():
            act()
    except InterruptError:
        sc.realign(comm)
        act()


def first_call(within: Within) -> Any:
    """A first call. `last_call` tells where the gradient is, and the next call is right."""
    comm, x = new_comm(), np.arange(40, dtype=np.float32) - 17
    residual, out = np.ones(40, np.float32), np.empty(40, np.float32)

    def call() -> None:
        sc.sparse_allreduce(x, 5, comm=comm, algorithm="butterfly", residual=residual, out=out)

    before = residual.copy()
    try:
        with within():
            call()
    except InterruptError:
        last, added = sc.last_call(comm), np.array_equal(residual, before + x)
        if last.number == 0:
            assert np.array_equal(residual, before), "an interrupt before the call has changed the residual"
        else:
            assert added or last.succeeded, "after the call began the residual is not residual + x"
        sc.realign(comm)
    residual[:] = before
    call()
    return digest((residual, out))


# -- states -----------------------------------------------------------------------------------------------------------


def state(subject: Subject) -> str:
    """Return a digest of a state, without measured times."""
    return digest({key: value for key, value in subject.obj.state_dict().items() if not key.endswith("_seconds")})


def load(kind: str) -> Scene:
    def scene(within: Within) -> Any:
        comm = new_comm()
        subject = KINDS[kind](comm)
        for step in range(1, 8):
            subject.step(step)
        saved = copy.deepcopy(subject.obj.state_dict())
        subject.step(8)
        subject.obj.state_dict()  # ends calls under way
        again(comm, within, lambda: subject.obj.load_state_dict(saved))
        for step in range(9, 12):
            subject.step(step)
        return state(subject)

    return scene


def rebuild(kind: str) -> Scene:
    def scene(within: Within) -> Any:
        subject = KINDS[kind](new_comm())
        for step in range(1, 6):
            subject.step(step)
        parameters = () if kind == "Reducer" else (subject.weights,)
        if parameters:
            subject.obj.finish(*parameters)
        comm = new_comm()
        again(comm, within, lambda: subject.obj.rebuild(comm, *parameters))
        for step in range(6, 9):
            subject.step(step)
        return state(subject)

    return scene


# -- steps ------------------------------------------------------------------------------------------------------------


def reducer_step(number: int, **options: Any) -> Scene:
    """Steps of a reducer, one of them interrupted; `pushed` and `step` tell where to continue."""

    def scene(within: Within) -> Any:
        reducer = sc.Reducer(zeros(), 0.2, comm=new_comm(), op="sum", dense_below=3, **options)
        outs, applied = zeros(), zeros()
        for i in range(3):
            with within() if i == number else nullcontext():
                for name, gradient in gradients(i).items():
                    push = lambda n=name, g=gradient: reducer.push(n, g, out=outs[n])  # noqa: E731
                    until(lambda n=name: reducer.pushed(n), push)
                until(lambda i=i: reducer.step > i, lambda: reducer.wait())
            assert reducer.last is not None
            assert reducer.step == i + 1
            for name, out in outs.items():
                applied[name] += out
        return digest((applied, residuals(reducer)))

    return scene


def adamw_step(number: int) -> Scene:
    """Steps of AdamW, every other one after a comparison of weights; one is interrupted and repeated."""

    def scene(within: Within) -> Any:
        weights = zeros()
        optimizer = sc.SparseAdamW(weights, density=0.2, comm=new_comm(), check_weights_every=2)
        for i in range(4):
            arrays = gradients(i)
            with within() if i == number else nullcontext():
                until(lambda i=i: max(optimizer._adamw.steps.values()) > i, lambda g=arrays: optimizer.step(g))
        return digest((weights, residuals(optimizer.reducer)))

    return scene


def local_step(number: int, delay: int = 0, **options: Any) -> Scene:
    """Local steps, one of them interrupted; `round` and `local_step` tell how to continue."""
    begins = delay > 0 and number % 2 == 0  # an exchange, which includes more changes if it begins a step later

    def scene(within: Within) -> Any:
        parameters = zeros()
        schedule = {"sync_every": 2, "fragment_sync_delay": delay, "outer": sc.NesterovSGD(0.5, 0.5), "decay": 0.5}
        steps = sc.LocalSteps(parameters, 0.5, comm=new_comm(), **LOCAL, **schedule, **options)
        act = lambda: steps.step(parameters)  # noqa: E731
        for i in range(6):
            for name, move in gradients(i).items():
                parameters[name] += move
            try:
                with within() if i == number else nullcontext():
                    act()
            except InterruptError:
                if 2 * steps.round + steps.local_step == i:
                    act()
                elif not begins:
                    steps.finish(parameters)
        return None if begins else digest((steps.global_parameters(), parameters))

    return scene


# -- PyTorch ----------------------------------------------------------------------------------------------------------


class Training:
    """A model and its `DistributedOptimizer`, from the states ``saved`` if any."""

    def __init__(self, saved: Any = None) -> None:
        import torch

        from sparsecomm.torch import DistributedOptimizer

        self.module = torch.nn.Module()
        for name, shape in SHAPES.items():
            self.module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        if saved is not None:
            self.module.load_state_dict(saved[0])
        named = self.module.named_parameters()
        sgd = torch.optim.SGD(self.module.parameters(), lr=0.5, momentum=0.5)
        self.optimizer: Any = DistributedOptimizer(sgd, named, 0.2, comm=new_comm(), **TORCH)
        if saved is not None:
            self.optimizer.load_state_dict(saved[1])

    def states(self) -> Any:
        return copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def train(self, step: int) -> None:
        import torch

        self.optimizer.zero_grad()
        inputs = gradients(step)
        sum((p * torch.from_numpy(inputs[name])).sum() for name, p in self.module.named_parameters()).backward()
        self.optimizer.step()

    def go_on(self, step: int) -> None:
        """Continue as if there had been no interrupt. An error says what to do, unless nothing has changed."""
        exchange = self.optimizer._exchange
        if not exchange.connected or (exchange._pass_id is None and not exchange.step_failed):
            return
        with pytest.raises(sc.InvalidInputError, match=r"load a checkpoint|synchronize\(\)"):
            self.train(step)


def torch_step(number: int) -> Scene:
    """Steps of a PyTorch model, one of them interrupted. After an attempt to continue, restart from the states."""

    def scene(within: Within) -> Any:
        training = Training()
        for step in range(3):
            saved = training.states() if step else None
            try:
                with within() if step == number else nullcontext():
                    training.train(step)
            except InterruptError:
                training.go_on(step)
                training.optimizer.remove()
                training = Training(saved)
                training.train(step)
        return digest((training.module.state_dict(), training.optimizer.state_dict()["sparsecomm"]["residuals"]))

    return scene


def torch_call(kind: str) -> Scene:
    """Steps of a PyTorch optimizer, whose exchange is interrupted and called again. The loss scale changes."""

    def scene(within: Within) -> Any:
        import torch

        from sparsecomm.torch import DistributedOptimizer, SparseAdamW

        named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        scaler = SimpleNamespace(get_scale=lambda: 4.0**step)
        options: dict[str, Any] = {"density": 0.3, "comm": new_comm(), "check_weights_every": None}
        if kind == "adamw":
            optimizer: Any = SparseAdamW(named.items(), 0.1, **options)
        else:
            sgd = torch.optim.SGD(named.values(), lr=1.0)
            optimizer = DistributedOptimizer(sgd, named.items(), scaler=scaler, **options, **TORCH)

        def done() -> bool:
            steps = optimizer._exchange.adamw.steps.values() if kind == "adamw" else [optimizer.reducer.step]
            return max(steps) > step

        for step in range(3):
            for name, gradient in gradients(step).items():
                named[name].grad = torch.from_numpy(gradient)
            with within() if step == 1 else nullcontext():
                until(done, optimizer.step if kind == "adamw" else optimizer.synchronize)
            if kind != "adamw":
                optimizer.step()
        return digest((optimizer.state_dict(), named))

    return scene


LOADED = ("Reducer", "LocalSteps", "SparseState", "DistributedOptimizer of SGD", "DiLoCo with SGD", "jax LocalSteps")
SCENES: dict[str, Scene] = {
    "first-call": first_call,
    "reducer-first": reducer_step(0),
    "reducer": reducer_step(1, scope="tensor"),
    "reducer-momentum": reducer_step(1, clip=5.0, momentum=0.5),
    "reducer-nonfinite": reducer_step(1, skip_nonfinite=True),
    "reducer-chunks": reducer_step(1, scope="chunk", chunk=10, decay=0.5, clip=5.0),
    "adamw-first": adamw_step(0),
    "adamw": adamw_step(2),
    "local-first": local_step(1),
    "local": local_step(3, fragments=2),
    "local-delay": local_step(2, delay=1),
    "local-applied": local_step(3, delay=1),
    **{f"rebuild-{kind}": rebuild(kind) for kind in ("Reducer", "LocalSteps")},
    **{f"load-{kind}": load(kind) for kind in LOADED},
    "torch-optimizer-first": torch_step(0),
    "torch-optimizer": torch_step(1),
    **{f"torch-{kind}": torch_call(kind) for kind in ("adamw", "synchronize")},
}
LONG = ("load-DistributedOptimizer of SGD", "load-DiLoCo with SGD", "torch-optimizer-first")
# Places from one interrupt to the next, in scenes that take long.
STRIDE = {"torch-optimizer": 5, "rebuild-LocalSteps": 3} | {f"load-{kind}": 5 for kind in LOADED[2:]}


@pytest.mark.filterwarnings("ignore:Adam divides gradients")
@pytest.mark.parametrize("name", [exhaustive(name) if name in LONG else name for name in SCENES])
def test_after_an_interrupt_the_outcome_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch" if name.startswith("torch") else "sys")
    # The library uses context managers of `contextlib`, so interrupt these, too.
    monkeypatch.setattr(interrupts.Points, "roots", (*Points.roots, contextlib.__file__))
    right, at, came = SCENES[name](nullcontext), 0, 1
    while came:
        points = Points(at)
        outcome = SCENES[name](lambda points=points: interrupted(points=points))  # type: ignore[misc]
        assert outcome == right, points.where
        at, came = at + STRIDE.get(name, 1), points.interrupts
    assert at >= 2
