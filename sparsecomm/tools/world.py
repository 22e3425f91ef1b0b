"""The ranks of a job, with the same methods over MPI and, without MPI, under torchrun."""

# ruff: noqa: N802 - the names are those of mpi4py

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sparsecomm import transport
from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.tensors.arrays import Array
from sparsecomm.transport import Transport, job

if TYPE_CHECKING:
    from mpi4py import MPI

World: TypeAlias = "MPI.Intracomm | ProcessGroupWorld"


def world() -> World:
    """Return a communicator of all ranks of the job. Collective.

    Raise `InvalidInputError` if the ranks of the job cannot reach each other, and `TransportError` if there is no MPI,
    and torchrun did not start this process.
    """
    if [launch.launcher for launch in job.launches()] == ["torchrun"] and "MASTER_ADDR" in os.environ:
        return ProcessGroupWorld()
    transport.transport_of(None)  # raises if MPI does not work
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def transport_of(world: World) -> Transport:
    """Return the transport of calls between the ranks."""
    return transport.transport_of(world.group if isinstance(world, ProcessGroupWorld) else world)


class ProcessGroupWorld:
    """The default process group as ``group``, with the methods of an mpi4py communicator that commands use.

    Creates a group of gloo if there is none.
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
        self.group: Any = dist.group.WORLD

    def Get_rank(self) -> int:
        return self._dist.get_rank()

    def Get_size(self) -> int:
        return self._dist.get_world_size()

    def allgather(self, value: Any, /) -> list[Any]:
        values: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(values, value)
        return values

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
