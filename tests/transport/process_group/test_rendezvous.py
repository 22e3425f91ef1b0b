"""Ranks that meet over a store, as threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

dist = pytest.importorskip("torch.distributed")

from sparsecomm.errors import TimeoutError  # noqa: E402
from sparsecomm.transport.process_group.rendezvous import rendezvous  # noqa: E402


def attempts(store: object, delays: list[float], timeout: float) -> list[TimeoutError | None]:
    """What became of each rank, if they come after so many seconds; NaN: never."""
    found: list[TimeoutError | None] = [None] * len(delays)

    def come(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            rendezvous(store, rank, len(delays), timeout)
        except TimeoutError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=[rank]) for rank, delay in enumerate(delays) if delay == delay]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("P", [2, 3, 9])
def test_all_meet_or_none_and_all_may_try_again(P: int) -> None:
    random = np.random.default_rng(P)
    for _ in range(20):
        store, met = dist.HashStore(), False
        for timeout in (0.01, 0.01, 0.01, 60):
            delays = random.choice([0.0, 0.005, 0.01, 0.02], P)
            found = attempts(store, delays.tolist(), timeout)
            assert len({error is None for error in found}) == 1, found
            if met := found[0] is None:
                break
        assert met


def test_ranks_that_fail_in_between_count_alike() -> None:
    """A rank comes again that was here, and did not go on; the others, who went on, come again as well."""
    store, found = dist.HashStore(), {}

    def come(rank: int) -> None:
        found[rank] = rendezvous(store, rank, 2, 60)

    for number in range(4):
        threads = [threading.Thread(target=come, args=[rank]) for rank in range(2)]
        for thread in threads[:: -1 if number % 2 else 1]:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {0: number, 1: number}


@pytest.mark.parametrize(("P", "missing", "who"), [(3, [1], "rank 1 has"), (4, [0, 2], "ranks 0, 2 have")])
def test_those_who_did_not_come_are_named(P: int, missing: list[int], who: str) -> None:
    delays = [float("nan") if rank in missing else 0.0 for rank in range(P)]
    store = dist.HashStore()
    for rank, error in enumerate(attempts(store, delays, 1.0)):
        assert (error is None) == (rank in missing)
        if error is not None:  # another may have gone before
            assert str(error).startswith(f"rank {rank} waited 1 s for the first call on this process group")
            assert all(str(other) in str(error).split("make: ")[1] for other in missing)
    assert any(who in str(error) for error in attempts(store, delays, 1.0))
    assert attempts(store, [0.0] * P, 60) == [None] * P
