"""Who observes calls because a setting asks for it: a file of events for each rank, and the ranges of profilers.

``SPARSECOMM_TRACE=FILE`` makes each rank write what its calls do, as they do it, in the array format of Chrome's trace
events ("Trace Event Format", which Perfetto opens, too): a line for each event, and no bracket at the end, which the
format allows. So the file of a rank that was killed can be read as well. It holds, besides what is drawn, what
`sparsecomm trace` needs to say who waited for whom, and to set the ranks' clocks right: all messages of each call.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import ref

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, describe
from sparsecomm.tracing.observers import EXCHANGE, Observer
from sparsecomm.transport import Transport, job
from sparsecomm.wire import CallSignature

__all__ = ["MAX_BYTES", "Ranges", "Trace", "TraceFile", "observers_of"]

MAX_BYTES = 64 * 2**20  # of a file; the one before it is kept, too
_log = logging.getLogger("sparsecomm")


def observers_of(transport: Transport) -> list[Observer]:
    """Return who is to observe the calls on a transport, as the settings say.

    Raises:
        InvalidInputError: a setting cannot be used.
    """
    found: list[Observer] = [Ranges(name) for name in config.ranges() if not transport.simulated]
    if (path := config.trace()) is not None:
        rank, node = (None, b"") if transport.simulated else (job.rank(), job.node_id())
        found.append(Trace(_file(path, transport.rank if rank is None else rank, node), transport))
    return found


# -- the file ---------------------------------------------------------------------------------------------------------


class TraceFile:
    """The events of one rank. An error that writing raises is logged, and ends it: calls go on without it."""

    def __init__(self, path: Path, rank: int, node: bytes = b"") -> None:
        """Begin a file in the place of one that is there, which is kept beside it.

        ``node``: an identifier of the node, all of whose ranks have one clock.
        """
        self.rank, self._path = rank, path
        self._file, self._nbytes, self._process = -1, 0, os.getpid()
        self._lock = RLock()  # of the file: threads that make calls on several communicators write to it
        self._heads = [self.head("process_name", name=f"rank {rank}"), self.head("process_sort_index", sort_index=rank)]
        self._heads.append(self.head("process_labels", labels=socket.gethostname(), node=node.hex()))
        self.traces: list[Trace] = []
        self._open()

    def head(self, kind: str, thread: int = 0, **details: Any) -> str:
        """Return an event that says what others are about."""
        event = {"name": kind, "ph": "M", "pid": self.rank, "tid": thread, "args": details}
        return f"{json.dumps(event)},\n"

    def add(self, trace: Trace, transport: Transport) -> int:
        """Return the number that the events of a communicator have in this file."""
        self.traces.append(trace)
        number, size = len(self.traces), transport.size
        name = f"communicator {number}: rank {transport.rank} of {size} over {transport.library}"
        self._heads.append(self.head("thread_name", number, name=name, members=list(transport.members)))
        self.write(self._heads[-1])
        return number

    def write(self, events: str) -> None:
        """Write whole lines."""
        if os.getpid() != self._process:
            return
        data = events.encode()
        with self._lock:
            if self._file < 0:
                return
            try:
                os.write(self._file, data)
                self._nbytes += len(data)
            except OSError as error:
                self._give_up(error)

    def begin_call(self) -> None:
        """Begin another file if this one is long."""
        with self._lock:
            if self._file >= 0 and self._nbytes >= MAX_BYTES:
                os.close(self._file)
                self._open()

    def end(self) -> None:
        """Write what is left, and that the process ends in order."""
        for trace in self.traces:
            trace.flush()
        now = time.time() * 1e6
        self.write(f'{{"name":"end","ph":"i","s":"p","ts":{now:.3f},"pid":{self.rank},"tid":0}},\n')

    def _open(self) -> None:
        try:
            if _exists(self._path) and _is_written(self._path):  # by another job, or by a process that `grow` started
                self._path = self._path.with_suffix(f".{self._process}{self._path.suffix}")
            if _exists(self._path):
                self._path.replace(f"{self._path}.before")
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _lock(self._file)
            self._nbytes = 0
            os.write(self._file, ("[\n" + "".join(self._heads)).encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = -1
        _log.warning("rank %s: SPARSECOMM_TRACE: no events are written any more: %s", self.rank, describe(error))


def _exists(path: Path) -> bool:
    """Return whether there is a file at ``path``.

    Raises:
        OSError: it is no regular file. To open a FIFO could wait for ever.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return True


def _lock(file: int) -> bool:
    """Lock a file, as long as it is open, and return true; false: another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _is_written(path: Path) -> bool:
    with path.open("rb") as file:
        return not _lock(file.fileno())


_files: dict[Path, TraceFile] = {}  # of this process: one, or one for each simulated rank


def _file(path: Path, rank: int, node: bytes) -> TraceFile:
    """Return the file of a rank: the name that was given, with the rank before its suffix."""
    with suppress(OSError):  # the working folder is gone: opening the file will fail, too, and is logged
        path = path.absolute()
    own = path.with_suffix(f".{rank}{path.suffix}")
    if own not in _files:
        _files[own] = TraceFile(own, rank, node)
    return _files[own]


@atexit.register
def _end_files() -> None:
    for file in _files.values():
        file.end()


# -- the calls on a communicator --------------------------------------------------------------------------------------


class Trace:
    """The events of the calls on one transport. They are written when a call begins, and when it is over."""

    def __init__(self, file: TraceFile, transport: Transport) -> None:
        self._file, self._transport = file, ref(transport)
        self._events: list[str] = []
        self._call = 0  # the number of the call under way
        self._before = 0, 0  # bytes sent and received before it
        self._clock = transport.clock
        # Monotonic clocks do not jump, and do not agree between nodes; the time of day does so roughly.
        self._epoch = 0.0 if transport.simulated else time.time() - transport.clock()
        self._thread = file.add(self, transport)
        self._tail = f'"pid":{file.rank},"tid":{self._thread}'

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with an event for each time that it is called, from its beginning to its end."""
        if part == EXCHANGE and name in ("begin", "end", "abort"):
            return partial(getattr(self, f"_{name}"), function)
        describe_call = _MESSAGES.get(name) if part == EXCHANGE else None

        def traced(*args: Any, **kwargs: Any) -> Any:
            start = self._clock()
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                _, waited, details = _NOTHING if describe_call is None else describe_call(args, None)
                details = f'{details}{"," if details else ""}"waited":{waited},"error":{json.dumps(describe(error))}'
                self._add(name, part, start, details)
                raise
            if describe_call is None:
                self._add(name if part == EXCHANGE else part, part, start, f'"method":"{name}"')
            else:
                shown, _, details = describe_call(args, result)
                self._add(shown, part, start, details)
            return result

        return traced

    def _add(self, name: str, part: str, start: float, details: str) -> None:
        self._events.append(
            f'{{"name":"{name}","cat":"{part}","ph":"X","ts":{self._time(start)},'
            f'"dur":{(self._clock() - start) * 1e6:.3f},{self._tail},"args":{{{details}}}}},\n'
        )

    def _time(self, seconds: float) -> str:
        return f"{(self._epoch + seconds) * 1e6:.3f}"

    def flush(self) -> None:
        """Write the events that there are."""
        events, self._events = self._events, []
        self._file.write("".join(events))

    def _begin(self, function: Callable[..., int], call: bytes, *args: Any) -> int:
        transport, start = self._transport(), self._clock()
        assert transport is not None
        self._finish("left")
        last = transport.number
        try:
            return function(call, *args)
        finally:
            if transport.number != last:
                counters = transport.counters
                self._call, self._before = transport.number, (counters.bytes_sent, counters.bytes_received)
                signature = CallSignature.unpack(bytes(call))
                algorithm = "call" if signature is None else signature.algorithm
                self.flush()
                self._file.begin_call()
                details = {"call": self._call, "what": "" if signature is None else signature.describe()}
                self._events.append(
                    f'{{"name":{json.dumps(f"{algorithm} {self._call}")},"cat":"call","ph":"B",'
                    f'"ts":{self._time(start)},{self._tail},"args":{json.dumps(details)}}},\n'
                )
                self.flush()

    def _end(self, function: Callable[[], None]) -> None:
        function()
        self._finish("")

    def _abort(self, function: Callable[[BaseException], None], error: BaseException) -> None:
        try:
            function(error)
        finally:
            self._finish(describe(error))

    def _finish(self, error: str) -> None:
        """Write the end of the call under way, if there is one."""
        transport = self._transport()
        if not self._call or transport is None:
            return
        counters, (sent, received) = transport.counters, self._before
        details = {"sent": counters.bytes_sent - sent, "received": counters.bytes_received - received}
        self._call = 0
        self._events.append(
            f'{{"ph":"E","ts":{self._time(self._clock())},{self._tail},'
            f'"args":{json.dumps(details | ({"error": error} if error else {}))}}},\n'
        )
        self.flush()


# What is told of a method of the transport: its event's name, whom it waits for, and what was sent and received.
_Told = tuple[str, list[int], str]
_NOTHING: _Told = "", [], ""


def _told(sends: Iterable[tuple[int, Any]], sources: Sequence[int], messages: Sequence[Any] | None) -> _Told:
    sent = [[to, len(data)] for to, data in sends]
    received = [] if messages is None else [[s, len(m)] for s, m in zip(sources, messages, strict=True)]
    to, source = (", ".join(str(rank) for rank, _ in some) for some in (sent, received))
    name = " and ".join(part for part in (to and f"send to {to}", source and f"receive from {source}") if part)
    return name or "exchange", list(sources), f'"sent":{sent},"received":{received}'


_MESSAGES: dict[str, Callable[[tuple[Any, ...], Any], _Told]] = {
    "isend": lambda args, _: _told([(args[1], args[0])], [], []),
    "wait": lambda args, _: (f"send to {args[0]}", [args[0]], ""),
    "receive": lambda args, message: _told([], args[:1], None if message is None else [message]),
    "exchange": lambda args, message: _told([(args[1], args[0])], args[2:3], None if message is None else [message]),
    "exchange_all": lambda args, messages: _told(args[0], args[1], messages),
}


# -- profilers --------------------------------------------------------------------------------------------------------


class Ranges:
    """A range of a profiler around each part of a call: "sparsecomm: select", and so on."""

    def __init__(self, profiler: str) -> None:
        """Take one of `config.PROFILERS`.

        Raises:
            InvalidInputError: its package is not installed.
        """
        try:
            self._range = _torch_range() if profiler == "torch" else _nvtx_range()
        except ImportError as error:
            raise InvalidInputError(
                f"SPARSECOMM_RANGES={profiler}: {error}. Install the package ({profiler}), or unset it"
            ) from None

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` within a range."""
        make, shown = self._range, f"sparsecomm: {part}"

        def ranged(*args: Any, **kwargs: Any) -> Any:
            with make(shown):
                return function(*args, **kwargs)

        return ranged


def _torch_range() -> Callable[[str], Any]:
    from torch.profiler import record_function

    return record_function


def _nvtx_range() -> Callable[[str], Any]:
    import nvtx

    return lambda name: nvtx.annotate(name, domain="sparsecomm")
