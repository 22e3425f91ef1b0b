"""The gate for signals: within `deferred` functions, signal handlers run only when code polls, or when the gate opens.

Python runs signal handlers in the main thread, between any two instructions. An exception from a handler, such as
KeyboardInterrupt, could separate an effect from its record: a gradient would be lost, or count twice.
"""

from sparsecomm.signals import _gate  # in this form, import-linter knows that it is in this package

__all__ = ["Opened", "PollingLock", "acquire", "deferred", "poll", "state", "swap"]

Opened, PollingLock = _gate.Opened, _gate.PollingLock
acquire, deferred, poll, state, swap = _gate.acquire, _gate.deferred, _gate.poll, _gate.state, _gate.swap
