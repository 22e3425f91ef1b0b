"""`ProcessGroupTransport`: the transport over a process group of `torch.distributed`, without MPI.

It has its own TCP connections between the ranks, whatever the backend of the group. `connections.hpp` moves messages
and queues completions: events such as a received message. A rank sends `GOODBYE` before it closes its connections.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, RankFailedError, TransportError
from sparsecomm.signals import deferred, poll
from sparsecomm.transport import job
from sparsecomm.transport.base import HOST, Bytes, DenseCollectives, MessageMemory, PeerTraffic, Request
from sparsecomm.transport.control import FIRST_PING, ControlMessage, FailureDetector, unreadable_error
from sparsecomm.transport.process_group import _connections
from sparsecomm.transport.process_group.collectives import collectives_of

Connections = _connections.Connections
DATA, MORE, GOODBYE, SENT = _connections.DATA, _connections.MORE, _connections.GOODBYE, _connections.SENT
DISCONNECTED, UNREADABLE = _connections.DISCONNECTED, _connections.UNREADABLE

_CHECK = 1.0  # maximum seconds between checks of signals during a wait
_CLOSE_TIMEOUT = 1.0  # seconds that closing waits for a peer that receives nothing
# A broadcast in which the root would send more bytes goes from rank to rank, in pieces of this size.
_CHAINED = 2**20


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether a process group exists and was not destroyed."""
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):  # the group was destroyed, or torch.distributed is not initialized
        return False


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return ``SPARSECOMM_TIMEOUT`` if it is set, and otherwise the ``timeout`` of a process group, in seconds."""
    try:  # there is no public function
        timeout = max(group._get_backend(device).options._timeout for device in group._device_types)
    except (AttributeError, RuntimeError, ValueError):  # a backend without options
        timeout = dist.constants.default_pg_timeout
    return config.timeout(timeout.total_seconds())


class _Request(Request):
    """A message to rank ``to``. ``in_flight``: the number of its parts whose bytes may not be reused yet."""

    in_flight = 0

    def __init__(self, transport: ProcessGroupTransport, to: int) -> None:
        self._transport, self._to = transport, to

    def wait(self) -> None:
        self._transport._wait(self._to, lambda: not self.in_flight)


class ProcessGroupTransport(FailureDetector):
    """A transport between the ranks of a process group. `sparsecomm.transport.transport_of` makes one per group.

    ``rank`` is the rank within the group. Any thread may make a call, but only one at a time.
    """

    threaded = True
    library = "TCP"
    _ranks_are = "process group"

    def __init__(self, group: dist.ProcessGroup, connections: Connections, node_of_rank: Sequence[int]) -> None:
        """Use ``connections`` to all other ranks, and close them at the end."""
        self._group = weakref.ref(group)
        super().__init__(node_of_rank)
        self.rank, self.size = group.rank(), group.size()
        self._process = os.getpid()
        self._open = True
        self._lost: dict[int, tuple[int, str]] = {}  # rank -> why its connection is lost, as the kind of completion
        # (source, call) -> received data, and whether the next one continues it
        self._messages: dict[tuple[int, int], deque[tuple[Bytes, bool]]] = {}
        self._connections, self._limit = connections, config.max_message_bytes()
        self._collectives: dict[tuple[str, tuple[int, ...]], DenseCollectives] = {}

    @property
    def members(self) -> Sequence[int]:
        group = self._group()
        return range(self.size) if group is None else dist.get_process_group_ranks(group)

    def has_collectives(self, device: str) -> bool:
        group = self._group()
        return group is not None and f"{device}:nccl" in dist.get_backend_config(group)

    def collectives(self, ranks: Sequence[int], device: str) -> DenseCollectives:
        group, key = self._group(), (device, tuple(ranks))
        if key not in self._collectives:
            assert group is not None
            self._collectives[key] = collectives_of(group, ranks)
        return self._collectives[key]

    # -- calls --------------------------------------------------------------------------------------------------------

    def _is_usable(self) -> bool:
        group = self._group()
        return self._open and group is not None and is_registered(group)

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this process was forked from the process of this transport: make a process group in it with "
                "`init_process_group`, or start it with the 'spawn' method"
            )
        if not self._is_usable():
            raise InvalidInputError("this transport is closed: its process group was destroyed")

    def _read_timeout(self) -> None:
        if (group := self._group()) is not None:
            self.timeout = timeout_of(group)

    def _prepare_call(self) -> None:
        if self._messages:
            self._messages = {key: queue for key, queue in self._messages.items() if key[1] >= self.number}
        self._handle_pending()
        self._drop_old_control()
        super()._prepare_call()
        self._check_lost()

    # -- messages -----------------------------------------------------------------------------------------------------

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        """See `Transport.isend`. While one part of a device's message is sent, the next one is copied to the host."""
        self._check_peer(to)
        self._count_sent(len(data))
        request, length = _Request(self, to), max(len(data), 1)
        if to == self.rank:
            memory.ready(data, len(data))
            self._handle((DATA, to, self.number, np.array(data)))
            return request
        step = length if memory is HOST else self._limit
        for begin in range(0, length, step):
            end = min(begin + step, len(data))
            memory.ready(data, end)
            kind = DATA if end == len(data) else MORE
            sent = self._connections.send(to, self.number, data[begin:end], request, kind)
            if sent is None:  # the connection is lost: wait for the completion with the reason
                self._wait(to, lambda: False)
            elif not sent:
                request.in_flight += 1
        return request

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        """See `Transport.receive`. While one part of a device's message arrives, the previous one is copied to it."""
        self._check_peer(source)
        part, continues = self._next_part(source)
        if not continues and (memory is HOST or len(part) <= self._limit):
            return self._deliver(part, len(part), memory)
        message, end = memory.empty(max(expected, len(part))), 0
        while True:
            if end + len(part) > len(message):
                larger = memory.empty(max(end + len(part), 2 * len(message)))
                memory.move(message[:end], larger)
                message = larger
            for begin in range(0, len(part), self._limit):
                piece = part[begin : begin + self._limit]
                message[end : end + len(piece)] = piece
                memory.landed(message, end, end + len(piece))
                end += len(piece)
            if not continues:
                return self._deliver(message[:end], end, HOST)
            part, continues = self._next_part(source)

    def _next_part(self, source: int) -> tuple[Bytes, bool]:
        key = source, self.number
        self._wait(source, lambda: key in self._messages)
        queue = self._messages[key]
        part = queue.popleft()
        if not queue:
            del self._messages[key]
        return part

    @deferred
    def broadcast(self, data: Bytes, root: int) -> None:
        """Broadcast as `Transport`. Long data goes from rank to rank in pieces: each rank sends it once."""
        if len(data) * (self.size - 1) <= _CHAINED:
            super().broadcast(data, root)
            return
        requests, previous, following = [], (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for begin in range(0, len(data), _CHAINED):
            piece = data[begin : begin + _CHAINED]
            if self.rank != root:
                piece[:] = self.receive(previous)
            if following != root:
                requests.append(self.isend(piece, following))
        for request in requests:
            request.wait()

    def broadcast_tensor(self, data: torch.Tensor, root: int) -> None:
        """Broadcast a contiguous tensor of any dtype and device, in place. Raises the errors of `broadcast`.

        A tensor on a GPU uses the group's own backend if it has one for this device, else host memory.
        """
        group = self._group()
        if group is None:
            raise TransportError(f"rank {self.rank}: the process group of this transport was destroyed")
        if data.device.type == "cpu" or f"{data.device.type}:" not in dist.get_backend_config(group):
            host = data.detach().cpu()
            self.broadcast(host.view(-1).view(torch.uint8).numpy(), root)
            if host.data_ptr() != data.data_ptr():
                data.copy_(host)
            return
        try:
            dist.broadcast(data, dist.get_global_rank(group, root), group)
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank}: the broadcast from rank {root} failed: {error}") from error

    def peers(self) -> list[PeerTraffic]:
        if os.getpid() != self._process:
            return []  # a forked process has no connections
        others = [rank for rank in range(self.size) if rank != self.rank]
        return [PeerTraffic(rank, *self._connections.traffic(rank)) for rank in others]

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        self._connections.send_control(to, kind, self.number, text)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, peer: int, done: Callable[[], bool]) -> None:
        if done():
            return
        began, next_ping = time.monotonic(), FIRST_PING
        while True:
            self._handle_pending()
            if done():
                return
            if peer in self._lost:
                self._check_leavers()  # a rank that leaves a call and exits reports the reason first
                raise self._lost_error(peer)
            poll()
            waited = time.monotonic() - began
            if waited >= FIRST_PING and not self._is_usable():
                raise TransportError(
                    f"rank {self.rank}: the process group was destroyed while call {self.number} waited for rank "
                    f"{peer}. Destroy a group only after its calls have ended."
                )
            next_ping = self._check_wait(peer, waited, next_ping)
            self._handle_next(min(next_ping - waited, self.timeout - waited, _CHECK))

    def _receive_control(self, seconds: float) -> None:
        self._handle_pending()
        if seconds:
            self._handle_next(seconds)
        self._check_lost()

    def _check_lost(self) -> None:
        for rank in self._lost:
            raise self._lost_error(rank)

    def _handle_pending(self) -> None:
        """Handle the completions that are in the queue now, without those that arrive meanwhile."""
        for _ in range(self._connections.pending):
            self._handle_next(0.0)

    def _handle_next(self, seconds: float) -> None:
        completion = self._connections.next(seconds)
        if completion is not None:
            self._handle(completion)

    def _handle(self, completion: tuple[int, int, int, Any]) -> None:
        kind, rank, number, content = completion
        if kind in (DATA, MORE):
            if number >= self.number:  # else the call was aborted
                self._messages.setdefault((rank, number), deque()).append((content, kind == MORE))
        elif kind == SENT:
            content.in_flight -= 1
        elif kind in (GOODBYE, DISCONNECTED, UNREADABLE):
            self._lost.setdefault(rank, (kind, content))
        else:
            self._add_control(ControlMessage(rank, number, kind, content.tobytes()))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _lost_error(self, rank: int) -> TransportError:
        kind, reason = self._lost[rank]
        advice = "The transport cannot be used any more: restart the job, or make new process groups."
        advice += job.advice_for_restart()
        if kind == UNREADABLE:
            return TransportError(f"{unreadable_error(self.rank, rank, reason)}. {advice}")
        if kind == GOODBYE:
            return TransportError(
                f"rank {rank} has ended, or has destroyed the process group, but rank {self.rank} "
                f"({self.describe_call()}) still makes calls. {advice}"
            )
        return RankFailedError(
            f"rank {rank} died: its connection to rank {self.rank} ({self.describe_call()}) broke ({reason}). {advice}",
            (rank,),
        )

    def _close(self) -> None:
        """Say goodbye and close the connections, when the group is gone or the interpreter exits."""
        # Other ranks may still wait in the call that a report ended on this rank. Forward the report: otherwise their
        # error would name this rank's goodbye as the cause.
        if self._open and os.getpid() == self._process:  # a forked process has no connections
            self._open = False
            if (reason := self._received_reason) is not None and reason.number == self.number:
                for rank in range(self.size):
                    if rank not in (self.rank, reason.rank):
                        self._send_control(rank, reason.kind, reason.text)
            self._connections.close(_CLOSE_TIMEOUT)
