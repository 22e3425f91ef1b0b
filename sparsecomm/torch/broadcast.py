"""The same weights on all ranks, to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.torch.shards import check_replicated, compare, described, local
from sparsecomm.transport import Comm, transport_of
from sparsecomm.transport.process_group import ProcessGroupTransport

__all__ = ["broadcast_parameters"]


def broadcast_parameters(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root: int = 0, *, comm: Comm = None
) -> None:
    """Give all ranks the tensors of rank ``root``, bit for bit. Collective.

    The ranks compare what they would broadcast, and then each tensor is one broadcast: of MPI, or over the connections
    of the process group's transport. A tensor on a GPU goes over the group itself, if that has a backend for it.

    Args:
        tensors: ``model.state_dict()``, or ``model.named_parameters()``, of any types and strides; written in place.
            Of a DTensor it is this rank's shard. What is no tensor is left out.
        root: whose; its number in ``comm``.
        comm: as in `DistributedOptimizer`.

    Raises:
        InvalidInputError: an argument cannot be used.
        CollectiveMismatchError: the ranks' tensors differ in number, names, types or shapes, or ``root`` does. Nothing
            was written.
        TimeoutError, RankFailedError, TransportError: a rank did not answer, or died. Tensors before the first that
            has not come may have been written, that one in part.
    """
    named = [(name, t) for name, t in interop.named(tensors) if isinstance(t, torch.Tensor)]
    check_replicated(dict(named), comm, summed=False)
    transport = transport_of(comm)
    if not isinstance(root, int) or not 0 <= root < transport.size:
        raise InvalidInputError(f"root={root!r}: expected a rank from 0 to {transport.size - 1}")
    described_all = [described(name, t) for name, t in named]
    compare(
        transport,
        [f"broadcast from {root}", *described_all],
        f"broadcast_parameters: ranks differ in root, or in the number, names, types or shapes of their tensors; rank "
        f"{transport.rank} has root={root} and {len(named)} tensors, the first of them {[*described_all, 'none'][0]}",
    )
    for _, tensor in named:
        tensor = local(tensor)
        contiguous = tensor.contiguous()
        if tensor.numel() and transport.size > 1:
            data = contiguous.view(-1).view(torch.uint8)
            if isinstance(transport, ProcessGroupTransport):
                transport.broadcast_tensor(data, root)
            else:
                host = data.cpu()
                transport.broadcast(host.numpy(), root)
                data.copy_(host)
        if not tensor.is_contiguous():
            tensor.copy_(contiguous)
