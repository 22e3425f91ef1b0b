"""Message memory: messages are made and received in it, and arrays of a device are copied to and from it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.tensors.arrays import Array, Bytes

__all__ = ["HOST", "Bytes", "HostMemory", "MessageMemory"]


class MessageMemory(Protocol):
    """Memory that a transport can send from and receive into.

    A message to be sent is made by `empty`, `put_header` and `put`; the transport calls `ready` before it reads it. A
    received message is made by the transport with `empty`, and read with `header` and `get`. Where it came in several
    pieces, the transport has told of them with `landed` and `move`.

    The methods as they stand here are those of the host.
    """

    def empty(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` of new memory, with any contents."""
        return np.empty(nbytes, np.uint8)

    def put_header(self, header: bytes, to: Bytes) -> None:
        """Write ``header``, which is on the host, to the beginning of the message ``to``."""
        to[: len(header)] = np.frombuffer(header, np.uint8)

    def put(self, array: Array, to: Bytes) -> None:
        """Begin to copy an array of the device to ``to``, a part of a message with as many bytes.

        The array must not change until `ready` has returned for these bytes.
        """
        to[:] = array.view(np.uint8)

    def ready(self, message: Bytes, nbytes: int) -> None:
        """Wait until the first ``nbytes`` of a message are written, so that they may be sent."""
        return  # they are

    def landed(self, message: Bytes, begin: int, end: int) -> None:
        """Take note that bytes ``begin`` to ``end`` of a message in several pieces have been received, in order."""
        return  # nothing is to be copied

    def move(self, part: Bytes, to: Bytes) -> None:
        """Copy ``part``, which has landed, to the beginning of ``to``, a larger message that replaces its own."""
        to[: len(part)] = part

    def header(self, message: Bytes, nbytes: int) -> bytes:
        """Return a copy, on the host, of the first ``nbytes`` of a message, or of all if it is shorter."""
        return message[:nbytes].tobytes()

    def get(self, data: Bytes, dtype: DTypeLike) -> Array:
        """Return a part of a message as a flat array of the device, a view where that is possible.

        Its bytes are a multiple of the item size of ``dtype``.
        """
        return data.view(dtype)


class HostMemory(MessageMemory):
    """Message memory that is NumPy arrays. Copies are complete when a method returns, and `get` returns views."""


HOST = HostMemory()
