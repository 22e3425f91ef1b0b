"""Streams whose work runs when the host waits, in any order that events allow."""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

from tests.emulator.memory import PinnedPool, Pool
from tests.emulator.runtime import EmulatorError

__all__ = ["LEGACY", "PER_THREAD", "Event", "Stream", "Streams", "hold_while_busy"]

LEGACY, PER_THREAD = 1, 2  # handles, as CUDA and DLPack number them


class Event:
    """A point in a stream: all operations enqueued so far."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._position, self.graph = stream, stream.given, stream.graph

    @property
    def reached(self) -> bool:
        if self.graph is not None:
            raise EmulatorError("the host waits for an event of a stream that is being captured")
        return self._stream.done >= self._position

    def wait(self) -> None:
        self._stream.streams.waits += 1
        self._stream.streams.run_until(self)

    def done(self) -> bool:
        """Run some work at random first, and return whether the event was reached."""
        self._stream.streams.run_some()
        return self.reached

    def awaited(self) -> Stream:
        """Return a stream whose first operation can run and must run before this event."""
        for event in self._stream.queue[0].after:
            if not event.reached:
                return event.awaited()
        return self._stream


@dataclass(frozen=True)
class Operation:
    work: Callable[[], object] | None
    after: Sequence[Event]


class Stream:
    """A queue of operations, and a pool of memory.

    Attributes:
        handle: its number.
        blocking: the legacy default stream waits for it.
        pool: memory that was allocated while it was current.
        given, done: numbers of operations enqueued and completed.
        graph: the work captured so far; ``None`` if the stream is not being captured.
    """

    def __init__(self, streams: Streams, handle: int, blocking: bool) -> None:
        self.streams, self.handle, self.blocking, self.pool = streams, handle, blocking, Pool()
        self.queue: deque[Operation] = deque()
        self.given = self.done = 0
        self.graph: list[Callable[[], object]] | None = None

    @property
    def ready(self) -> bool:
        return bool(self.queue) and all(event.reached for event in self.queue[0].after)

    def run_one(self) -> None:
        operation, collecting = self.queue.popleft(), gc.isenabled()
        gc.disable()  # a finalizer might wait for a stream in the middle of this work
        try:
            if operation.work is not None:
                operation.work()
        finally:
            self.done += 1
            if collecting:
                gc.enable()


class Streams:
    """All streams of a device. Random choices depend on the seed.

    ``waits``: the number of times the host has waited.
    """

    def __init__(self, seed: int) -> None:
        self._random, self.waits = random.Random(seed), 0
        self._lock = threading.RLock()
        self._streams: list[Stream] = []
        self._held: list[object] = []  # until no work is left
        self.pinned = PinnedPool()
        self.legacy = self.new(LEGACY, blocking=True)
        _devices.append(ref(self, _devices.remove))

    def new(self, handle: int | None = None, *, blocking: bool = False) -> Stream:
        with self._lock:
            stream = Stream(self, handle or 0x1000 + 0x10 * len(self._streams), blocking)
            self._streams.append(stream)
            return stream

    def of(self, handle: int) -> Stream:
        return next(stream for stream in self._streams if stream.handle == handle)

    def give(self, stream: Stream, work: Callable[[], object] | None, after: Sequence[Event] = ()) -> None:
        """Enqueue ``work`` after the stream's earlier work and after events.

        The legacy default stream waits for all blocking streams, and these wait for it.
        """
        with self._lock:
            if stream is self.legacy:
                after = [*after, *(Event(other) for other in self._streams if other.blocking and other is not stream)]
            elif stream.blocking:
                after = [*after, Event(self.legacy)]
            if any(event.graph is not stream.graph for event in after):
                raise EmulatorError("an event of a stream that is being captured orders work outside, or the reverse")
            if stream.graph is not None:
                stream.graph += [] if work is None else [work]
                return
            stream.queue.append(Operation(work, [event for event in after if not event.reached]))
            stream.given += 1

    def run_until(self, event: Event) -> None:
        """Run all work that the event needs, and at random also work of one other stream."""
        with self._lock:
            other, preference = self._random.choice(self._streams), self._random.choice((0.0, 0.5, 1.0))
            while not event.reached:
                preferred = other.ready and self._random.random() < preference
                (other if preferred else event.awaited()).run_one()
            self._let_go()

    def run_some(self) -> None:
        with self._lock:
            for _ in range(self._random.choice((0, 0, 1, 3))):
                ready = [stream for stream in self._streams if stream.ready]
                if ready:
                    self._random.choice(ready).run_one()
            self._let_go()

    def run_all(self) -> None:
        """Run all work of all streams."""
        for stream in list(self._streams):
            self.run_until(Event(stream))

    def hold(self, memory: object) -> None:
        """Keep host memory until no work is left, which may use it by its address."""
        self._held.append(memory)

    def _let_go(self) -> None:
        if not any(stream.queue for stream in self._streams):
            self._held.clear()


_devices: list[ref[Streams]] = []


def hold_while_busy(memory: object) -> None:
    """Keep memory, as `Streams.hold` does, for every device."""
    for device in _devices.copy():
        streams = device()
        if streams is not None:
            streams.hold(memory)
