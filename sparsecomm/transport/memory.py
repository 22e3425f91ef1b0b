"""Where messages are made and received, and how arrays of a device get into and out of them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["HOST", "HostMemory", "Memory"]

Array = Any  # NumPy's, or the device's
Bytes = Any  # a flat array of uint8, NumPy's or the device's; its slices are views


class Memory(Protocol):
    """Memory that a transport can send from and receive into."""

    def empty(self, nbytes: int) -> Bytes:
        """New memory."""

    def put_header(self, header: bytes, to: Bytes) -> None:
        """Write bytes of the host."""

    def put(self, array: Array, to: Bytes) -> None:
        """Begin to write an array of the device into a part of a message; `ready` waits for it."""

    def ready(self, message: Bytes, nbytes: int) -> None:
        """Until the first ``nbytes`` of a message are written: then they may be sent."""

    def landed(self, message: Bytes, begin: int, end: int) -> None:
        """These bytes of a message that comes in several pieces have been received, one after another."""

    def move(self, part: Bytes, to: Bytes) -> None:
        """Take what has landed so far to the beginning of a larger message."""

    def header(self, message: Bytes, nbytes: int) -> bytes:
        """The first bytes of a message, or all if it is shorter."""

    def get(self, data: Bytes, dtype: DTypeLike) -> Array:
        """The bytes as an array of the device, a view if that is possible."""


class HostMemory:
    """NumPy arrays all the way."""

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)

    def put_header(self, header: bytes, to: Bytes) -> None:
        to[: len(header)] = np.frombuffer(header, np.uint8)

    def put(self, array: Array, to: Bytes) -> None:
        to[:] = array.view(np.uint8)

    def ready(self, message: Bytes, nbytes: int) -> None:
        pass

    def landed(self, message: Bytes, begin: int, end: int) -> None:
        pass

    def move(self, part: Bytes, to: Bytes) -> None:
        to[: len(part)] = part

    def header(self, message: Bytes, nbytes: int) -> bytes:
        found: bytes = message[:nbytes].tobytes()
        return found

    def get(self, data: Bytes, dtype: DTypeLike) -> Array:
        return data.view(dtype)


HOST = HostMemory()
