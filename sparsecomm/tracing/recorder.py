"""The observers that environment variables select: `Trace` writes a file, `Ranges` marks ranges for profilers.

``SPARSECOMM_TRACE=FILE`` makes each rank write its calls as JSON lines in the array format of Chrome's trace events.
The array is never closed, as the format allows, so the file of a killed rank can be read.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import ref

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, describe, log
from sparsecomm.tracing.observers import EXCHANGE, Observer
from sparsecomm.transport import Transport, job
from sparsecomm.wire import CallSignature

MAX_BYTES = 64 * 2**20  # length of a file at which the next call begins a new one
_encode = json.JSONEncoder(separators=(",", ":")).encode
_files: dict[Path, TraceFile] = {}  # of this process: one, or one per simulated rank


def observers_of(transport: Transport) -> list[Observer]:
    """Return the observers that the environment variables ask for."""
    observers: list[Observer] = [Ranges(name) for name in config.ranges() if not transport.simulated]
    if (path := config.trace()) is not None:
        rank, node = (None, b"") if transport.simulated else (job.rank(), job.node_id())
        rank = transport.rank if rank is None else rank
        path = path.with_suffix(f".{rank}{path.suffix}")
        if path not in _files:
            _files[path] = TraceFile(path, rank, node)
        observers.append(Trace(_files[path], transport))
    return observers


@atexit.register
def _end_files() -> None:
    for file in _files.values():
        file.end()


class TraceFile:
    """The trace file of one rank. If writing fails, it logs a warning and writes nothing more; calls continue."""

    def __init__(self, path: Path, rank: int, node: bytes = b"") -> None:
        """Create the file of a rank of the job, and rename an older one. ``node``: the ID of its node."""
        self.rank, self._path = rank, path
        self._file, self._nbytes, self._process = -1, 0, os.getpid()
        self._lock = RLock()  # several threads write: one for each communicator
        self._header = [
            self._metadata("process_name", name=f"rank {rank}"),
            self._metadata("process_sort_index", sort_index=rank),
            self._metadata("process_labels", labels=socket.gethostname(), node=node.hex()),
        ]
        self._traces: list[Trace] = []
        self._open()

    def add(self, trace: Trace, transport: Transport) -> int:
        """Add a communicator, and return its number in this file."""
        self._traces.append(trace)
        number = len(self._traces)
        name = f"communicator {number}: rank {transport.rank} of {transport.size} over {transport.library}"
        self._header.append(self._metadata("thread_name", number, name=name, members=list(transport.members)))
        self.write(self._header[-1])
        return number

    def write(self, lines: str) -> None:
        """Write whole lines. A fork of the process that opened the file writes nothing."""
        data = lines.encode()
        with self._lock:
            if self._file >= 0 and os.getpid() == self._process:
                try:
                    os.write(self._file, data)
                    self._nbytes += len(data)
                except OSError as error:
                    self._give_up(error)

    def begin_call(self) -> None:
        """Begin a new file if this one has reached `MAX_BYTES`."""
        with self._lock:
            if self._file >= 0 and self._nbytes >= MAX_BYTES:
                os.close(self._file)
                self._open()

    def end(self) -> None:
        """Write the remaining events, and one that says that the process ended normally."""
        for trace in self._traces:
            trace.flush()
        self.write(_line(name="end", ph="i", s="p", ts=time.time() * 1e6, pid=self.rank, tid=0))

    def _metadata(self, kind: str, thread: int = 0, **details: object) -> str:
        return _line(name=kind, ph="M", pid=self.rank, tid=thread, args=details)

    def _open(self) -> None:
        try:
            self._path = self._path.absolute()  # the program may change its working directory
            self._file = _open_locked(self._path)
            if self._file < 0:  # another job or the parent process writes to it
                self._path = self._path.with_suffix(f".{self._process}{self._path.suffix}")
                self._file = _open_locked(self._path)
            if os.fstat(self._file).st_size:
                self._path.replace(f"{self._path}.before")
                os.close(self._file)
                self._file = _open_locked(self._path)
            self._nbytes = 0
            os.write(self._file, ("[\n" + "".join(self._header)).encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = -1
        log.warning("rank %s: SPARSECOMM_TRACE: stopped writing events: %s", self.rank, describe(error))


def _line(**event: object) -> str:
    return f"{_encode(event)},\n"


def _open_locked(path: Path) -> int:
    """Open a file for appending and lock it until it is closed. Return -1 if another process has locked it."""
    if path.exists() and not path.is_file():  # opening a FIFO could block forever
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return -1
    except OSError:
        pass  # the file system has no locks
    return file


# By method of the transport: the messages that it sends, as pairs of a rank and bytes, and the ranks it waits for.
_MESSAGES: dict[str, Callable[..., tuple[Sequence[tuple[int, Any]], Sequence[int]]]] = {
    "isend": lambda data, to, *_: ([(to, data)], []),
    "wait": lambda to: ([], [to]),
    "receive": lambda source, *_: ([], [source]),
    "exchange": lambda data, to, source, *_: ([(to, data)], [source]),
    "exchange_all": lambda sends, sources, *_: (sends, sources),
}


def _title(details: dict[str, Any]) -> str:
    messages = {"send to": details.get("sent"), "receive from": details.get("received")}
    return " and ".join(f"{verb} {', '.join(str(to) for to, _ in x)}" for verb, x in messages.items() if x)


class Trace:
    """Records the calls on one transport. Events are written when a call begins and when it ends."""

    def __init__(self, file: TraceFile, transport: Transport) -> None:
        self._file, self._transport = file, ref(transport)
        self._events: list[str] = []
        self._call = 0  # number of the current call
        self._traffic = 0, 0  # bytes sent and received before it
        self._clock = transport.clock
        # A monotonic clock never jumps, but differs between nodes. The time of day is roughly the same on all nodes.
        self._epoch = 0.0 if transport.simulated else time.time() - transport.clock()
        self._members, self._thread = transport.members, file.add(self, transport)

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with an event for each call of it."""
        if part == EXCHANGE and name in ("begin", "end", "abort"):
            return partial(getattr(self, f"_{name}"), function)
        messages_of = _MESSAGES.get(name) if part == EXCHANGE else None
        title = name if part == EXCHANGE else part

        def traced(*args: Any, **kwargs: Any) -> Any:
            start = self._clock()
            sends, sources = ([], []) if messages_of is None else messages_of(*args)
            details: dict[str, Any] = {"sent": [[self._members[to], len(data)] for to, data in sends]} if sends else {}
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                details |= {"waited": [self._members[r] for r in sources], "error": describe(error)}
                self._add(start, ph="X", dur=(self._clock() - start) * 1e6, name=name, cat=part, args=details)
                raise
            duration = (self._clock() - start) * 1e6
            if messages_of is None:
                details = {"method": name}
            elif name != "wait" and sources:
                received = result if name == "exchange_all" else [result]
                details["received"] = [[self._members[r], len(m)] for r, m in zip(sources, received, strict=True)]
            self._add(start, ph="X", dur=duration, name=_title(details) or title, cat=part, args=details)
            return result

        return traced

    def flush(self) -> None:
        events, self._events = self._events, []
        self._file.write("".join(events))

    def _add(self, seconds: float, **event: object) -> None:
        ids = f'"ts":{(self._epoch + seconds) * 1e6:.3f},"pid":{self._file.rank},"tid":{self._thread}'
        self._events.append(f"{_encode(event)[:-1]},{ids}}},\n")

    def _begin(self, function: Callable[..., int], call: bytes, *args: Any) -> int:
        transport, start = self._transport(), self._clock()
        assert transport is not None
        self._end_call("left")
        last = transport.number
        try:
            return function(call, *args)
        finally:
            if transport.number != last:
                counters = transport.counters
                self._call, self._traffic = transport.number, (counters.bytes_sent, counters.bytes_received)
                signature = CallSignature.unpack(bytes(call))
                name, what = ("call", "") if signature is None else (signature.algorithm, signature.describe())
                self.flush()
                self._file.begin_call()
                details = {"call": self._call, "what": what}
                self._add(start, ph="B", name=f"{name} {self._call}", cat="call", args=details)
                self.flush()

    def _end(self, function: Callable[[], None]) -> None:
        function()
        self._end_call()

    def _abort(self, function: Callable[[BaseException], None], error: BaseException) -> None:
        try:
            function(error)
        finally:
            self._end_call(describe(error))

    def _end_call(self, error: str = "") -> None:
        transport = self._transport()
        if not self._call or transport is None:
            return
        counters, (sent, received) = transport.counters, self._traffic
        details: dict[str, object] = {"error": error} if error else {}
        details |= {"sent": counters.bytes_sent - sent, "received": counters.bytes_received - received}
        self._call = 0
        self._add(self._clock(), ph="E", args=details)
        self.flush()


class Ranges:
    """Puts each part of a call into a range of a profiler, named "sparsecomm: select" for example."""

    def __init__(self, profiler: str) -> None:
        """Prepare ranges for "torch" or "nvtx"."""
        try:
            if profiler == "torch":
                from torch.profiler import record_function

                self._range: Callable[[str], Any] = record_function
            else:
                import nvtx

                self._range = partial(nvtx.annotate, domain="sparsecomm")
        except ImportError as error:
            raise InvalidInputError(
                f"SPARSECOMM_RANGES={profiler}: {error}. Install the package ({profiler}), or unset the variable"
            ) from None

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with a range around each call of it."""

        def ranged(*args: Any, **kwargs: Any) -> Any:
            with self._range(f"sparsecomm: {part}"):
                return function(*args, **kwargs)

        return ranged
