"""When threads of the library run, and signal handlers in them."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

__all__ = ["be_prompt", "check_signals"]

_SLICE = 100_000  # nanoseconds, the shortest that Linux takes
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # Linux's sched_attr: size, policy, flags, nice, priority, runtime, two more
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "ppc64le": 355, "riscv64": 274, "s390x": 345}


def be_prompt(thread: int = 0) -> bool:
    """Ask to run soon after a wake, also where others keep all cores busy. Return false where that cannot be had.

    Args:
        thread: the system's number of a thread of this process; 0: the calling one.

    A thread that talks to other ranks wakes often, for a short time. Where cores are taken, the scheduler otherwise
    lets it wait for the rest of somebody's slice, some milliseconds, each time. It gets no more than its share: from
    Linux 6.12 on a thread may ask for shorter slices, and is then served earlier. Needs no privileges.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, thread or threading.get_native_id())  # as it is
    asked = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, nice, 0, _SLICE, 0, 0)
    failed: int = ctypes.CDLL(None).syscall(number, thread, asked, 0)
    return failed == 0


def check_signals() -> None:
    """Let signal handlers run, which may raise; for loops of compiled modules, where none does. This one is not."""
