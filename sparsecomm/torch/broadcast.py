"""The same weights on all ranks, to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from sparsecomm.api import sparse_allreduce
from sparsecomm.errors import InvalidInputError
from sparsecomm.torch.parameters import Comm, pairs_of, ranks_of
from sparsecomm.transport import Transport, of

__all__ = ["broadcast_parameters"]

_AS_THEY_ARE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # others travel as bytes


@torch.no_grad()
def broadcast_parameters(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root: int = 0, *, comm: Comm = None
) -> None:
    """Give all ranks the tensors of rank ``root``. Collective.

    Args:
        tensors: ``model.state_dict()``, or ``model.named_parameters()``, of any types and strides; written in place.
            What is no tensor is left out. All bits arrive, but of floating-point numbers -0 becomes 0.
        root: whose; its number in ``comm``.
        comm: as in `DistributedOptimizer`.

    Raises:
        InvalidInputError: an argument cannot be used.
        CollectiveMismatchError: the ranks' tensors differ in number, names, types or shapes, or ``root`` does; those
            before the first that differs have been written.
    """
    pairs = pairs_of(tensors, "tensors")
    ranks = of(ranks_of(comm))
    if not isinstance(root, int) or not 0 <= root < ranks.size:
        raise InvalidInputError(f"root={root!r}: expected a rank from 0 to {ranks.size - 1}")
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            continue
        label = f"broadcast from {root} of {name}, {tensor.dtype} {tuple(tensor.shape)}"
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
        if tensor.dtype in _AS_THEY_ARE:
            _send(flat, ranks, root, label)
        else:
            values = flat.view(torch.uint8).float()
            _send(values, ranks, root, label)
            flat = values.to(torch.uint8).view(tensor.dtype)
        tensor.detach().copy_(flat.view(tensor.shape))
    _send(torch.zeros(1), ranks, root, f"end of a broadcast from {root}")  # nobody has more tensors


def _send(values: torch.Tensor, ranks: Transport, root: int, label: str) -> None:
    """Give all ranks the root's, in place: a sum with zeros."""
    if ranks.rank != root:
        values.zero_()
    sparse_allreduce(values, 1, comm=ranks, algorithm="dense", out=values, label=label)
