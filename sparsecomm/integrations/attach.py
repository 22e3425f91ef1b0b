"""`attach` makes a DDP model exchange its gradients sparsely. All integrations use it, and save residuals with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.checkpoints.checkpoints import CheckpointFolder
from sparsecomm.errors import InvalidInputError, log
from sparsecomm.reducer import Reducer
from sparsecomm.torch import SparseAdamW, SparseOptimizer, broadcast_parameters, keep_local, register
from sparsecomm.torch.checkpoints import TorchFormat
from sparsecomm.transport import transport_of

FOLDER = "sparsecomm"  # inside a framework's checkpoint folder
KEY = "sparsecomm_checkpoint"  # in a framework's checkpoint, for the id of its residuals


class Attached:
    """The sparse exchange of one model's gradients.

    Residuals are saved under an id that is also in the framework's checkpoint, so that only matching ones are loaded.

    Attributes:
        ddp: the model.
        optimizers: optimizers that exchange gradients themselves; empty if a hook of DDP does.
        objects: the objects whose states each rank saves, by name.
        reducers: one per object, with counters, buckets and residuals.
    """

    def __init__(
        self, ddp: DistributedDataParallel, optimizers: list[SparseAdamW], objects: dict[str, Any], *reducers: Reducer
    ) -> None:
        self.ddp, self.optimizers, self.objects, self.reducers = ddp, optimizers, objects, reducers
        self._run: str | None = None

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return max(reducer.step for reducer in self.reducers)

    @property
    def run(self) -> str:
        """A random name for this training; a new one after a resume. The first use is collective."""
        if self._run is None:
            drawn = torch.tensor(list(os.urandom(8)), dtype=torch.uint8, device="cpu")
            broadcast_parameters({"run": drawn})
            self._run = bytes(drawn.tolist()).hex()
        return self._run

    def begin_run(self) -> None:
        """Let the next use of `run` draw a new name."""
        self._run = None

    def release(self) -> None:
        """End the exchange of the optimizers, so that new ones can be made for the same parameters."""
        for optimizer in self.optimizers:
            optimizer.remove()

    def save(self, folder: Path, checkpoint: str) -> None:
        """Save each rank's residuals and moments in ``folder`` under the id ``checkpoint``. Collective."""
        _files(folder, checkpoint).save(self.step, self.objects, keep=1)

    def load(self, folder: Path, checkpoint: object, source: object) -> None:
        """Load residuals, also on another number of ranks. If there are none, set all to zero and warn. Collective.

        Args:
            folder: as in `save`; it may differ between ranks.
            checkpoint: the id in the framework's checkpoint, or ``None``.
            source: the framework's checkpoint, for the warning.
        """
        known = isinstance(checkpoint, str) and re.fullmatch(r"[0-9a-f]{16}-\d+", checkpoint)
        files = _files(folder, str(checkpoint) if known else "none")
        self.begin_run()
        if files.exists_on_all_ranks():
            files.load(self.objects, None)
            return
        for reducer in self.reducers:
            reducer.discard()
        if transport_of(None).rank == 0:
            reason = "this checkpoint was saved without residuals"
            if known:
                reason = f"the residuals of this checkpoint are not in {folder} on all ranks; copy that folder with it"
            log.warning(
                "%s: %s. Training begins with empty residuals%s: if it was sparse before, the gradient entries that "
                "were not sent before the checkpoint are lost",
                source,
                reason,
                ", and with new moments unless the checkpoint has them" if self.optimizers else "",
            )

    def prune(self, folder: Path, keep: int) -> None:
        """Remove this rank's residuals in ``folder``, except those of the newest ``keep`` checkpoints."""
        transport = transport_of(None)
        files: dict[Path, list[Path]] = {}
        for path in folder.glob("*/step*-rank*-of*.pt"):
            rank = re.match(r"step\d+-rank(\d+)-", path.name)
            if rank and int(rank[1]) % transport.size == transport.rank:  # also the files of a larger world size
                files.setdefault(path.parent, []).append(path)
        newest_first = sorted(files, key=lambda saved: max(map(_modified, files[saved])), reverse=True)
        for saved in newest_first[keep:]:
            for path in files[saved]:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # other ranks' files are still there
                saved.rmdir()


def _files(folder: Path, checkpoint: str) -> CheckpointFolder:
    return CheckpointFolder(TorchFormat(), folder / checkpoint, None, exclusive=False)  # no other job has this id


def _modified(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def attach(
    model: object, optimizers: Iterable[Any], density: Any, options: Mapping[str, Any], before: Attached | None = None
) -> Attached:
    """Exchange a model's gradients sparsely: with `SparseAdamW` by the optimizers, otherwise by a hook of DDP.

    Args:
        model: a DDP model, which may be compiled, or inside another module.
        optimizers: of the model, without a framework's wrappers.
        density, options: as in `sparsecomm.torch.register`; ignored if optimizers exchange gradients.
        before: the result of an earlier call, which is used again if model and optimizers are the same.

    Raises:
        InvalidInputError: the model is not in DDP, or has a hook already; or only some optimizers exchange gradients.
    """
    ddp, optimizers = ddp_of(model), list(optimizers)
    sparse = [optimizer for optimizer in optimizers if isinstance(optimizer, SparseAdamW)]
    _check(ddp, optimizers, sparse)
    if before is not None and before.ddp is not ddp:
        before = None
    if before is not None and list(map(id, before.optimizers)) == list(map(id, sparse)):
        return before
    if not sparse:
        state = register(ddp, density, **options)
        return Attached(ddp, [], {"hook": state}, state.reducer)
    if before is None or not before.optimizers:
        keep_local(ddp)
    objects = {f"optimizer {number}": optimizer.residuals_apart() for number, optimizer in enumerate(sparse)}
    return Attached(ddp, sparse, objects, *(optimizer.reducer for optimizer in sparse))


def unwrapped(optimizer: object) -> object:
    """Return an optimizer without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def ddp_of(model: object) -> DistributedDataParallel:
    """Return the DDP model in a model that may be compiled, or wrapped by another module. There must be exactly one."""
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model: got {type(model).__name__}; expected a torch.nn.Module")
    ddps = ddps_in(model)
    if len(ddps) == 1:
        return ddps[0]
    if ddps:
        raise InvalidInputError(
            f"model: {type(model).__name__} contains {len(ddps)} DistributedDataParallel models; register each of them"
        )
    problem = f"model: {type(model).__name__} is not wrapped in DistributedDataParallel"
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        raise InvalidInputError(f"{problem}; pass the model that the framework has wrapped, and do not use FSDP")
    raise InvalidInputError(
        f"{problem}, because there is only one process; start it with torchrun, also for a single process "
        "(torchrun --nproc_per_node 1)"
    )


def ddps_in(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP models in a model."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
        model = inner
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _check(ddp: DistributedDataParallel, optimizers: list[object], sparse: list[SparseAdamW]) -> None:
    """Check that each gradient is exchanged once."""
    others = [optimizer for optimizer in optimizers if optimizer not in sparse]
    if wrapped := [optimizer for optimizer in others if isinstance(optimizer, SparseOptimizer)]:
        raise InvalidInputError(
            f"optimizer: {type(wrapped[0]).__name__} is a DistributedOptimizer, and DistributedDataParallel would "
            "overwrite its gradients; pass a plain optimizer, for which a hook exchanges gradients"
        )
    if not sparse:
        return
    if others:
        raise InvalidInputError(
            f"optimizer: {type(sparse[0]).__name__} exchanges gradients itself and {type(others[0]).__name__} does "
            "not; use one kind for all parameters of a model"
        )
    exchanged = {id(p) for optimizer in sparse for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and id(parameter) not in exchanged and name not in ddp.parameters_to_ignore:
            raise InvalidInputError(
                f"optimizer: no SparseAdamW has {name}, so its gradient would not be exchanged; pass all optimizers "
                "of the model as a list, or freeze the parameter"
            )
