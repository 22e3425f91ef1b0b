"""The same weights on all ranks, to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from sparsecomm.api import sparse_allreduce
from sparsecomm.errors import InvalidInputError
from sparsecomm.torch.parameters import Comm, ranks_of
from sparsecomm.transport import of

__all__ = ["broadcast_parameters"]


@torch.no_grad()
def broadcast_parameters(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root: int = 0, *, comm: Comm = None
) -> None:
    """Give all ranks the tensors of rank ``root``. Collective.

    Args:
        tensors: ``model.state_dict()``, or ``model.named_parameters()``; written in place. Of whole numbers those up
            to 2^53 are exact.
        root: whose.
        comm: as in `DistributedOptimizer`.

    Raises:
        InvalidInputError: an argument cannot be used.
        CollectiveMismatchError: the ranks' tensors differ in number, names or shapes.
    """
    ranks = of(ranks_of(comm))
    if not isinstance(root, int) or not 0 <= root < ranks.size:
        raise InvalidInputError(f"root={root!r}: expected a rank from 0 to {ranks.size - 1}")
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        flat = tensor.detach().contiguous()
        flat = flat.clone() if flat.is_floating_point() else flat.double()
        if ranks.rank != root:
            flat.zero_()
        sparse_allreduce(flat, 1, comm=ranks, algorithm="dense", out=flat, label=f"broadcast of {name}")
        tensor.detach().copy_(flat)
