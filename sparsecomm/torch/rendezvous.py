"""How the ranks of a process group find out that all of them are there, over the store that they have in common.

Either all ranks find that they are, or none does, and all may try again: who comes while another gives up must not
connect to nobody.
"""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import Store

from sparsecomm.transport.control import format_ranks, missing_ranks_error

__all__ = ["rendezvous"]


def rendezvous(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all ranks are here. ``store`` has had nothing in it before they met.

    Raises:
        TimeoutError: a rank did not come within ``timeout`` seconds.
    """
    deadline, nap = time.monotonic() + timeout, 1e-3
    here = _say(store, rank, size, "1")
    while "0" in here and time.monotonic() < deadline:
        time.sleep(nap)
        nap = min(1.5 * nap, 0.05)
        here = _text(store.get("here"))
    if "0" not in here or "0" not in (here := _say(store, rank, size, "0")):
        return
    missing = [other for other in range(size) if here[other] == "0" and other != rank]
    have = "has" if len(missing) == 1 else "have"
    raise missing_ranks_error(rank, timeout, "process group", f"{format_ranks(missing)} {have}")


def _say(store: Store, rank: int, size: int, what: str) -> str:
    """Say that this rank is here ("1") or goes ("0"); return what all have said. When all are here, none can go."""
    before, here = "", "0" * size  # the store's word for "there is no such key", and what that means
    while True:
        wanted = here[:rank] + what + here[rank + 1 :]
        here = _text(store.compare_set("here", before, wanted))
        if here == wanted or "0" not in here:
            return here
        before = here


def _text(value: bytes) -> str:
    return value.decode()
