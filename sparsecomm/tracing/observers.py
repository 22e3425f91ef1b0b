"""`Observer`: wraps the methods of a transport and of backends, to time or record the parts of each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from sparsecomm.backends import Backend, Backends
from sparsecomm.tensors.interop import Device
from sparsecomm.transport import Request, Transport
from sparsecomm.transport.base import HOST, Bytes, MessageMemory

EXCHANGE = "exchange"
# The observed methods of `Backend`, by part of a call. All methods of the transport belong to "exchange".
_METHODS = {
    # A dense sum uses `accumulate` to add the residual, and `nonzeros` if the program reads the entries of the result.
    # With nodes, calls use `flat` and `add_first` for gradients.
    "select": "topk take_topk topk_by_chunk threshold scale accumulate nonzeros flat add_first",
    EXCHANGE: "well_formed",  # checks received entries
    "merge": "merge merge_topk sum_in_pairs sum_and_count means add divide searchsorted indices_at concatenate_entries "
    "entries_at nth_keys split_by_key values_at",
    "code": "quantize remainder pack unpack",
    "take-back": "scatter_add scatter_add_where add_into cast_into",  # `cast_into` also sets a residual to zero
    "densify": "densify write rounded",
}
PARTS = tuple(_METHODS)
PART_OF = {name: part for part, names in _METHODS.items() for name in names.split()}
_TRANSPORT_METHODS = "begin", "conclude", "end", "abort", "isend", "receive", "exchange", "exchange_all"


class Observer(Protocol):
    """Observes the calls on one transport, one at a time."""

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function``, the method ``name`` of a transport or a backend, which belongs to ``part`` of a call.

        Wrapped functions never call each other. The method "wait" of a request is wrapped as a function of one
        argument: the rank that receives the message.
        """


def observe(transport: Transport, observer: Observer) -> None:
    """Wrap the methods of a transport, and the `wait` of its requests, in place."""
    inside = False  # whether an observed method runs, which may call others

    def outermost(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        observed_method = observer.around(EXCHANGE, name, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*args, **kwargs)
            inside = True
            try:
                return observed_method(*args, **kwargs)
            finally:
                inside = False

        return call

    methods = {name: outermost(name, getattr(transport, name)) for name in _TRANSPORT_METHODS}
    start = methods["isend"]

    def isend(data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        nested = inside
        request = cast(Request, start(data, to, memory))
        if nested:
            return request
        wait = outermost("wait", lambda _: request.wait())
        return cast(Request, Forwarding(request, wait=partial(wait, to)))

    vars(transport).update(methods, isend=isend)


def observed(backend: Backend, observer: Observer) -> Backend:
    """Return a backend that calls the methods of ``backend`` through the observer."""
    methods = {name: observer.around(part, name, getattr(backend, name)) for name, part in PART_OF.items()}
    return cast(Backend, Forwarding(backend, **methods))


class ObservedBackends(Backends):
    """Backends whose methods an observer wraps."""

    def __init__(self, backends: Backends, observer: Observer) -> None:
        self._backends, self._observer = backends, observer

    def of(self, device: Device) -> Backend:
        return observed(self._backends.of(device), self._observer)

    def release(self, keep: int) -> None:
        self._backends.release(keep)


class Forwarding:
    """A proxy of an object that replaces some of its attributes."""

    def __init__(self, target: object, **replaced: object) -> None:
        self._target = target
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)
