"""The messages of an algorithm, sent again by MPI alone: what they cost without merging, checking or Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI
from sparsecomm.tracing.observers import Forwarding

from sparsecomm.transport import Request, Transport
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory

Action = Callable[[], object]


@Transport.register
class Recorder(Forwarding):
    """A transport that writes down what is sent and received through it."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._transport = transport
        self.messages: list[tuple[str, int, int, int, int]] = []  # what, to, bytes, source, bytes

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self.messages.append(("send", to, len(data), -1, 0))
        return self._transport.isend(data, to, memory)

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        message = self._transport.receive(source, memory, expected)
        self.messages.append(("receive", -1, 0, source, len(message)))
        return message

    def exchange(self, data: Bytes, to: int, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        message = self._transport.exchange(data, to, source, memory, expected)
        self.messages.append(("exchange", to, len(data), source, len(message)))
        return message

    def exchange_all(
        self,
        sends: Sequence[tuple[int, Bytes]],
        sources: Sequence[int],
        memory: MessageMemory = HOST,
        expected: int = 0,
    ) -> list[Bytes]:
        messages = self._transport.exchange_all(sends, sources, memory, expected)
        self.messages += [("begin", to, len(data), -1, 0) for to, data in sends]
        self.messages += [("receive", -1, 0, source, len(m)) for source, m in zip(sources, messages, strict=True)]
        self.messages.append(("end", -1, 0, -1, 0))
        return messages


class Replay:
    """Calls of mpi4py that move as many bytes between the same ranks in the same order, from memory that is there."""

    def __init__(self, comm: MPI.Intracomm, recorder: Recorder) -> None:
        self._comm = comm
        largest = max((max(out, into) for _, _, out, _, into in recorder.messages), default=0)
        self._out, self._into = np.zeros(largest, np.uint8), np.zeros(largest, np.uint8)
        self._begun: list[MPI.Request] = []
        self._actions = [self._action(*message) for message in recorder.messages]

    def run(self) -> None:
        for action in self._actions:
            action()

    def _action(self, what: str, to: int, out: int, source: int, into: int) -> Action:
        sent, received = [self._out[:out], MPI.BYTE], [self._into[:into], MPI.BYTE]
        if what == "send":
            return lambda: self._comm.Send(sent, to)
        if what == "begin":
            return lambda: self._begun.append(self._comm.Isend(sent, to))
        if what == "end":
            return self._end
        if what == "receive":
            return lambda: self._comm.Recv(received, source)
        return lambda: self._comm.Sendrecv(sent, to, recvbuf=received, source=source)

    def _end(self) -> None:
        MPI.Request.Waitall(self._begun)
        self._begun.clear()
