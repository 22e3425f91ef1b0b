"""The rendezvous of the ranks of a process group, over the group's store.

The store contains a log. Each rank appends a line to it when it arrives, and another one when it gives up. All ranks
read the same lines in the same order, so they agree on whether a line completes the rendezvous. It succeeds on all
ranks or on none; after a failure, all ranks may try again. Appending takes no round trip, and reading takes one.

The process has one connection to the store, which other threads may block. A rank first uses this connection, in a
thread. If this does not succeed soon, the rank opens its own connection, in two more round trips.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, TypeAlias

from sparsecomm.transport.control import format_ranks, missing_ranks_error

Store: TypeAlias = Any  # `torch.distributed.Store`, whose type stub lacks `append`

_KEY = "came"
_PAUSE = 2e-3  # seconds before the first read, in which ranks that begin together arrive
_SHARED_TIME = 0.5  # seconds on the shared connection before the rendezvous opens its own
_NEVER_EQUAL = "?"  # differs from every log, so that `compare_set` only reads


def rendezvous(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    token: str,
    record: str,
    must_stop: Callable[[], bool] = bool,
    clone: Callable[[], Store] | None = None,
) -> list[str]:
    """Wait until all ranks have called this function; return their records, ordered by rank.

    Args:
        store: common to all ranks, with no other keys.
        timeout: seconds.
        token: one word, different for every call on every rank.
        record: one line.
        must_stop: returns whether this rank must give up now.
        clone: returns the same store over a new connection; ``None``: use ``store`` only.

    Raises:
        TimeoutError: a rank did not arrive within ``timeout`` seconds.
        ValueError: the store contains data of another version.
    """
    deadline = time.monotonic() + timeout
    line, gone = f"+ {rank} {token} {record}\n", f"- {rank} {token} \n"

    def arrive(store: Store, must_stop: Callable[[], bool]) -> dict[int, str]:
        """Append the line, and return the records of the ranks that arrive before ``must_stop()`` is true."""
        nap = 1e-3
        store.append(_KEY, line)
        time.sleep(_PAUSE)  # a read just before the last line would cost another round trip
        while len(present := _read(store, rank, size, token)) < size and not must_stop():
            time.sleep(nap)
            nap = min(1.5 * nap, 0.05)
        return present

    def arrive_in_thread(arrivals: SimpleQueue[dict[int, str]], stop: Event) -> None:
        try:
            arrivals.put(arrive(store, stop.is_set))
        except (RuntimeError, ValueError):  # raised again on the other connection
            arrivals.put({})

    present: dict[int, str] = {}
    if clone is not None:
        arrivals: SimpleQueue[dict[int, str]] = SimpleQueue()
        stop = Event()
        _thread.start_new_thread(arrive_in_thread, (arrivals, stop))
        try:
            present = arrivals.get(timeout=min(timeout, _SHARED_TIME))
        except Empty:
            pass
        finally:
            stop.set()
    if len(present) < size:
        if clone is not None:
            try:
                store = clone()
            except BaseException:  # this rank gives up; the shared connection may block
                _thread.start_new_thread(store.append, (_KEY, gone))
                raise
        present = arrive(store, lambda: time.monotonic() >= deadline or must_stop())
    if len(present) < size:
        store.append(_KEY, gone)
        present = _read(store, rank, size, token)
    if len(present) == size:
        return [present[other] for other in range(size)]
    missing = [other for other in range(size) if other not in present and other != rank]
    have = "has" if len(missing) == 1 else "have"
    raise missing_ranks_error(rank, timeout, "process group", f"{format_ranks(missing)} {have}")


def _read(store: Store, rank: int, size: int, token: str) -> dict[int, str]:
    """Return the records of the ranks that are present.

    If the rendezvous of ``token`` is complete, return all of its records, even if ranks have left since.
    """
    present: dict[int, tuple[str, str]] = {}
    known: set[str] = set()  # tokens that have arrived or left
    for line in store.compare_set(_KEY, _NEVER_EQUAL, _NEVER_EQUAL).decode().splitlines():
        sign, sender, sender_token, record = line.split(" ", 3)
        if sign == "-":
            if present.get(int(sender), ("", ""))[0] == sender_token:
                del present[int(sender)]
        elif sender_token not in known:
            present[int(sender)] = sender_token, record
        known.add(sender_token)  # two connections: lines may be repeated, or "-" may precede "+"
        if len(present) == size:
            if present[rank][0] == token:
                break
            present = {}  # this was an earlier rendezvous
    return {other: record for other, (_, record) in present.items()}
