"""What real ranks tell each other besides the library."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

__all__ = ["SideChannel"]

_HANGS = 90  # seconds in which no round of a rank ends
_BROADCAST = 8  # seconds in which a broadcast of PyTorch, which does not hear of other ranks' errors, gives up


class SideChannel:
    """On a communicator of its own, with all signals blocked.

    Attributes:
        comm: what the library uses, a communicator of MPI or a process group over gloo.
        new: returns another one, of the same ranks.
    """

    _group: Any = None  # of torch, if it is one

    def __init__(self, over: str, store: str) -> None:
        if over == "mpi":
            from mpi4py import MPI

            self.comm, self.new, self._own = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup, MPI.COMM_WORLD.Dup()
            self.rank, self.size = self._own.Get_rank(), self._own.Get_size()
            self._gather: Callable[[Any], list[Any]] = self._over_mpi
        else:
            import torch.distributed as dist

            self.rank, self.size = (
                next(int(os.environ[name]) for name in names if name in os.environ)
                for names in (
                    ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
                    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
                )
            )
            file = dist.FileStore(store, self.size)
            dist.init_process_group("gloo", store=file, rank=self.rank, world_size=self.size)
            limit = timedelta(seconds=_BROADCAST)
            self.comm, self.new = dist.group.WORLD, lambda: dist.new_group(backend="gloo", timeout=limit)
            self._group = dist.new_group(backend="gloo")

            def over_gloo(mine: Any) -> list[Any]:
                found: list[Any] = [None] * self.size
                dist.all_gather_object(found, mine, group=self._group)
                return found

            self._gather = over_gloo

    def _over_mpi(self, mine: Any) -> list[Any]:
        """Let other ranks have the cores meanwhile."""
        raw = pickle.dumps(mine)
        lengths, length = np.empty(self.size, np.int64), np.array([len(raw)], np.int64)
        self._wait(self._own.Iallgather(length, lengths))
        found = np.empty(int(lengths.sum()), np.uint8)
        self._wait(self._own.Iallgatherv(np.frombuffer(raw, np.uint8), [found, lengths.tolist()]))
        ends = np.cumsum(lengths).tolist()
        return [pickle.loads(found[end - n : end].tobytes()) for n, end in zip(lengths.tolist(), ends, strict=True)]

    @staticmethod
    def _wait(request: Any) -> None:
        pause = 1e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)

    def gather(self, mine: Any) -> list[Any]:
        """Return what each rank tells. A rank that does not come ends the process, with a traceback."""
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGINT})
        found = self._gather(mine)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return found

    def close(self) -> None:
        """End gloo's threads for this: one that lets go of a tensor when the interpreter ends aborts the process."""
        if self._group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._group)
            self._group = None
