"""The ranks that run a command: those of MPI, or those that torchrun has started, for which no MPI is needed."""

# ruff: noqa: N802 - the names are those of mpi4py

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from sparsecomm import transport
from sparsecomm.errors import InvalidInputError, SparseCommError, TransportError
from sparsecomm.tensors.arrays import Array
from sparsecomm.transport import job

if TYPE_CHECKING:
    import torch.distributed
    from mpi4py import MPI

__all__ = ["ProcessGroupWorld", "Refused", "World", "agreed", "comm_of", "world"]

World: TypeAlias = "MPI.Intracomm | ProcessGroupWorld"
_R = TypeVar("_R")


def world() -> World:
    """Return the ranks that this process was started with, alone if it was. Collective.

    Raises:
        InvalidInputError: the ranks of the job do not find each other.
        TransportError: there is no MPI, and torchrun has not started this process.
    """
    if [launch.launcher for launch in job.launches()] == ["torchrun"] and "MASTER_ADDR" in os.environ:
        return ProcessGroupWorld()
    transport.transport_of(None)  # raises what is wrong with MPI, if it is
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


class Refused(SparseCommError):  # noqa: N818 - nothing has failed
    """Raised on all ranks when rank 0 has said why nothing is done."""


def agreed(comm: World, action: Callable[[], _R]) -> _R:
    """Return what ``action`` returns. If it refuses on one rank, rank 0 says why, for the lowest. Collective.

    Raises:
        Refused: `InvalidInputError` was raised on one rank.
    """
    found, why = None, None
    try:
        found = action()
    except InvalidInputError as error:
        why = str(error)
    why = next(filter(None, comm.allgather(why)), None)
    if why is None:
        return found  # type: ignore[return-value]
    if comm.Get_rank() == 0:
        print(f"sparsecomm: {why}", file=sys.stderr, flush=True)
    comm.Barrier()  # a launcher may end all ranks when the first has left
    raise Refused


def comm_of(world: World) -> transport.Comm:
    """Return what `sparse_allreduce` takes as ``comm``."""
    return world.group if isinstance(world, ProcessGroupWorld) else world


class ProcessGroupWorld:
    """The ranks of ``group``, the default process group; one of gloo is made if there is none.

    It has what commands use of an mpi4py communicator, under its names.
    """

    def __init__(self) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise TransportError(
                f"torchrun has started this process, and torch cannot be imported ({error})"
            ) from error
        self._torch, self._dist = torch, dist
        self._own = not dist.is_initialized()
        if self._own:
            try:
                dist.init_process_group("gloo")
            except (RuntimeError, ValueError) as error:
                raise InvalidInputError(f"torch.distributed cannot be initialised: {error}") from error
        self.group: torch.distributed.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]

    def Get_rank(self) -> int:
        return self._dist.get_rank()

    def Get_size(self) -> int:
        return self._dist.get_world_size()

    def allgather(self, value: Any, /) -> list[Any]:
        everyone: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(everyone, value)
        return everyone

    def bcast(self, value: Any, /) -> Any:
        values = [value]
        self._dist.broadcast_object_list(values)
        return values[0]

    def Allreduce(self, mine: Array, total: Array, /) -> None:
        np.copyto(total, mine)
        self._dist.all_reduce(self._torch.from_numpy(total))

    def Barrier(self) -> None:
        self._dist.barrier()

    def Abort(self, status: int, /) -> None:
        """End this process; torchrun ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def Free(self) -> None:
        if self._own:
            self._dist.destroy_process_group()
