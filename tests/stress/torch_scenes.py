"""The scenes of PyTorch: see `tests.stress.scenes`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

import sparsecomm as sc
from tests.interrupts import InterruptError, interrupted
from tests.stress.scenes import SHAPES, Scene, Within, gradients
from tests.stress.side_channel import SideChannel

__all__ = ["TORCH_SCENES"]

_OPTIONS: dict[str, Any] = {"scope": "tensor", "dense_below": 3}


class _Training:
    """A model and its optimizer, with DDP's hook or with `DistributedOptimizer`, as they were when they were saved."""

    def __init__(self, kind: str, rank: int, comm: Any, saved: Any = None) -> None:
        import torch

        from sparsecomm.torch import DistributedOptimizer, register

        self.kind, self.rank = kind, rank
        self.module = module = torch.nn.Module()
        for name, shape in SHAPES.items():
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        named = dict(module.named_parameters())

        def forward(given: Any) -> Any:
            return sum((p * given[name]).sum() for name, p in named.items())

        module.forward = forward
        self.model, self.optimizer = module, torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
        if saved is not None:
            module.load_state_dict(saved[0])
        if kind == "hook":
            self.model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-5, init_sync=False)
            self.holder: Any = register(self.model, 0.2, comm=comm, **_OPTIONS)
            if saved is not None:
                self.optimizer.load_state_dict(saved[1])
        else:
            self.optimizer = self.holder = DistributedOptimizer(
                self.optimizer, named.items(), 0.2, comm=comm, **_OPTIONS
            )
        if saved is not None:
            self.holder.load_state_dict(saved[2])

    def states(self) -> Any:
        return copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict(), self.holder.state_dict()))

    def train(self, step: int) -> None:
        import torch

        given = {name: torch.from_numpy(g) for name, g in gradients(self.rank, step).items()}
        self.optimizer.zero_grad()
        self.model(given).backward()
        self.optimizer.step()

    def go_on(self, step: int) -> None:
        """Go on as if nothing had been, after an interrupt: an error says what to do, unless all is as it was."""
        hook = self.kind == "hook"
        if not (self.holder if hook else self.holder._exchange).used:
            return
        if hook and step == 0:  # in which DDP itself would wait for the others
            return
        if not hook and self.holder._exchange._pass is None and not self.holder._exchange.divided:
            return
        try:
            self.train(step)
        except RuntimeError:  # of DistributedDataParallel, which has not finished the pass before
            assert hook
        except sc.InvalidInputError as error:
            if "load a checkpoint" not in str(error) and "synchronize()" not in str(error):
                raise
        else:
            raise AssertionError("went on as if nothing had been")


def _step(kind: str, number: int) -> Scene:
    """Steps of a model in PyTorch, one of which is interrupted: all ranks then begin from what they saved before it.

    Before that, the interrupted rank tries to go on as if nothing had been: an error says what to do, or nothing had.
    """

    def scene(ranks: SideChannel, within: Within) -> Any:
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
                assert sc.sparse_allreduce(np.ones(3, np.float32), 1, comm=comm).nnz == 1  # it can be used again
                comm = ranks.new()  # the reducers that it had may not be as many on all ranks
                training = _Training(kind, ranks.rank, comm, saved)
                training.train(step)
        held = [p.detach().numpy().tobytes() for p in training.module.parameters()]
        assert held == ranks.gather(held)[0], "weights differ between ranks"
        state = training.holder.state_dict()
        return held + [kept.numpy().tobytes() for kept in state.get("sparsecomm", state)["residuals"].values()]

    return scene


TORCH_SCENES = {
    "torch-hook-first": _step("hook", 0),
    "torch-hook": _step("hook", 1),
    "torch-optimizer-first": _step("optimizer", 0),
    "torch-optimizer": _step("optimizer", 1),
}
