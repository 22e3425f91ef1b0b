"""A rank whose first call is interrupted while it waits for the other rank, and whose interpreter then ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - a backend that connects nobody

from sparsecomm.transport import transport_of
from sparsecomm.transport.process_group import rendezvous

SECONDS = 0.2  # for a trip to the store

read_now = rendezvous._read


def read(store: Any, *arguments: Any) -> Any:
    """Read the log, a trip that blocks in torch's C++."""
    with suppress(RuntimeError):
        store.wait(["nothing"], timedelta(seconds=SECONDS))
    return read_now(store, *arguments)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class Late:
    """An object whose destructor delays the end of the interpreter."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(5 * SECONDS)


rendezvous._read = read
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
dist.init_process_group("fake", store=store, rank=0, world_size=2)
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
try:
    transport_of(dist.group.WORLD)
except KeyboardInterrupt:
    print("interrupted")
late = Late()
