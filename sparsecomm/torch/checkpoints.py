"""Checkpoints of PyTorch's objects and of this library's: see `sparsecomm.checkpoints`."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from sparsecomm.checkpoints import OF_ARRAYS, Checkpoint, Files, Folder
from sparsecomm.checks import shown
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps import reshard
from sparsecomm.torch.diloco import DiLoCo
from sparsecomm.torch.hook import SparseState
from sparsecomm.torch.optimizer import KEY, SparseOptimizer
from sparsecomm.torch.optimizer_state import mapped
from sparsecomm.torch.parameters import Parameters
from sparsecomm.torch.shards import is_sharded
from sparsecomm.transport import Comm, of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Checkpoint", "Stateful", "load", "save"]


def save(folder: Folder, step: int, objects: Mapping[str, object], *, comm: Comm = None, keep: int = 1) -> None:
    """Save a checkpoint, each rank its part: `sparsecomm.save`, of what PyTorch saves. Collective.

        state = sparsecomm.torch.register(ddp, 0.01)
        objects = {"model": model, "optimizer": optimizer, "sparse": state}
        found = sparsecomm.torch.load(folder, objects)
        for epoch in range(found.step if found else 0, epochs):
            ...
            sparsecomm.torch.save(folder, epoch + 1, objects)

    Args:
        folder, step, comm, keep: as in `sparsecomm.save`.
        objects: by name: what has ``state_dict`` and ``load_state_dict``; other values are returned by `load`. They are
            of the types that ``torch.load(weights_only=True)`` reads.

    Raises:
        SparseCommError: as `sparsecomm.save`.
    """
    TorchFiles().save(folder, step, objects, comm, keep)


def load(
    folder: Folder, objects: Mapping[str, object], *, comm: Comm = None, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks can read, into all objects that can load it. Collective.

    Where the number of ranks has changed, residuals are shared out among the new ones (`sparsecomm.reshard`), and all
    else is that of the old rank 0. With `DiLoCo` all ranks then begin with the global parameters.

    Args:
        folder, objects, comm, step: as in `sparsecomm.load`.

    Returns:
        What was loaded; ``None``: there is no checkpoint that all ranks see.

    Raises:
        SparseCommError: as `sparsecomm.load`.
    """
    found = TorchFiles().load(folder, objects, comm, step)
    if found is not None and found.ranks != of(comm).size:
        for one in objects.values():
            if isinstance(one, DiLoCo):
                one.write_global_parameters()
    return found


class TorchFiles(Files):
    """Files as ``torch.save`` makes them. Code in them is not run."""

    suffix = ".pt"

    def write(self, file: BinaryIO, states: dict[str, Any]) -> None:
        torch.save(states, file)
        file.flush()
        try:
            torch.load(file.name, weights_only=True, mmap=True)  # which leaves tensors in the file
        except pickle.UnpicklingError as error:
            unknown = re.search(r"GLOBAL (\S+)", str(error))
            raise InvalidInputError(
                f"objects: {unknown[1] if unknown else error} cannot be loaded again; expected tensors, numbers, "
                "texts, and lists and dictionaries of them, or types that torch.serialization.add_safe_globals was "
                "told of"
            ) from error

    def read(self, path: Path, *, own: bool) -> dict[str, Any]:
        # Of other ranks' tensors none goes to the GPU that it came from. Files are never written to, so that tensors
        # may stay in them.
        states: dict[str, Any] = torch.load(path, map_location=None if own else "cpu", weights_only=True, mmap=True)
        return states if own else mapped(states, torch.Tensor, _check_whole)

    def state_of(self, one: Any) -> Any:
        state = super().state_of(one)
        return mapped(state, np.ndarray, torch.from_numpy) if isinstance(one, OF_ARRAYS) else state

    def for_this_rank(self, one: object, states: list[Any], rank: int, size: int, *, own: bool) -> Any:
        if isinstance(one, OF_ARRAYS):
            states = mapped(states, torch.Tensor, torch.Tensor.numpy)
        if not own and isinstance(one, SparseOptimizer):
            return {**states[0], KEY: reshard([state[KEY] for state in states], rank, size)}
        if not own and isinstance(one, (Parameters, SparseState, DiLoCo)):
            return reshard(states, rank, size)
        return super().for_this_rank(one, states, rank, size, own=own)


def _check_whole(tensor: torch.Tensor) -> torch.Tensor:
    if is_sharded(tensor):
        raise InvalidInputError("there are shards of tensors, of a mesh of other ranks; start as many as have saved it")
    return tensor


class Stateful:
    """An object of this library for `torch.distributed.checkpoint`, beside a model that has shards.

        dcp.save({"model": model, "sparse": Stateful(state)}, checkpoint_id=folder)
        dcp.load({"model": model, "sparse": Stateful(state, folder)}, checkpoint_id=folder)

    Each rank's state is a tensor of bytes of its own. Another number of ranks may load it.

    Args:
        one: what has ``state_dict`` and ``load_state_dict``: a `SparseState`, an optimizer, a `DiLoCo`, a `Reducer`.
        checkpoint: where to load from: a folder, or a ``StorageReader``. ``None``: it is to be saved.
        name: where several are saved together, each has its own.
        comm: the ranks; ``None``: all.
    """

    _files = TorchFiles()

    def __init__(self, one: Any, checkpoint: Any = None, *, name: str = "state", comm: Comm = None) -> None:
        self._one, self._name, self._checkpoint, self._comm = one, name, checkpoint, comm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's state as bytes; to load, room for what is to be loaded.

        Raises:
            InvalidInputError: the checkpoint has none of this name.
        """
        ranks = of(self._comm)
        if self._checkpoint is None:
            kept = io.BytesIO()
            torch.save(self._files.state_of(self._one), kept)
            return {self._key(ranks.rank, ranks.size): torch.frombuffer(kept.getbuffer(), dtype=torch.uint8)}
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        path = isinstance(self._checkpoint, (str, os.PathLike))
        reader: Any = FileSystemReader(self._checkpoint) if path else self._checkpoint
        saved = reader.read_metadata().state_dict_metadata
        sizes = {key.rpartition(".")[2]: size.size for key, size in saved.items() if hasattr(size, "size")}
        own = self._key(ranks.rank, ranks.size)
        found = {key: size for key, size in sizes.items() if re.fullmatch(self._key(r"\d+", r"\d+"), key)}
        if not found:
            raise InvalidInputError(f"{self._checkpoint} has no {self._name!r} of a Stateful; it has {shown([*saved])}")
        keys = [own] if own in found else list(found)
        return {key: torch.empty(found[key], dtype=torch.uint8, device="cpu") for key in keys}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the object, from what `state_dict` has made room for. Collective."""
        ranks, (*_, last) = of(self._comm), sorted(state)
        old = int(last.rpartition("of")[2])
        own = old == ranks.size
        keys = [self._key(rank, old) for rank in ([ranks.rank] if own else range(old))]
        states = [torch.load(io.BytesIO(state[key].numpy().tobytes()), weights_only=True) for key in keys]
        self._one.load_state_dict(self._files.for_this_rank(self._one, states, ranks.rank, ranks.size, own=own))

    def _key(self, rank: int | str, size: int | str) -> str:
        return f"{self._name}-rank{rank}-of{size}"
