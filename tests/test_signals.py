"""The gate for signals: handlers wait until it opens or code polls, and are restored afterwards."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

import pytest

from sparsecomm.signals import deferred, poll, state

SIGNAL = signal.SIGUSR1


class InterruptError(Exception):
    pass


@pytest.fixture(autouse=True)
def handler() -> Iterator[Callable[..., None]]:
    def handle(number: int, frame: object) -> None:
        raise InterruptError

    before = signal.signal(SIGNAL, handle)
    yield handle
    signal.signal(SIGNAL, before)


def test_a_handler_waits_until_the_outer_gate_opens(handler: Callable[..., None]) -> None:
    steps = []

    @deferred
    def inner() -> None:
        signal.raise_signal(SIGNAL)
        steps.append("inner")

    @deferred
    def outer() -> None:
        inner()
        steps.append("outer")

    for _ in range(2):
        with pytest.raises(InterruptError):
            outer()
        assert signal.getsignal(SIGNAL) is handler
        assert not state()[0]
    assert steps == ["inner", "outer"] * 2


def test_signals_that_come_together_are_handled_one_after_another() -> None:
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append("second"))

    @deferred
    def call() -> None:
        for number in (SIGNAL, signal.SIGUSR2, SIGNAL):
            signal.raise_signal(number)

    with pytest.raises(InterruptError):
        call()
    deferred(lambda: None)()  # no signal is left
    assert seen == ["second"]
    signal.signal(signal.SIGUSR2, before)


def test_a_wait_that_polls_is_interrupted() -> None:
    steps = []

    @deferred
    def wait() -> None:
        try:
            signal.raise_signal(SIGNAL)
            steps.append("noted")
            poll()
        finally:
            steps.append("cleaned")
            signal.raise_signal(SIGNAL)
            steps.append("to the end")

    with pytest.raises(InterruptError) as raised:
        wait()
    assert isinstance(raised.value.__context__, InterruptError)
    assert steps == ["noted", "cleaned", "to the end"]


def test_a_handler_that_is_set_within_stays_and_may_call_the_one_before() -> None:
    seen: list[str] = []
    signal.signal(SIGNAL, lambda *_: seen.append("first"))

    def second(*arguments: object) -> None:
        seen.append("second")
        before(*arguments)  # type: ignore[operator, arg-type]

    def chain() -> object:
        previous = signal.getsignal(SIGNAL)  # the gate's handler; after the call it acts as the program's handler
        signal.signal(SIGNAL, second)
        return previous

    before = deferred(chain)()
    assert signal.getsignal(SIGNAL) is second
    deferred(lambda: signal.raise_signal(SIGNAL))()
    signal.raise_signal(SIGNAL)
    assert seen == ["second", "first"] * 2


def test_handlers_of_c_code_stay() -> None:
    """For example, faulthandler's handler writes tracebacks."""
    deferred(lambda: None)()
    with tempfile.TemporaryFile() as file:
        number = signal.SIGUSR2
        before = signal.signal(number, lambda *_: None)
        faulthandler.register(number, file, chain=True)
        try:
            deferred(lambda: None)()
            signal.raise_signal(number)
            assert file.seek(0, 2) > 0
        finally:
            faulthandler.unregister(number)
            signal.signal(number, before)


def test_other_threads_have_no_gate(handler: Callable[..., None]) -> None:
    seen: list[object] = []
    thread = threading.Thread(target=deferred(lambda: seen.extend([signal.getsignal(SIGNAL), state()[0]])))
    thread.start()
    thread.join()
    assert seen == [handler, False]


def test_a_process_that_was_forked_within_has_its_own_handlers() -> None:
    program = """
import os, signal, sys
from sparsecomm.signals import deferred, state

def handle(number, frame):
    os._exit(0 if signal.getsignal(number) is handle and not state()[0] else 2)

signal.signal(signal.SIGUSR1, handle)

@deferred
def call():
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    signal.raise_signal(signal.SIGUSR1)
    os._exit(1)

sys.exit(call())
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
