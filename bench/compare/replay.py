"""The messages of an algorithm, sent again by MPI alone: what they cost without merging, checking or Python objects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from bench.compare.checks import COMM
from sparsecomm.transport import Mismatch, Request, TrafficCounters, Transport
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory

Action = Callable[[], object]


class Recorder(Transport):
    """A transport that writes down what is sent and received through it."""

    def __init__(self, under: Transport) -> None:
        self.rank, self.size, self._under = under.rank, under.size, under
        self.node_of_rank, self.num_nodes, self.library = under.node_of_rank, under.num_nodes, under.library
        self.messages: list[tuple[str, int, int, int, int]] = []  # what, to, bytes, source, bytes

    @property
    def counters(self) -> TrafficCounters:  # type: ignore[override]
        return self._under.counters

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        return self._under.begin(call, mismatch)

    def end(self) -> None:
        self._under.end()

    def abort(self, error: BaseException) -> None:
        self._under.abort(error)

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self.messages.append(("send", to, len(data), -1, 0))
        return self._under.isend(data, to, memory)

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        message = self._under.receive(source, memory, expected)
        self.messages.append(("receive", -1, 0, source, len(message)))
        return message

    def exchange(self, data: Bytes, to: int, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        message = self._under.exchange(data, to, source, memory, expected)
        self.messages.append(("exchange", to, len(data), source, len(message)))
        return message


class Replay:
    """Calls of mpi4py that move as many bytes between the same ranks in the same order, from memory that is there."""

    def __init__(self, recorder: Recorder) -> None:
        largest = max((max(out, into) for _, _, out, _, into in recorder.messages), default=0)
        self._out, self._into = np.zeros(largest, np.uint8), np.zeros(largest, np.uint8)
        self._actions = [self._action(*message) for message in recorder.messages]

    def run(self) -> None:
        for action in self._actions:
            action()

    def _action(self, what: str, to: int, out: int, source: int, into: int) -> Action:
        sent, received = [self._out[:out], MPI.BYTE], [self._into[:into], MPI.BYTE]
        if what == "send":
            return lambda: COMM.Send(sent, to)
        if what == "receive":
            return lambda: COMM.Recv(received, source)
        return lambda: COMM.Sendrecv(sent, to, recvbuf=received, source=source)
