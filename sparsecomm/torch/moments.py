"""The moments of AdamW in the state of a PyTorch optimizer: the entries of `FIELDS` for each parameter."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsecomm.backends.adamw import Moments
from sparsecomm.tensors.arrays import Array
from sparsecomm.torch.parameters import is_sharded, local

MOMENTS = ("exp_avg", "exp_avg_sq")
FIELDS = (*MOMENTS, "last_step", "compensation")  # `Moments` in a parameter's state, beside "step"


class SeenState(NamedTuple):
    """The state of a parameter as it was seen last."""

    tensors: list[Any]  # the step, and `FIELDS`
    marks: list[tuple[int, int]]  # address and version of each tensor; PyTorch counts changes in place as versions

    @classmethod
    def of(cls, entry: Mapping[str, Any], sharded: bool) -> SeenState:
        """Return what is in a state now. ``sharded``: whether tensors may be DTensors."""
        tensors: list[Any] = [entry.get("step"), *map(entry.get, FIELDS)]
        shards = [t if t is None else local(t) for t in tensors] if sharded else tensors
        try:
            return cls(tensors, [(t.data_ptr(), t._version) for t in shards if t is not None])
        except (AttributeError, RuntimeError):  # not a tensor, or one of inference mode
            return cls(tensors, [])

    def equals(self, other: SeenState) -> bool:
        """Return whether nothing has changed in between."""
        return self.marks == other.marks and all(map(operator.is_, self.tensors, other.tensors))


def has_moments(entry: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state has moments. Zeros before the first gradient do not count."""
    squares = entry.get("exp_avg_sq")
    if isinstance(squares, torch.Tensor):
        return bool(entry.get("step", 1)) or bool(local(squares).any())
    return any(key in entry for key in MOMENTS)


def moments_in(entry: Mapping[str, Any]) -> Moments:
    """Return the moments in a parameter's state, with which they share memory."""
    return Moments(*[None if (tensor := entry.get(key)) is None else _flat(tensor) for key in FIELDS])  # type: ignore[arg-type]


def without_moments(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in FIELDS}


def is_usable(tensor: Any, like: torch.Tensor) -> bool:
    """Return whether steps can change a tensor of a parameter's state in place, as they can change ``like``."""
    if not isinstance(tensor, torch.Tensor) or is_sharded(tensor) != is_sharded(like) or tensor.is_inference():
        return False
    shard, new = local(tensor), local(like)
    fits = (shard.dtype, shard.device, shard.layout, shard.shape) == (new.dtype, new.device, new.layout, new.shape)
    return fits and shard.is_contiguous() and not shard.is_neg()


def zeros(parameter: torch.Tensor, size: int, compensated: bool) -> dict[str, torch.Tensor]:
    """Return moments of ``size`` zeros: in the parameter's shape if it has this size, otherwise flat.

    NumPy allocates them in host memory, because it asks Linux for huge pages.
    """
    shard = local(parameter)
    like = parameter.detach() if size == shard.numel() else shard.new_empty(size)
    real = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    dtypes = zip(FIELDS, (real, real, torch.int32, *[real] * compensated), strict=False)
    if like.device.type == "cpu" and not is_sharded(like):
        return {key: torch.from_numpy(np.zeros(tuple(like.shape), str(t).removeprefix("torch."))) for key, t in dtypes}
    return {key: torch.zeros_like(like, dtype=t, memory_format=torch.contiguous_format) for key, t in dtypes}


def step_tensor(count: int) -> torch.Tensor:
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")


def host_array(tensor: Any) -> Array | None:
    """Return a tensor of a state, or this rank's shard, as an array in host memory; ``None`` if it is missing."""
    if tensor is None:
        return None
    host = local(tensor).to_dense().cpu().resolve_neg()
    return (host.float() if host.is_floating_point() and host.itemsize < 4 else host).numpy()


def _flat(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor, or this rank's shard, as a flat NumPy or CuPy array that shares its memory."""
    flat = local(tensor).view(-1)
    if flat.device.type == "cpu":
        return flat.numpy()
    import cupy

    array: Array = cupy.from_dlpack(flat)
    return array
