"""Ranks, as threads, that meet over a store, and the address that a rank announces."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

dist = pytest.importorskip("torch.distributed")

from sparsecomm.errors import TimeoutError, TransportError  # noqa: E402
from sparsecomm.transport.process_group import joining  # noqa: E402
from sparsecomm.transport.process_group.joining import own_address  # noqa: E402
from sparsecomm.transport.process_group.rendezvous import rendezvous  # noqa: E402
from tests.waiting import until  # noqa: E402


def attempts(
    store: Any, delays: list[float], timeout: float, busy: Callable[[int], Any] | None = None
) -> list[list[str] | TimeoutError]:
    """Return each rank's outcome if it comes after ``delays`` seconds; NaN: it never comes.

    ``busy`` returns a rank's own connection to the store, which may be blocked.
    """
    outcomes: list[Any] = [None] * len(delays)

    def come(rank: int) -> None:
        time.sleep(delays[rank])
        token = os.urandom(4).hex()
        try:
            message = f"{rank} at {token}"
            if busy is None:
                outcomes[rank] = rendezvous(store, rank, len(delays), timeout, token, message)
            else:
                outcomes[rank] = rendezvous(busy(rank), rank, len(delays), timeout, token, message, clone=lambda: store)
        except TimeoutError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=come, args=[rank]) for rank, delay in enumerate(delays) if delay == delay]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def check(outcomes: list[Any]) -> bool:
    """Return whether ranks have met. Check that all or none have, with each other's messages of this attempt."""
    met = [not isinstance(outcome, TimeoutError) for outcome in outcomes]
    assert len(set(met)) == 1, outcomes
    if met[0]:
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert [line.split(" at ")[0] for line in outcomes[0]] == [str(rank) for rank in range(len(outcomes))]
    return met[0]


@pytest.mark.parametrize("P", [2, 3, 9])
def test_all_meet_or_none_and_all_may_try_again(P: int) -> None:
    random = np.random.default_rng(P)
    for _ in range(20):
        store, before = dist.HashStore(), []
        for timeout in (0.01, 0.01, 0.01, 60, 60):
            delays = random.choice([0.0, 0.005, 0.01, 0.02], P)
            outcomes = attempts(store, delays.tolist(), timeout)
            met = check(outcomes)
            assert met or timeout < 60
            assert outcomes != before  # messages of earlier attempts are not returned
            before = outcomes if met else before


def test_over_stores_of_every_kind(tmp_path: Path) -> None:
    tcp = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    for store in (dist.FileStore(str(tmp_path / "store"), 5), tcp, dist.PrefixStore("a", tcp)):
        for _ in range(3):
            assert check(attempts(store, [0.0] * 5, 60))


class Busy:
    """A connection in use by another thread: requests wait for ``free``, possibly for ever."""

    def __init__(self, store: Any, free: threading.Event) -> None:
        self._store, self._free = store, free

    def append(self, *arguments: Any) -> Any:
        self._free.wait()
        return self._store.append(*arguments)

    def compare_set(self, *arguments: Any) -> Any:
        self._free.wait()
        return self._store.compare_set(*arguments)


@pytest.mark.parametrize("busy", [[], [0], [1, 2], [0, 1, 2]], ids=str)
def test_a_connection_that_others_hold_delays_nobody_for_long(busy: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the connection is free again, its late writes do not disturb later attempts."""
    monkeypatch.setattr("sparsecomm.transport.process_group.rendezvous._SHARED_TIME", 0.05)
    store, free, at_once = dist.HashStore(), threading.Event(), threading.Event()
    at_once.set()
    for number in range(4):
        if number == 2:
            free.set()
        delays = [0.0, 0.0, 0.1 * (number % 2)]
        assert check(attempts(store, delays, 60, lambda rank: Busy(store, free if rank in busy else at_once)))


@pytest.mark.parametrize(("P", "missing", "who"), [(3, [1], "rank 1 has"), (4, [0, 2], "ranks 0, 2 have")])
def test_those_who_did_not_come_are_named(P: int, missing: list[int], who: str) -> None:
    delays = [float("nan") if rank in missing else 0.0 for rank in range(P)]
    store = dist.HashStore()
    for rank, error in enumerate(attempts(store, delays, 1.0)):
        assert (error is None) == (rank in missing)
        if error is not None:  # another rank may have left before
            assert str(error).startswith(f"rank {rank} waited 1 s for the first call on this process group")
            assert all(str(other) in str(error).split("make: ")[1] for other in missing)
    # If a rank begins late, the others may have left.
    until(lambda: any(who in str(error) for error in attempts(store, delays, 1.0)))
    assert check(attempts(store, [0.0] * P, 60))


def test_a_rank_that_gives_up_meets_one_that_came_just_before() -> None:
    """The other rank has read a complete log, so this one must not raise."""

    class Slow:
        def __init__(self) -> None:
            self.store = dist.HashStore()

        def append(self, key: str, value: str) -> None:
            if value.startswith("-"):
                self.store.append(key, "+ 1 other here\n")
            self.store.append(key, value)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            return bytes(self.store.compare_set(key, expected, desired))

    assert rendezvous(Slow(), 0, 2, 0.01, "this", "here") == ["here"] * 2


def test_the_last_rank_to_come_waits_for_one_answer_of_the_store() -> None:
    """Appending needs no answer."""

    class Counting:
        def __init__(self) -> None:
            self.store, self.asked = dist.HashStore(), 0

        def append(self, key: str, value: str) -> None:
            self.store.append(key, value)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            self.asked += 1
            return bytes(self.store.compare_set(key, expected, desired))

    store = Counting()
    for rank in range(3):
        store.append("came", f"+ {rank} {rank} here\n")
    assert rendezvous(store, 3, 4, 60, "3", "here") == ["here"] * 4
    assert store.asked == 1


def test_the_address_of_an_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for names in ("lo", " lo , other"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        assert own_address() in ("127.0.0.1", "::1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "tun77")
    with pytest.raises(TransportError, match=r"GLOO_SOCKET_IFNAME='tun77': there is no .*'tun77'.* lo"):
        own_address()
    monkeypatch.setattr(joining, "_IPV6", tmp_path / "addresses")  # a machine without IPv4
    for number, scope, address in ("20010db8", "00", "2001:db8::1"), ("fe800000", "20", "fe80::1%tun77"):
        line = f"{number}{'0' * 23}1 05 40 {scope} 80 tun77\n"
        joining._IPV6.write_text("0" * 31 + "1 01 80 10 80 lo\n" + line)
        assert own_address() == address


def test_a_line_that_comes_after_its_rank_has_gone_does_not_count() -> None:
    store = dist.HashStore()
    store.append("came", "- 0 old \n+ 0 old here\n")
    with pytest.raises(TimeoutError, match="rank 0 has not called"):
        rendezvous(store, 1, 2, 0.05, "new", "here")


@pytest.mark.parametrize("addresses", [None, [], ["192.0.2.1"], ["192.0.2.1", "127.0.0.3"]])
def test_the_address_of_the_host_where_it_has_one_of_its_own(
    addresses: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*_: object, **__: object) -> list[object]:
        if addresses is None:
            raise OSError("no name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert own_address() == ("127.0.0.3" if addresses and "127.0.0.3" in addresses else "127.0.0.1")
