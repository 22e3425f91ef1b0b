"""Checkpoints of PyTorch objects: `save` and `load` write and read .pt files; `Stateful` adapts to PyTorch's own."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib import parse

import numpy as np
import torch

from sparsecomm.checkpoints.checkpoints import Checkpoint, CheckpointFolder
from sparsecomm.checkpoints.files import Folder, Format
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.signals import deferred, poll
from sparsecomm.states.schema import is_state
from sparsecomm.torch.diloco import DiLoCo
from sparsecomm.torch.optimizer_state import mapped
from sparsecomm.torch.parameters import is_sharded
from sparsecomm.transport import Comm, transport_of


def save(folder: Folder, step: int, objects: Mapping[str, object], *, comm: Comm = None, keep: int = 1) -> None:
    """Save a checkpoint, one file per rank, like `sparsecomm.save`, which documents errors. Collective.

        objects = {"model": model, "optimizer": optimizer, "sparse": state}
        checkpoint = sparsecomm.torch.load(folder, objects)
        for epoch in range(checkpoint.step if checkpoint else 0, epochs):
            ...
            sparsecomm.torch.save(folder, epoch + 1, objects)

    Args:
        folder, step, comm, keep: see `sparsecomm.save`.
        objects: objects with ``state_dict`` and ``load_state_dict``, and other values, which `load` returns, by name.
            ``torch.load(weights_only=True)`` must be able to read all types.
    """
    CheckpointFolder(TorchFormat(), folder, comm).save(step, objects, keep)


def load(
    folder: Folder, objects: Mapping[str, object], *, comm: Comm = None, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks can read into ``objects``: see `sparsecomm.load`. Collective.

    If the world size has changed, residuals are distributed over the new ranks (`sparsecomm.reshard`), and everything
    else comes from the old rank 0. With `DiLoCo`, all ranks then start from the global parameters.

    Returns:
        The checkpoint, with tensors in host memory, or ``None`` if no rank sees a checkpoint.
    """
    checkpoint = CheckpointFolder(TorchFormat(), folder, comm).load(objects, step)
    if checkpoint is not None and checkpoint.ranks != transport_of(comm).size:
        for obj in objects.values():
            if isinstance(obj, DiLoCo):
                obj.write_global_parameters()
    return checkpoint


class TorchFormat(Format):
    """The format of ``torch.save`` (.pt), read with ``weights_only=True``, which runs no code.

    Reading and writing run within the gate for signals, because PyTorch's C++ code calls methods of Python files: an
    exception there can abort the process.
    """

    suffix = ".pt"

    @deferred
    def dump(self, file: BinaryIO, value: dict[str, Any]) -> None:
        trial = io.BytesIO()
        try:  # test whether the types can be loaded again; the elements of tensors are left out
            torch.save(mapped(value, torch.Tensor, lambda t: t.new_empty(0) if type(t) is torch.Tensor else t), trial)
            torch.load(io.BytesIO(trial.getbuffer()), weights_only=True)
        except pickle.UnpicklingError as error:
            unknown = re.search(r"GLOBAL (\S+)", str(error))
            raise InvalidInputError(
                f"objects: {unknown[1] if unknown else error} cannot be loaded again; expected tensors, numbers, "
                "strings, and lists and dictionaries of them, or types given to torch.serialization.add_safe_globals"
            ) from error
        written = _PolledFile(file)
        checksums = getattr(torch.serialization, "get_crc32_options", lambda: True)()
        try:
            if not checksums:  # the program has turned them off
                torch.serialization.set_crc32_options(True)
            torch.save(value, written)  # type: ignore[arg-type] # it calls no other methods
        finally:
            if not checksums:
                torch.serialization.set_crc32_options(False)
        if written.error is not None:
            raise written.error

    @deferred
    def parse(self, file: BinaryIO, path: Path, *, arrays: bool) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # files are never overwritten

    def state_of(self, obj: Any) -> Any:
        state = super().state_of(obj)
        return mapped(state, np.ndarray, torch.from_numpy) if is_state(state) else state

    def for_world(self, states: list[Any], rank: int, size: int) -> Any:
        return super().for_world([mapped(state, torch.Tensor, _refuse_sharded) for state in states], rank, size)


class _PolledFile:
    """A file for ``torch.save`` that raises nothing: it stores the first exception, and drops all later data.

    Handlers of signals run before each write.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        try:
            if self.error is None:
                poll()
                self._file.write(data)
        except BaseException as error:
            self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing; the owner of the file flushes it."""


def _refuse_sharded(tensor: torch.Tensor) -> torch.Tensor:
    if is_sharded(tensor):
        raise InvalidInputError("tensors are sharded over a mesh of other ranks; start with the saved world size")
    return tensor


class Stateful:
    """Saves an object of this library with `torch.distributed.checkpoint`.

        dcp.save({"model": model, "sparse": Stateful(state)}, checkpoint_id=folder)
        dcp.load({"model": model, "sparse": Stateful(state, folder)}, checkpoint_id=folder)

    The state of each rank is a tensor of bytes. The world size may change.

    Args:
        obj: a `SparseState`, an optimizer, a `DiLoCo`, a `Reducer`, or another object with ``state_dict`` and
            ``load_state_dict``.
        checkpoint: the folder or the ``StorageReader`` to load from; ``None`` to save.
        name: a name that is unique in the checkpoint.
        comm: the ranks; ``None``: all ranks.
    """

    _format = TorchFormat()

    def __init__(self, obj: Any, checkpoint: Any = None, *, name: str = "state", comm: Comm = None) -> None:
        self._obj, self._name, self._checkpoint, self._comm = obj, name, checkpoint, comm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's state as bytes; with a checkpoint to load, empty tensors that PyTorch fills."""
        transport = transport_of(self._comm)
        if self._checkpoint is None:
            data = io.BytesIO()
            torch.save(self._format.state_of(self._obj), data)
            return {self._key(transport.rank, transport.size): torch.frombuffer(data.getbuffer(), dtype=torch.uint8)}
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        is_path = isinstance(self._checkpoint, (str, os.PathLike))
        reader: Any = FileSystemReader(self._checkpoint) if is_path else self._checkpoint
        saved = reader.read_metadata().state_dict_metadata
        tensors = {key.rpartition(".")[2]: tensor for key, tensor in saved.items() if hasattr(tensor, "size")}
        sizes = {key: tensor.size for key, tensor in tensors.items() if self._parse_key(key)}
        if not sizes:
            raise InvalidInputError(f"{self._checkpoint} has no {self._name!r} of a Stateful; it has {quote([*saved])}")
        own = self._key(transport.rank, transport.size)
        keys = [own] if own in sizes else list(sizes)
        return {key: torch.empty(sizes[key], dtype=torch.uint8, device="cpu") for key in keys}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the object from the tensors that `state_dict` returned and PyTorch has filled. Collective."""
        transport = transport_of(self._comm)
        keys = {source: key for key in state if (source := self._parse_key(key)) is not None}
        own = (transport.rank, transport.size)
        size = max(size for _, size in keys)
        sources = [own] if own in keys else [(rank, size) for rank in range(size)]
        if missing := [rank for rank, size in sources if (rank, size) not in keys]:
            raise InvalidInputError(f"the checkpoint lacks {self._name!r} of rank {missing[0]} of {size}")
        files = [io.BytesIO(state[keys[source]].numpy().tobytes()) for source in sources]
        states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        self._obj.load_state_dict(states[0] if own in keys else self._format.for_world(states, *own))

    def _key(self, rank: int, size: int) -> str:
        # A name must not contain dots, with which PyTorch joins keys.
        return f"{parse.quote(self._name, safe='').replace('.', '%2E')}-rank{rank}-of{size}"

    def _parse_key(self, key: str) -> tuple[int, int] | None:
        """Return the rank and the world size in a key of this object, or ``None`` for the key of another object."""
        match = re.fullmatch(r".*-rank(\d+)-of(\d+)", key, re.DOTALL)
        rank_and_size = (int(match[1]), int(match[2])) if match else None
        return rank_and_size if rank_and_size and key == self._key(*rank_and_size) else None
