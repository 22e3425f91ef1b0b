"""The rendezvous of the ranks of a process group, over the store that they have in common.

The store keeps a log, to which each rank appends a line when it comes, and another one when it gives up. All read the
same lines in the same order, so all know in which line the last one of them came. Either all ranks find that all are
there, or none does, and all may try again: a rank that comes while another gives up must not wait for connections that
nobody makes. To append takes no answer, and to read one round trip. A line that is there twice counts once.

The process has one connection to the store, on which other threads may wait for any time. So a thread asks over that
one. If this finds nothing within half a second, the rendezvous opens a connection of its own, which takes two more
round trips.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, TypeAlias

from sparsecomm.transport.control import format_ranks, missing_ranks_error

__all__ = ["rendezvous"]

Store: TypeAlias = Any  # `torch.distributed.Store`, whose declaration lacks `append`

_KEY = "came"
_PAUSE = 2e-3  # seconds, by which ranks differ that begin together
_SOON = 0.5  # seconds after which a connection of its own is made
_NOTHING = "?"  # never equal to the log, so that `compare_set` only reads


def rendezvous(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    token: str,
    told: str,
    leaves: Callable[[], bool] = bool,
    another: Callable[[], Store] | None = None,
) -> list[str]:
    """Wait until all ranks have called this; return what each of them has told, by rank.

    Args:
        store: where all ranks find the same; used for nothing else.
        timeout: seconds.
        token: new in every call on any rank; a word.
        told: a line.
        leaves: whether this rank must give up now.
        another: returns the same store over a connection of its own; ``None``: no other thread uses that of ``store``.

    Raises:
        TimeoutError: a rank did not come within ``timeout`` seconds.
        ValueError: what the store holds is of another version.
    """
    deadline, nap = time.monotonic() + timeout, 1e-3
    line = f"+ {rank} {token} {told}\n"
    if another is not None:
        if found := _at_once(store, rank, size, token, line, min(timeout, _SOON)):
            return found
        try:
            store = another()
        except BaseException:  # the others must not count on this rank; the connection may be held
            _thread.start_new_thread(store.append, (_KEY, f"- {rank} {token} \n"))
            raise
    store.append(_KEY, line)
    time.sleep(_PAUSE)  # a question that comes just before the last rank's line costs a round trip
    here = _read(store, rank, size, token)
    while len(here) < size and time.monotonic() < deadline and not leaves():
        time.sleep(nap)
        nap = min(1.5 * nap, 0.05)
        here = _read(store, rank, size, token)
    if len(here) < size:
        store.append(_KEY, f"- {rank} {token} \n")
        here = _read(store, rank, size, token)
    if len(here) == size:
        return [here[other] for other in range(size)]
    missing = [other for other in range(size) if other not in here and other != rank]
    have = "has" if len(missing) == 1 else "have"
    raise missing_ranks_error(rank, timeout, "process group", f"{format_ranks(missing)} {have}")


def _at_once(store: Store, rank: int, size: int, token: str, line: str, seconds: float) -> list[str]:
    """Return what each of the ranks has told; nothing if they are not known to be here within so many seconds."""
    found: SimpleQueue[list[str]] = SimpleQueue()
    over = Event()

    def look() -> None:
        nap = 1e-3
        try:
            store.append(_KEY, line)
            time.sleep(_PAUSE)
            while len(here := _read(store, rank, size, token)) < size and not over.wait(nap):
                nap = min(1.5 * nap, 0.05)
        except (RuntimeError, ValueError):  # it is raised again over the other connection
            here = {}
        found.put([here[other] for other in range(size)] if len(here) == size else [])

    _thread.start_new_thread(look, ())
    try:
        return found.get(timeout=seconds)
    except Empty:
        return []
    finally:
        over.set()


def _read(store: Store, rank: int, size: int, token: str) -> dict[int, str]:
    """Return what the ranks have told that are here, by rank: all of them from the line on that made them complete."""
    here: dict[int, tuple[str, str]] = {}
    known: set[str] = set()
    for line in store.compare_set(_KEY, _NOTHING, _NOTHING).decode().splitlines():
        sign, who, theirs, told = line.split(" ", 3)
        if sign == "+":
            if theirs in known:
                continue
            known.add(theirs)
            here[int(who)] = theirs, told
        else:
            known.add(theirs)  # its other line may still come
            if here.get(int(who), ("", ""))[0] == theirs:
                del here[int(who)]
        if len(here) == size:
            if here[rank][0] == token:
                break
            here = {}  # an earlier time
    return {other: told for other, (_, told) in here.items()}
