"""Message memory of a CUDA device on which work runs late and freed memory is reused at once."""

from __future__ import annotations

import numpy as np
import pytest

from sparsecomm.backends.cuda import memory
from tests.backends.devices import Emulated

SEEDS = range(6)
N = 5000  # bytes


def numbers(seed: int, nbytes: int = N) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture(params=SEEDS)
def device(request: pytest.FixtureRequest) -> Emulated:
    return Emulated(request.param)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1000)


@pytest.mark.parametrize("above", [False, True])
def test_a_call_after_one_that_failed_before_it_sent(device: Emulated, chunks: None, above: bool) -> None:
    """The copy of the failed call, at a lower or a higher address, is not mistaken for the copy of the new message."""
    failed = device.backend.memory(direct=False)
    blocks = sorted((failed.empty(N) for _ in range(2)), key=lambda block: block.ctypes.data, reverse=above)
    failed.put(device.array(numbers(1)), blocks[1])
    owner, message = device.backend.memory(direct=False), blocks[0]
    owner.put(device.array(numbers(2)), message)
    for nbytes in (1500, N):
        owner.ready(message, nbytes)
        np.testing.assert_array_equal(message[:nbytes], numbers(2)[:nbytes])


def test_messages_that_come_in_pieces_by_turns(device: Emulated) -> None:
    """One of the messages moves to a larger buffer in between."""
    owner = device.backend.memory(direct=False)
    short, other = owner.empty(2000), owner.empty(N)
    for begin in (0, 1000):
        for message, seed in ((short, 1), (other, 2)):
            message[begin : begin + 1000] = numbers(seed)[begin : begin + 1000]
            owner.landed(message, begin, begin + 1000)
    long = owner.empty(N)
    owner.move(short, long)
    del short
    for message, seed in ((other, 2), (long, 1)):
        message[2000:] = numbers(seed)[2000:]
        owner.landed(message, 2000, N)
    begun = device.runtime.streams.legacy.given
    for message, seed in ((long, 1), (other, 2)):
        got = owner.get(message[64:4064], np.float64).get()
        np.testing.assert_array_equal(got.view(np.uint8), numbers(seed)[64:4064])
        np.testing.assert_array_equal(owner.get(message[4064:], np.uint8).get(), numbers(seed)[4064:])
    assert device.runtime.streams.legacy.given == begun  # all copies had been started before
    del message, other, long
    owner.put(device.array(numbers(2)), owner.empty(N))
    assert not owner._landings  # forgotten together with the messages
