"""`MessageMemory`: where messages are built and received. `HOST` is host memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.tensors.arrays import Array, Bytes

__all__ = ["HOST", "Bytes", "MessageMemory"]


class MessageMemory:
    """Memory that a transport can send from and receive into. This class is host memory: NumPy arrays.

    The sender builds a message with `empty`, `put_header` and `put`; the transport calls `ready` before it reads the
    message. On the other side, the transport allocates the message with `empty`; the receiver reads it with `header`
    and `get`. For a message in several pieces, the transport also calls `landed` and `move`.

    Memory of another device overrides these methods, whose copies may then be asynchronous.
    """

    def empty(self, nbytes: int) -> Bytes:
        """Allocate ``nbytes`` of uninitialized memory."""
        return np.empty(nbytes, np.uint8)

    def put_header(self, header: bytes, to: Bytes) -> None:
        """Write ``header``, which is in host memory, to the beginning of the message ``to``."""
        to[: len(header)] = np.frombuffer(header, np.uint8)

    def put(self, array: Array, to: Bytes) -> None:
        """Start copying an array of the device to ``to``, a part of a message with the same number of bytes.

        The array must not change until `ready` has returned for these bytes.
        """
        to[:] = array.view(np.uint8)

    def ready(self, message: Bytes, nbytes: int) -> None:
        """Wait until the first ``nbytes`` of a message are written and may be sent."""

    def landed(self, message: Bytes, begin: int, end: int) -> None:
        """Record that the transport has received bytes ``begin`` to ``end`` of a message in several pieces."""

    def move(self, part: Bytes, to: Bytes) -> None:
        """Copy ``part``, which has landed, to the beginning of ``to``, a larger replacement of its message."""
        to[: len(part)] = part

    def header(self, message: Bytes, nbytes: int) -> bytes:
        """Return a copy in host memory of the first ``nbytes`` of a message, or of all of it if it is shorter."""
        return message[:nbytes].tobytes()

    def get(self, data: Bytes, dtype: DTypeLike) -> Array:
        """Return a part of a message as a flat array of the device, a view if possible.

        The number of bytes must be a multiple of the item size of ``dtype``.
        """
        return data.view(dtype)


HOST = MessageMemory()
