"""The rendezvous of the ranks of a process group, over the store that they have in common.

Either all ranks find that all are there, or none does, and all may try again: a rank that comes while another gives up
must not wait for connections that nobody makes.
"""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import Store

from sparsecomm.transport.control import format_ranks, missing_ranks_error

__all__ = ["rendezvous"]


def rendezvous(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all ranks have called this.

    Args:
        store: empty before the first call, and used for nothing else.
        timeout: seconds.

    Raises:
        TimeoutError: a rank did not come within ``timeout`` seconds.
    """
    deadline, nap = time.monotonic() + timeout, 1e-3
    here = _publish(store, rank, size, "1")
    while "0" in here and time.monotonic() < deadline:
        time.sleep(nap)
        nap = min(1.5 * nap, 0.05)
        here = _text(store.get("here"))
    if "0" not in here or "0" not in (here := _publish(store, rank, size, "0")):
        return
    missing = [other for other in range(size) if here[other] == "0" and other != rank]
    have = "has" if len(missing) == 1 else "have"
    raise missing_ranks_error(rank, timeout, "process group", f"{format_ranks(missing)} {have}")


def _publish(store: Store, rank: int, size: int, what: str) -> str:
    """Write that this rank is here ("1") or gone ("0"), unless all are here; return what all have written."""
    before, here = "", "0" * size  # the store returns "" for a missing key: no rank is here
    while True:
        wanted = here[:rank] + what + here[rank + 1 :]
        here = _text(store.compare_set("here", before, wanted))
        if here == wanted or "0" not in here:
            return here
        before = here


def _text(value: bytes) -> str:
    return value.decode()
