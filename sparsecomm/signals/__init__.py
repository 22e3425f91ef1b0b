"""The gate for signals: within `deferred` functions, signal handlers run only when code polls, or when the gate opens.

Python runs signal handlers in the main thread, between any two instructions. An exception from a handler, such as
KeyboardInterrupt, could separate an effect from its record: a gradient would be lost, or count twice.
"""

import signal
from traceback import walk_tb

from sparsecomm.signals import _gate  # in this form, import-linter knows that it is in this package

__all__ = ["Opened", "PollingLock", "acquire", "deferred", "interrupt_in", "poll", "state", "swap"]

Opened, PollingLock = _gate.Opened, _gate.PollingLock
acquire, deferred, poll, state, swap = _gate.acquire, _gate.deferred, _gate.poll, _gate.state, _gate.swap


def interrupt_in(error: BaseException) -> BaseException | None:
    """Return the exception of a signal handler that is or has caused ``error``; ``None`` if there is none.

    An `Exception` counts if its traceback contains the function of a handler that is installed now.
    """
    if not isinstance(error, Exception):
        return error
    handlers = (getattr(handler, "handler", handler) for handler in map(signal.getsignal, signal.valid_signals()))
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", walk_tb) for handler in handlers}
    cause: BaseException | None = error
    while cause is not None and not any(frame.f_code in codes for frame, _ in walk_tb(cause.__traceback__)):
        cause = cause.__cause__ or cause.__context__
    return cause
