"""The ranks that run a command: ranks of MPI, or of torchrun without MPI."""

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
    """Return a communicator of all ranks of the job. Collective.

    Raises:
        InvalidInputError: the ranks of the job cannot reach each other.
        TransportError: there is no MPI, and torchrun did not start this process.
    """
    if [launch.launcher for launch in job.launches()] == ["torchrun"] and "MASTER_ADDR" in os.environ:
        return ProcessGroupWorld()
    transport.transport_of(None)  # raises if MPI does not work
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


class Refused(SparseCommError):  # noqa: N818 - the input is wrong, and nothing has failed
    """Raised on all ranks after rank 0 has printed why the input is refused."""


def agreed(comm: World, action: Callable[[], _R]) -> _R:
    """Return ``action()``. If it refuses its input on any rank, rank 0 prints the first error. Collective.

    Raises:
        Refused: ``action`` raised `InvalidInputError` on some rank.
    """
    result, error_text = None, None
    try:
        result = action()
    except InvalidInputError as error:
        error_text = str(error)
    error_text = next(filter(None, comm.allgather(error_text)), None)
    if error_text is None:
        return result  # type: ignore[return-value]
    if comm.Get_rank() == 0:
        print(f"sparsecomm: {error_text}", file=sys.stderr, flush=True)
    comm.Barrier()  # some launchers end all ranks when the first one exits
    raise Refused


def comm_of(world: World) -> transport.Comm:
    """Return the ``comm`` argument of `sparse_allreduce`."""
    return world.group if isinstance(world, ProcessGroupWorld) else world


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
