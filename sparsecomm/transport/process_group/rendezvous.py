"""The rendezvous of the ranks of a process group, over the store that they have in common.

Either all ranks find that all are there, or none does, and all may try again: a rank that comes while another gives up
must not wait for connections that nobody makes.
"""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import Store

from sparsecomm.transport.control import format_ranks, missing_ranks_error

__all__ = ["rendezvous"]

_KEY = "here"


def rendezvous(store: Store, rank: int, size: int, timeout: float) -> int:
    """Wait until all ranks have called this; return how often they all had done so before.

    The number is in the store, not counted by each rank: a rank that failed in between does not count differently.

    Args:
        store: empty before the first call, and used for nothing else.
        timeout: seconds.

    Raises:
        TimeoutError: a rank did not come within ``timeout`` seconds.
    """
    deadline, nap = time.monotonic() + timeout, 1e-3
    number, here = _come(store, rank, size)
    while "0" in here and time.monotonic() < deadline:
        time.sleep(nap)
        nap = min(1.5 * nap, 0.05)
        now, here_now = _read(store.get(_KEY))
        # Another number: all were here, and one that could not go on from there has come again.
        number, here = (number, here_now) if now == number else _come(store, rank, size)
    if "0" not in here or "0" not in (here := _go(store, rank, number, here)):
        return number
    missing = [other for other in range(size) if here[other] == "0" and other != rank]
    have = "has" if len(missing) == 1 else "have"
    raise missing_ranks_error(rank, timeout, "process group", f"{format_ranks(missing)} {have}")


def _come(store: Store, rank: int, size: int) -> tuple[int, str]:
    """Write that this rank is here, for the next number if all were here; return the number, and who is here."""
    before, number, here = "", 0, "0" * size  # the store returns "" for a missing key: no rank is here
    while True:
        if "0" not in here:
            number, here = number + 1, "0" * size
        wanted = f"{number} {here[:rank]}1{here[rank + 1 :]}"
        after = store.compare_set(_KEY, before, wanted).decode()
        number, here = _read(after)
        if after == wanted:
            return number, here
        before = after


def _go(store: Store, rank: int, number: int, here: str) -> str:
    """Write that this rank is gone, unless all are here; return who is."""
    while "0" in here:
        before, wanted = f"{number} {here}", f"{number} {here[:rank]}0{here[rank + 1 :]}"
        after = store.compare_set(_KEY, before, wanted).decode()
        now, here = _read(after) if after else (number, wanted)
        if after == wanted or now != number:
            break
    return here


def _read(value: bytes | str) -> tuple[int, str]:
    number, _, here = (value if isinstance(value, str) else value.decode()).partition(" ")
    return int(number), here
