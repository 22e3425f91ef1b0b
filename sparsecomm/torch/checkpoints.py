"""Checkpoints of PyTorch's objects and of this library's: see `sparsecomm.checkpoints`."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib import parse

import numpy as np
import torch

from sparsecomm.checkpoints.checkpoints import Checkpoint, Files
from sparsecomm.checkpoints.formats import Folder, Format
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.states.schema import is_state
from sparsecomm.torch.diloco import DiLoCo
from sparsecomm.torch.optimizer_state import mapped
from sparsecomm.torch.shards import is_sharded
from sparsecomm.transport import Comm, transport_of

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
    Files(TorchFormat(), folder, comm).save(step, objects, keep)


def load(
    folder: Folder, objects: Mapping[str, object], *, comm: Comm = None, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks can read, into all objects that can load it. Collective.

    Where the number of ranks has changed, residuals are shared out among the new ones (`sparsecomm.reshard`), and all
    else is that of the old rank 0. With `DiLoCo` all ranks then begin with the global parameters.

    Args:
        folder, objects, comm, step: as in `sparsecomm.load`.

    Returns:
        What was loaded; tensors are in host memory. ``None``: no rank sees a checkpoint.

    Raises:
        SparseCommError: as `sparsecomm.load`.
    """
    found = Files(TorchFormat(), folder, comm).load(objects, step)
    if found is not None and found.ranks != transport_of(comm).size:
        for one in objects.values():
            if isinstance(one, DiLoCo):
                one.write_global_parameters()
    return found


class TorchFormat(Format):
    """Files as ``torch.save`` writes them (.pt). ``torch.load(weights_only=True)`` reads them, so code never runs."""

    suffix = ".pt"

    def dump(self, file: BinaryIO, value: dict[str, Any]) -> None:
        trial = io.BytesIO()
        try:  # with the tensors' elements left out
            torch.save(mapped(value, torch.Tensor, _without_elements), trial)
            torch.load(io.BytesIO(trial.getbuffer()), weights_only=True)
        except pickle.UnpicklingError as error:
            unknown = re.search(r"GLOBAL (\S+)", str(error))
            raise InvalidInputError(
                f"objects: {unknown[1] if unknown else error} cannot be loaded again; expected tensors, numbers, "
                "strings, and lists and dictionaries of them, or types given to torch.serialization.add_safe_globals"
            ) from error
        with _checksums():
            torch.save(value, file)

    def parse(self, file: BinaryIO, path: Path, *, verify: bool) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # files are never written to

    def state_of(self, one: Any) -> Any:
        state = super().state_of(one)
        return mapped(state, np.ndarray, torch.from_numpy) if is_state(state) else state

    def for_world(self, states: list[Any], rank: int, size: int) -> Any:
        return super().for_world([mapped(state, torch.Tensor, _check_whole) for state in states], rank, size)


def _without_elements(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(0) if type(tensor) is torch.Tensor else tensor


@contextmanager
def _checksums() -> Iterator[None]:
    """Let ``torch.save`` write checksums, also if the program has turned them off."""
    get, turn = (getattr(torch.serialization, f"{verb}_crc32_options", lambda *_: True) for verb in ("get", "set"))
    before = get()
    if not before:
        turn(True)
    try:
        yield
    finally:
        if not before:
            turn(False)


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

    _format = TorchFormat()

    def __init__(self, one: Any, checkpoint: Any = None, *, name: str = "state", comm: Comm = None) -> None:
        self._one, self._name, self._checkpoint, self._comm = one, name, checkpoint, comm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's state as bytes; to load, room for what is to be loaded.

        Raises:
            InvalidInputError: the checkpoint has no object of this name.
        """
        transport = transport_of(self._comm)
        if self._checkpoint is None:
            data = io.BytesIO()
            torch.save(self._format.state_of(self._one), data)
            return {self._key(transport.rank, transport.size): torch.frombuffer(data.getbuffer(), dtype=torch.uint8)}
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        is_path = isinstance(self._checkpoint, (str, os.PathLike))
        reader: Any = FileSystemReader(self._checkpoint) if is_path else self._checkpoint
        saved = reader.read_metadata().state_dict_metadata
        sizes = {key.rpartition(".")[2]: size.size for key, size in saved.items() if hasattr(size, "size")}
        found = {key: size for key, size in sizes.items() if self._ranks_in(key)}
        if not found:
            raise InvalidInputError(f"{self._checkpoint} has no {self._name!r} of a Stateful; it has {quote([*saved])}")
        own = self._key(transport.rank, transport.size)
        keys = [own] if own in found else list(found)
        return {key: torch.empty(found[key], dtype=torch.uint8, device="cpu") for key in keys}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the object, from what `state_dict` has made room for. Collective."""
        transport = transport_of(self._comm)
        by_rank = {at: key for key in state if (at := self._ranks_in(key)) is not None}
        own = (transport.rank, transport.size)
        old = transport.size if own in by_rank else max(size for _, size in by_rank)
        ranks = [own] if own in by_rank else [(rank, old) for rank in range(old)]
        if missing := [each for each in ranks if each not in by_rank]:
            raise InvalidInputError(f"the checkpoint lacks {self._name!r} of rank {missing[0][0]} of {old}")
        data = [io.BytesIO(state[by_rank[each]].numpy().tobytes()) for each in ranks]
        states = [torch.load(each, map_location="cpu", weights_only=True) for each in data]
        self._one.load_state_dict(states[0] if own in by_rank else self._format.for_world(states, *own))

    def _key(self, rank: int, size: int) -> str:
        # DCP joins keys by dots.
        return f"{parse.quote(self._name, safe='').replace('.', '%2E')}-rank{rank}-of{size}"

    def _ranks_in(self, key: str) -> tuple[int, int] | None:
        """Return the rank and the world size in a key of this object; ``None``: it is of another."""
        found = re.fullmatch(r"(.*)-rank(\d+)-of(\d+)", key, re.DOTALL)
        if found is None or key != self._key(int(found[2]), int(found[3])):
            return None
        return int(found[2]), int(found[3])
