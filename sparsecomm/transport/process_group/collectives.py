"""Dense collectives among some ranks of a process group, by the group's own backend: NCCL, for tensors on GPUs.

They need no host memory, and move data over NVLink. A rank that waits for them cannot notice that another rank has left
the call, so ranks first exchange messages, and nothing in between may fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from sparsecomm.errors import TransportError
from sparsecomm.tensors.arrays import Array

# PyTorch 2.13 has renamed both.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupCollectives:
    """See `sparsecomm.transport.base.DenseCollectives`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def reduce_scatter(self, slices: Array, own: Array) -> None:
        with self._on_current_stream(slices, own) as (source, target):
            _reduce_scatter(target, source, group=self._group)

    def all_gather(self, own: Array, gathered: Array) -> None:
        with self._on_current_stream(own, gathered) as (source, target):
            _all_gather(target, source, group=self._group)

    @contextmanager
    def _on_current_stream(self, *arrays: Array) -> Iterator[list[torch.Tensor]]:
        """Return arrays as tensors, for work on CuPy's current stream."""
        try:
            first: Any = arrays[0]
            if isinstance(first, np.ndarray):
                yield [torch.from_numpy(array) for array in arrays]
                return
            cupy, cuda = sys.modules["cupy"], cast(Any, torch.cuda)
            index, pointer = first.device.id, cupy.cuda.get_current_stream().ptr
            with cuda.device(index), cuda.stream(cuda.ExternalStream(pointer, index)):
                yield [cast(Any, torch).from_dlpack(array) for array in arrays]
        except RuntimeError as error:  # of the backend
            raise TransportError(f"{dist.get_backend(self._group)} failed inside a node: {error}") from error


def collectives_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> GroupCollectives:
    """Return NCCL's collectives for tensors on GPUs.

    Collective over ``ranks``, which are ranks of the group. They get a group of their own, because the program's
    collectives on ``group`` could be in a different order on each rank.
    """
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    return GroupCollectives(dist.new_group(members, backend="nccl", use_local_synchronization=True))
