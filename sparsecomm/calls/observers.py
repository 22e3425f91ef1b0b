"""The parts of calls, for those who observe them: which methods of backends and transports belong to which part.

An observer wraps functions. `observe` puts what it has made of them in the place of a transport's own methods, and
`ObservedBackends` makes backends of which each method is wrapped. Where there is no observer, nothing is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from sparsecomm.backends import Backend, Backends
from sparsecomm.tensors.interop import Device
from sparsecomm.transport import Request, Transport
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory

__all__ = ["EXCHANGE", "PARTS", "PART_OF", "Forwarding", "ObservedBackends", "Observer", "observe", "observed"]

EXCHANGE = "exchange"
# The methods of `Backend` in each part. What is not here is in none. All of the transport is exchange.
_METHODS = {
    # Of a dense sum: the gradient with its residual, and the sum as a result, whose entries are found when asked for.
    "select": "topk take_topk topk_by_chunk threshold scale accumulate nonzeros",
    EXCHANGE: "well_formed",  # what has arrived is checked
    "merge": "merge merge_topk sum_in_pairs sum_and_count means add divide searchsorted indices_at concatenate_entries "
    "entries_at nth_keys split_by_key values_at",
    "code": "quantize remainder pack unpack",
    "take-back": "scatter_add scatter_add_where add_into cast_into",  # the last makes a residual zero
    "densify": "densify",
}
PARTS = tuple(_METHODS)
PART_OF = {name: part for part, names in _METHODS.items() for name in names.split()}
_OF_TRANSPORTS = "begin", "conclude", "end", "abort", "isend", "receive", "exchange", "exchange_all"


class Observer(Protocol):
    """Who observes the parts of the calls on one transport, of which one is under way at a time."""

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what ``function`` does, the method ``name`` of that part, and observes it.

        None of them is called within another one. "wait", of a request, is called with the rank that it is sent to.
        """


def observe(transport: Transport, observer: Observer) -> None:
    """Let an observer wrap a transport's methods, and the waits of its requests."""
    within = [False]  # a method of the transport may call others

    def once(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = observer.around(EXCHANGE, name, method)

        def outermost(*args: Any, **kwargs: Any) -> Any:
            if within[0]:
                return method(*args, **kwargs)
            within[0] = True
            try:
                return wrapped(*args, **kwargs)
            finally:
                within[0] = False

        return outermost

    methods = {name: once(name, getattr(transport, name)) for name in _OF_TRANSPORTS}
    isend = methods["isend"]

    def isend_with_request(data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        if within[0]:
            return cast(Request, isend(data, to, memory))
        request = cast(Request, isend(data, to, memory))
        return _ObservedRequest(once("wait", lambda to: request.wait()), to)

    vars(transport).update(methods, isend=isend_with_request)


def observed(backend: Backend, observer: Observer) -> Backend:
    """Return a backend whose methods an observer has wrapped."""
    wrapped = Forwarding(backend)
    for name, part in PART_OF.items():
        setattr(wrapped, name, observer.around(part, name, getattr(backend, name)))
    return cast(Backend, wrapped)


class ObservedBackends(Backends):
    """Backends whose methods an observer wraps."""

    def __init__(self, backends: Backends, observer: Observer) -> None:
        self._backends, self._observer = backends, observer

    def of(self, device: Device) -> Backend:
        return observed(self._backends.of(device), self._observer)


class Forwarding:
    """A stand-in for an object: has its attributes, where a subclass or an instance has none of that name."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _ObservedRequest(Request):
    def __init__(self, wait: Callable[[int], None], to: int) -> None:
        self._wait, self._to = wait, to

    def wait(self) -> None:
        self._wait(self._to)
