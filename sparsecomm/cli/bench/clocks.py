"""Where a call's time goes: stand-ins for a call's transport and arithmetic, with a clock around every method."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from sparsecomm.backends import Backend
from sparsecomm.transport import Mismatch, Request, Transport
from sparsecomm.transport.memory import HOST, Bytes, Memory

__all__ = ["PARTS", "PART_OF", "Clock", "clocked_backend", "clocked_transport"]

PARTS = ("select", "exchange", "merge", "code", "put-back", "densify")

# The methods of `Backend`. What is not here is in no part.
PART_OF = {
    "topk": "select",
    "threshold": "select",
    "accumulate": "select",  # dense: the gradient with its residual
    "nonzeros": "select",  # dense: the sum as a result, of which entries are found only when asked for
    "gather": "select",  # complete: what the gradient has where the winners are
    "overlay": "select",
    "merge": "merge",
    "merge_topk": "merge",
    "add": "merge",
    "divide": "merge",
    "searchsorted": "merge",
    "indices_at": "merge",
    "concatenate_entries": "merge",
    "nth_key": "merge",
    "count_keys": "merge",
    "split_at_key": "merge",
    "with_values": "merge",
    "densify_range": "merge",
    "concatenate": "merge",
    "quantize": "code",
    "pack": "code",
    "unpack": "code",
    "well_formed": "exchange",  # what has arrived is checked
    "scatter_add": "put-back",
    "add_into": "put-back",
    "cast_into": "put-back",  # dense: the residual becomes zero
    "clear": "put-back",  # complete: the same, where the winners are
    "densify": "densify",
}

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Clock:
    """Seconds in each part, since the last `reset`.

    Args:
        wait: until what a part started elsewhere, on a CUDA device, is done; it is in that part.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def around(self, part: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._wait()
                self.seconds[part] += time.perf_counter() - start

        return timed


class _ClockedBackend:
    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        for name, part in PART_OF.items():
            setattr(self, name, clock.around(part, getattr(backend, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


def clocked_backend(backend: Backend, clock: Clock) -> Backend:
    return cast(Backend, _ClockedBackend(backend, clock))


class _ClockedRequest(Request):
    def __init__(self, request: Request, clock: Clock) -> None:
        self._wait = clock.around("exchange", request.wait)

    def wait(self) -> None:
        self._wait()


class _ClockedTransport(Transport):
    """All of it is exchange. What is awaited in `exchange` is timed there, once."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self.rank, self.size, self.counters = transport.rank, transport.size, transport.counters
        self.device_memory, self._clock = transport.device_memory, clock
        self.node_of_rank, self.num_nodes, self.library = transport.node_of_rank, transport.num_nodes, transport.library
        self._begin = clock.around("exchange", transport.begin)
        self._end = clock.around("exchange", transport.end)
        self._abort = clock.around("exchange", transport.abort)
        self._isend = clock.around("exchange", transport.isend)
        self._receive = clock.around("exchange", transport.receive)
        self._exchange = clock.around("exchange", transport.exchange)

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        return self._begin(call, mismatch)

    def end(self) -> None:
        self._end()

    def abort(self, error: BaseException) -> None:
        self._abort(error)

    def isend(self, data: Bytes, to: int, memory: Memory = HOST) -> Request:
        return _ClockedRequest(self._isend(data, to, memory), self._clock)

    def receive(self, source: int, memory: Memory = HOST, expected: int = 0) -> Bytes:
        return self._receive(source, memory, expected)

    def exchange(self, data: Bytes, to: int, source: int, memory: Memory = HOST, expected: int = 0) -> Bytes:
        return self._exchange(data, to, source, memory, expected)


def clocked_transport(transport: Transport, clock: Clock) -> Transport:
    return _ClockedTransport(transport, clock)
