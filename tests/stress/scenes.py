"""Scenes that are interrupted on one of two real ranks, or of four in two nodes.

Scenes continue as in docs/reference/errors.md. They return values that must equal those without an interrupt bit for
bit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np

import sparsecomm as sc
from tests.interrupts import InterruptError, interrupted
from tests.stress.harness import Ranks
from tests.stress.subjects import KINDS, ON_HOST, Subject, digest

SHAPES = {"a": (30,), "b": (7, 3), "c": (2,)}
_TORCH: dict[str, Any] = {"scope": "tensor", "dense_below": 3}
_LOCAL: dict[str, Any] = {"scope": "tensor", "algorithm": "allgather", "op": "mean", "wire": "plain", "dense_below": 0}

Arrays = dict[str, np.ndarray]
Within = Callable[[], AbstractContextManager[Any]]  # a block in which one rank is interrupted
Scene = Callable[[Ranks, Within], Any]


def gradients(rank: int, step: int) -> Arrays:
    random = np.random.default_rng((rank, step))
    return {name: random.integers(-9, 10, shape).astype(np.float32) for name, shape in SHAPES.items()}


def _zeros() -> Arrays:
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def _residuals(reducer: sc.Reducer) -> Arrays:
    return {name: np.asarray(reducer.residual(name)) for name in SHAPES}


def _again(ranks: Ranks, comm: Any, within: Within, act: Callable[[], Any]) -> None:
    """Perform an action that makes one call. After an error on any rank, realign and repeat it on all."""
    raised: list[str] = []
    for attempt in range(3):
        before = sc.last_call(comm).number
        failed = realigned = False
        try:
            with within() if attempt == 0 else interrupted():
                act()
        except (InterruptError, sc.SparseCommError) as error:
            failed = True
            raised.append(f"{type(error).__name__}: {error}")
            if isinstance(error, InterruptError):
                time.sleep(0.2)  # a submitted call is made in the meantime
            skipped = isinstance(error, InterruptError) and sc.last_call(comm).number == before
            if skipped or "sparsecomm.realign()" in str(error):  # the other rank waits in that call, or in realign
                sc.realign(comm)
                realigned = True
        of_ranks = ranks.gather((failed, realigned))
        if not any(failed for failed, _ in of_ranks):
            return
        if not all(realigned for _, realigned in of_ranks):
            sc.realign(comm)
    raise AssertionError(f"not usable again: {raised}")


def _until(done: Callable[[], bool], act: Callable[[], Any]) -> None:
    """Repeat an action after interrupts, until it is done."""
    while True:
        try:
            if done():
                return
            act()
        except InterruptError:  # noqa: PERF203
            continue


def _first_call(ranks: Ranks, within: Within) -> Any:
    """A first call. `last_call` tells where the gradient is, and the next call is right."""
    comm, x = ranks.new(), np.arange(40, dtype=np.float32) - 17 - ranks.rank
    residual, out = np.ones(40, np.float32), np.empty(40, np.float32)

    def call() -> None:
        sc.sparse_allreduce(x, 5, comm=comm, algorithm="butterfly", residual=residual, out=out)

    before, failed = residual.copy(), False
    try:
        with within():
            call()
    except (InterruptError, sc.SparseCommError) as error:
        failed, last = True, sc.last_call(comm)
        added = np.array_equal(residual, before + x)
        if not isinstance(error, InterruptError):
            assert added, "after an error of the library the residual is not residual + x"
        elif last.number == 0:
            assert np.array_equal(residual, before), "an interrupt before the call has changed the residual"
        else:
            assert added or last.succeeded, "after the call began the residual is not residual + x"
        if last.number == 0 if isinstance(error, InterruptError) else "sparsecomm.realign()" in str(error):
            sc.realign(comm)
    if any(ranks.gather(failed)):
        sc.realign(comm)
    residual[:] = before
    call()
    return digest((residual, out))


# -- states -----------------------------------------------------------------------------------------------------------


def _trained(kind: str, comm: Any, rank: int, steps: int) -> Subject:
    subject = KINDS[kind][0](comm, rank, np.random.default_rng(2))
    for _ in range(steps):
        subject.step()
    return subject


def _load(kind: str) -> Scene:
    """Both ranks load a state, or none does."""

    def scene(ranks: Ranks, within: Within) -> Any:
        comm = ranks.new()
        subject = _trained(kind, comm, ranks.rank, 7)
        state = subject.it.state_dict()
        subject.step()
        subject.finish()
        _again(ranks, comm, within, lambda: subject.it.load_state_dict(state))
        for _ in range(3):
            subject.step()
        subject.finish()
        return digest(subject.own())

    return scene


def _rebuild(kind: str) -> Scene:
    """A `rebuild`, repeated after an error on one rank: of a reducer on the same communicator, else on a new one."""

    def scene(ranks: Ranks, within: Within) -> Any:
        subject = _trained(kind, ranks.new(), ranks.rank, 5)
        subject.finish()
        if kind == "Reducer":
            comm = ranks.new()
            sc.realign(comm)
            _again(ranks, comm, within, lambda: subject.rebuild(comm))
        else:
            attempt, failed = 0, True
            while any(ranks.gather(failed)):
                comm, failed = ranks.new(), False  # broadcasts over the old one may be out of step
                act = lambda c=comm: subject.rebuild(c)  # noqa: E731
                try:
                    with interrupted() if attempt else within():
                        act()
                except (InterruptError, sc.SparseCommError):  # the other rank may time out
                    failed = True
                attempt += 1
        for _ in range(3):
            subject.step()
        subject.finish()
        return digest(subject.own())

    return scene


# -- steps ------------------------------------------------------------------------------------------------------------


def _reducer_step(number: int, **options: Any) -> Scene:
    """Steps of a reducer, one of them interrupted; `pushed` and `step` tell where to continue."""

    def scene(ranks: Ranks, within: Within) -> Any:
        reducer = sc.Reducer(_zeros(), 0.2, comm=ranks.new(), nodes=ranks.node, op="sum", dense_below=3, **options)
        outs, applied = _zeros(), _zeros()
        for i in range(3):
            with within() if i == number else interrupted():
                for name, gradient in gradients(ranks.rank, i).items():
                    push = lambda n=name, g=gradient: reducer.push(n, g, out=outs[n])  # noqa: E731
                    _until(lambda n=name: reducer.pushed(n), push)
                _until(lambda i=i: reducer.step > i, lambda: reducer.wait())
            assert reducer.last is not None
            assert reducer.step == i + 1
            for name, out in outs.items():
                applied[name] += out
        return digest((applied, _residuals(reducer)))

    return scene


def _adamw_step(number: int) -> Scene:
    """Steps of AdamW, every other one after a comparison of weights; one is interrupted and repeated."""

    def scene(ranks: Ranks, within: Within) -> Any:
        weights = _zeros()
        optimizer = sc.SparseAdamW(weights, density=0.2, comm=ranks.new(), nodes=ranks.node, check_weights_every=2)
        for i in range(4):
            arrays = gradients(ranks.rank, i)
            with within() if i == number else interrupted():
                _until(lambda i=i: max(optimizer._adamw.steps.values()) > i, lambda g=arrays: optimizer.step(g))
        return digest((weights, _residuals(optimizer.reducer)))

    return scene


def _local_step(number: int, delay: int = 0, **options: Any) -> Scene:
    """Local steps, one of them interrupted; `round` and `local_step` tell how to continue."""
    begins = delay > 0 and number % 2 == 0  # an exchange, which includes more changes if it begins a step later

    def scene(ranks: Ranks, within: Within) -> Any:
        parameters = _zeros()
        schedule = {"sync_every": 2, "fragment_sync_delay": delay, "outer": sc.NesterovSGD(0.5, 0.5), "decay": 0.5}
        steps = sc.LocalSteps(parameters, 0.5, comm=ranks.new(), **_LOCAL, **schedule, **options)
        act = lambda: steps.step(parameters)  # noqa: E731
        for i in range(6):
            for name, move in gradients(ranks.rank, i).items():
                parameters[name] += move
            try:
                with within() if i == number else interrupted():
                    act()
            except InterruptError:
                if 2 * steps.round + steps.local_step == i:
                    act()
                elif not begins:
                    steps.finish(parameters)
        weights = digest(steps.global_parameters())
        assert weights == ranks.gather(weights)[0], "global parameters differ between ranks"
        return None if begins else (weights, digest(parameters))

    return scene


# -- PyTorch ----------------------------------------------------------------------------------------------------------


class _Training:
    """A model and its optimizer, with DDP's hook or `DistributedOptimizer`, from the states ``saved`` if any."""

    def __init__(self, kind: str, rank: int, comm: Any, saved: Any = None) -> None:
        import torch

        from sparsecomm.torch import DistributedOptimizer, register

        self.kind, self.rank = kind, rank
        self.module = module = torch.nn.Module()
        for name, shape in SHAPES.items():
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        named = dict(module.named_parameters())

        def forward(inputs: Any) -> Any:
            return sum((p * inputs[name]).sum() for name, p in named.items())

        module.forward = forward
        self.model, self.optimizer = module, torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
        if saved is not None:
            module.load_state_dict(saved[0])
        if kind == "hook":
            self.model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-5, init_sync=False)
            self.holder: Any = register(self.model, 0.2, comm=comm, **_TORCH)
            if saved is not None:
                self.optimizer.load_state_dict(saved[1])
        else:
            self.optimizer = self.holder = DistributedOptimizer(self.optimizer, named.items(), 0.2, comm=comm, **_TORCH)
        if saved is not None:
            self.holder.load_state_dict(saved[2])

    def states(self) -> Any:
        return copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict(), self.holder.state_dict()))

    def train(self, step: int) -> None:
        import torch

        inputs = {name: torch.from_numpy(g) for name, g in gradients(self.rank, step).items()}
        self.optimizer.zero_grad()
        self.model(inputs).backward()
        self.optimizer.step()

    def go_on(self, step: int) -> None:
        """Continue as if there had been no interrupt. An error says what to do, unless nothing has changed."""
        hook = self.kind == "hook"
        if not (self.holder if hook else self.holder._exchange).connected:
            return
        if hook and step == 0:  # DDP itself would wait for the others
            return
        if not hook and self.holder._exchange._pass_id is None and not self.holder._exchange.step_failed:
            return
        try:
            self.train(step)
        except RuntimeError:  # DDP has not finished the previous pass
            assert hook
        except sc.InvalidInputError as error:
            if "load a checkpoint" not in str(error) and "synchronize()" not in str(error):
                raise
        else:
            raise AssertionError("went on as if there had been no interrupt")


def _torch_step(kind: str, number: int) -> Scene:
    """Steps of a PyTorch model, one of them interrupted. Then all ranks restart from the states before it.

    Before that, the interrupted rank tries to continue as if there had been no interrupt.
    """

    def scene(ranks: Ranks, within: Within) -> Any:
        comm = ranks.new()
        training = _Training(kind, ranks.rank, comm)
        for step in range(3):
            saved, error = training.states() if step else None, None
            try:
                with within() if step == number else interrupted():
                    training.train(step)
            except (InterruptError, sc.SparseCommError) as raised:
                error = raised
            if isinstance(error, InterruptError):
                training.go_on(step)
            if any(ranks.gather(error is not None)):
                if kind == "optimizer":
                    training.optimizer.remove()
                sc.realign(comm)
                assert sc.sparse_allreduce(np.ones(3, np.float32), 1, comm=comm).nnz == 1  # it still works
                comm = ranks.new()  # the old one's number of reducers may differ between ranks
                training = _Training(kind, ranks.rank, comm, saved)
                training.train(step)
        weights = digest(training.module.state_dict())
        assert weights == ranks.gather(weights)[0], "weights differ between ranks"
        state = training.holder.state_dict()
        return weights, digest(state.get("sparsecomm", state)["residuals"])

    return scene


def _torch_call(kind: str) -> Scene:
    """Steps of a PyTorch optimizer, whose exchange is interrupted and called again. The loss scale changes."""

    def scene(ranks: Ranks, within: Within) -> Any:
        import torch

        from sparsecomm.torch import DistributedOptimizer, SparseAdamW

        named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        scaler = SimpleNamespace(get_scale=lambda: 4.0**step)
        options: dict[str, Any] = {"density": 0.3, "comm": ranks.new(), "check_weights_every": None}
        if kind == "adamw":
            optimizer: Any = SparseAdamW(named.items(), 0.1, **options)
        else:
            sgd = torch.optim.SGD(named.values(), lr=1.0)
            optimizer = DistributedOptimizer(sgd, named.items(), scaler=scaler, **options, **_TORCH)

        def done() -> bool:
            steps = optimizer._exchange.adamw.steps.values() if kind == "adamw" else [optimizer.reducer.step]
            return max(steps) > step

        for step in range(3):
            for name, gradient in gradients(ranks.rank, step).items():
                named[name].grad = torch.from_numpy(gradient)
            with within() if step == 1 else interrupted():
                _until(done, optimizer.step if kind == "adamw" else optimizer.synchronize)
            if kind != "adamw":
                optimizer.step()
        return digest((optimizer.state_dict(), named))

    return scene


SCENES: dict[str, Scene] = {
    "first-call": _first_call,
    "reducer-first": _reducer_step(0),
    "reducer": _reducer_step(1, scope="tensor"),
    "reducer-momentum": _reducer_step(1, momentum=0.5),
    "reducer-clip": _reducer_step(1, clip=5.0),
    "reducer-nonfinite": _reducer_step(1, skip_nonfinite=True),
    "reducer-chunks": _reducer_step(1, scope="chunk", chunk=10, decay=0.5),
    "adamw-first": _adamw_step(0),
    "adamw": _adamw_step(2),
    "nodes-reducer": _reducer_step(1, momentum=0.5),
    "nodes-nonfinite": _reducer_step(1, scope="tensor", skip_nonfinite=True, clip=5.0),
    "nodes-adamw-first": _adamw_step(0),
    "nodes-adamw": _adamw_step(2),
    "local-first": _local_step(1),
    "local": _local_step(3, fragments=2),
    "local-delay": _local_step(2, delay=1),
    "local-applied": _local_step(3, delay=1),
    **{f"rebuild-{kind}": _rebuild(kind) for kind in ON_HOST},
    **{f"load-{kind}": _load(kind) for kind in KINDS},
    **{f"torch-{kind}-first": _torch_step(kind, 0) for kind in ("hook", "optimizer")},
    **{f"torch-{kind}": _torch_step(kind, 1) for kind in ("hook", "optimizer")},
    **{f"torch-{kind}": _torch_call(kind) for kind in ("adamw", "synchronize")},
}
