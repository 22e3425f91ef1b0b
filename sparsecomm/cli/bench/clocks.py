"""The parts of a call's time: stand-ins for a call's transport and backend, with a clock around every method."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from sparsecomm.backends import Backend
from sparsecomm.transport import Request, Transport
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory

__all__ = ["PARTS", "PART_OF", "Clock", "Forwarding", "clocked_backend", "clocked_transport"]

PARTS = ("select", "exchange", "merge", "code", "take-back", "densify")

# The methods of `Backend`. What is not here is in no part.
PART_OF = {
    "topk": "select",
    "topk_by_chunk": "select",
    "threshold": "select",
    "scale": "select",  # the residual decays
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
    "reaching_key": "merge",
    "with_values": "merge",
    "ones_like": "merge",  # contributors are counted, here and below
    "values_at": "merge",
    "densify_range": "merge",
    "concatenate": "merge",
    "quantize": "code",
    "remainder": "code",
    "pack": "code",
    "unpack": "code",
    "well_formed": "exchange",  # what has arrived is checked
    "scatter_add": "take-back",
    "scatter_add_where": "take-back",
    "add_into": "take-back",
    "cast_into": "take-back",  # dense: the residual becomes zero
    "clear": "take-back",  # complete: the same, where the winners are
    "densify": "densify",
}

_P = ParamSpec("_P")
_R = TypeVar("_R")


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

    def around(self, part: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return ``function`` with its time counted in ``part``."""

        @wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
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

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)


class _ClockedRequest(Request):
    def __init__(self, request: Request, clock: Clock) -> None:
        self._wait = clock.around("exchange", request.wait)

    def wait(self) -> None:
        self._wait()


def clocked_backend(backend: Backend, clock: Clock) -> Backend:
    """Return a backend whose methods are timed, each in its part."""
    clocked = Forwarding(backend)
    for name, part in PART_OF.items():
        setattr(clocked, name, clock.around(part, getattr(backend, name)))
    return cast(Backend, clocked)


@Transport.register
class _ClockedTransport(Forwarding):
    """All of it is exchange. What is awaited in `exchange` is timed there, once."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        super().__init__(transport)
        for name in ("begin", "end", "abort", "receive", "exchange"):
            setattr(self, name, clock.around("exchange", getattr(transport, name)))
        self._isend, self._clock = clock.around("exchange", transport.isend), clock

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        return _ClockedRequest(self._isend(data, to, memory), self._clock)


def clocked_transport(transport: Transport, clock: Clock) -> Transport:
    """Return a transport whose methods are timed as exchange."""
    return cast(Transport, _ClockedTransport(transport, clock))
