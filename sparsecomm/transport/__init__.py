"""Transports: bytes between ranks, over MPI, over a process group, or between simulated ranks in one process."""

from sparsecomm.transport.base import Mismatch, Request, TrafficCounters, Transport
from sparsecomm.transport.lookup import Comm, existing_transport, group_of, transport_of
from sparsecomm.transport.memory import Bytes

__all__ = [
    "Bytes",
    "Comm",
    "Mismatch",
    "Request",
    "TrafficCounters",
    "Transport",
    "existing_transport",
    "group_of",
    "transport_of",
]
