"""The parts of a call's time: stand-ins for a call's transport and backend, with a clock around every method."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from sparsecomm.backends import Backend, Backends
from sparsecomm.calls.queue import queue_of
from sparsecomm.tensors.interop import Device
from sparsecomm.transport import Request, Transport
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory

__all__ = ["PARTS", "PART_OF", "Clock", "Forwarding", "clocked", "clocked_backend"]

# The methods of `Backend` in each part. What is not here is in none. All of the transport is exchange.
_METHODS = {
    # Of a dense sum: the gradient with its residual, and the sum as a result, whose entries are found when asked for.
    "select": "topk take_topk topk_by_chunk threshold scale accumulate nonzeros",
    "exchange": "well_formed",  # what has arrived is checked
    "merge": "merge merge_topk sum_in_pairs sum_and_count means add divide searchsorted indices_at concatenate_entries "
    "entries_at nth_keys largest_keys keys_at scaled_key split_by_key values_at",
    "code": "quantize remainder pack unpack",
    "take-back": "scatter_add scatter_add_where add_into cast_into",  # the last makes a residual zero
    "densify": "densify",
}
PARTS = tuple(_METHODS)
PART_OF = {name: part for part, names in _METHODS.items() for name in names.split()}


class Clock:
    """Seconds in each part, since the last `reset`.

    Args:
        wait: returns when what a part started elsewhere, on a CUDA device, is done; it is in that part.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted in ``part``."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._wait()
                self.seconds[part] += time.perf_counter() - start

        return timed


class Forwarding:
    """A stand-in for an object: has its attributes, where a subclass or an instance has none of that name."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _ClockedRequest(Request):
    def __init__(self, request: Request, clock: Clock) -> None:
        self._wait = clock.around("exchange", request.wait)

    def wait(self) -> None:
        self._wait()


@Transport.register
class _ClockedTransport(Forwarding):
    """What is awaited in `exchange` is timed there, once."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        super().__init__(transport)
        for name in ("begin", "end", "abort", "receive", "exchange", "exchange_all"):
            setattr(self, name, clock.around("exchange", getattr(transport, name)))
        self._isend, self._clock = clock.around("exchange", transport.isend), clock

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        return _ClockedRequest(self._isend(data, to, memory), self._clock)


class _ClockedBackends(Backends):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def of(self, device: Device) -> Backend:
        return clocked_backend(super().of(device), self._clock)


def clocked_backend(backend: Backend, clock: Clock) -> Backend:
    """Return a backend whose methods are timed, each in its part."""
    clocked = Forwarding(backend)
    for name, part in PART_OF.items():
        setattr(clocked, name, clock.around(part, getattr(backend, name)))
    return cast(Backend, clocked)


def clocked(transport: Transport, clock: Clock) -> Transport:
    """Return a stand-in for a transport: calls on it are made as on that, and timed."""
    its = cast(Transport, _ClockedTransport(transport, clock))
    its.queue = None
    queue_of(its).backends = _ClockedBackends(clock)
    return its
