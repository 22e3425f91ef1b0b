"""Simulated ranks whose transport moves bytes as MPI does: at any allowed time, without regard to streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsecomm.transport.base import HOST, MessageMemory, Mismatch, Request, Transport
from sparsecomm.transport.simulated import SimulatedTransport
from tests.emulator.arrays import DeviceArray

__all__ = ["CarelessTransport"]

NO_LIMIT = 2**40


class CarelessTransport(Transport):
    """A simulated rank. Messages stay in memory, and the simulated transport sends only their numbers.

    Depending on the seed, a message is read when it is sent, when it is received, or when the sender waits. The
    receiver writes it at once, even into device memory that streams still use, unless it has waited.
    """

    def __init__(
        self,
        transport: SimulatedTransport,
        messages: dict[int, _Sending],
        *,
        device_memory: bool = False,
        limit: int = NO_LIMIT,
        seed: int = 0,
    ) -> None:
        """Wrap a rank.

        Args:
            transport: the simulated rank.
            messages: common to all ranks.
            device_memory: whether it accepts device memory.
            limit: maximum bytes of a piece of a message.
        """
        self.rank, self.size, self.counters = transport.rank, transport.size, transport.counters
        self.node_of_rank, self.num_nodes, self.library = transport.node_of_rank, transport.num_nodes, transport.library
        self.device_memory = device_memory
        self._ranks, self._messages, self._limit = transport, messages, limit
        self._random = random.Random(seed * transport.size + transport.rank)

    @classmethod
    def wrapping(cls, program: Callable[[Any], Any], **options: Any) -> Callable[[SimulatedTransport], Any]:
        """Return a program for `sparsecomm.transport.simulated.run` whose ranks are of this class."""
        messages: dict[int, _Sending] = {}
        return lambda transport: program(cls(transport, messages, **options))

    @property
    def number(self) -> int:  # type: ignore[override]
        return self._ranks.number

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        return self._ranks.begin(call, mismatch)

    def conclude(self) -> None:
        self._ranks.conclude()

    def end(self) -> None:
        self._ranks.end()

    def abort(self, error: BaseException) -> None:
        self._ranks.abort(error)

    def realign(self) -> None:
        self._ranks.realign()

    def broadcast(self, data: Any, root: int) -> None:
        self._ranks.broadcast(data, root)

    def isend(self, data: Any, to: int, memory: MessageMemory = HOST) -> Request:
        sending, nbytes, number = _Sending(data), len(data), len(self._messages)
        for begin in range(0, nbytes + 1, self._limit):
            end = min(nbytes, begin + self._limit)
            memory.ready(data, end)
            sending.pieces.append((begin, end))
            if self._random.random() < 0.5:
                sending.read(len(sending.pieces) - 1)
        self._messages[number] = sending
        sending.request = self._ranks.isend(np.array([number]).view(np.uint8), to)
        return sending

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Any:
        sent = self._messages[int(self._ranks.receive(source).view(np.int64)[0])]
        piece = sent.read(0)
        end = length = len(piece)
        message = memory.empty(length if length < self._limit else max(expected, length))
        _bytes_of(message)[:end] = piece
        for i in range(1, len(sent.pieces)):
            memory.landed(message, end - length, end)
            piece = sent.read(i)
            length = len(piece)
            if end + length > len(message):
                larger = memory.empty(max(end + length, 2 * len(message)))
                memory.move(message[:end], larger)
                message = larger
            _bytes_of(message)[end : end + length] = piece
            end += length
        if len(sent.pieces) > 1:
            memory.landed(message, end - length, end)
        return message if end == len(message) else message[:end]


class _Sending(Request):
    """A message in flight."""

    request: Request

    def __init__(self, data: Any) -> None:
        self._data = data
        self.pieces: list[tuple[int, int]] = []  # begin and end of each piece
        self._read: dict[int, np.ndarray] = {}

    def read(self, number: int) -> np.ndarray:
        """Return a piece as it was at the first read."""
        if number not in self._read:
            begin, end = self.pieces[number]
            self._read[number] = _bytes_of(self._data)[begin:end].copy()
        return self._read[number]

    def wait(self) -> None:
        for number in range(len(self.pieces)):
            self.read(number)
        self._data = None
        self.request.wait()


def _bytes_of(memory: Any) -> np.ndarray:
    return memory.raw if isinstance(memory, DeviceArray) else memory
