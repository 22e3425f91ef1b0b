"""A thread that asks for short slices gets them, and keeps its policy and its niceness otherwise."""

from __future__ import annotations

import os
import platform
import sys
import threading
from pathlib import Path

import pytest

from sparsecomm.transport import scheduling


def in_a_thread(nice: int | None = None) -> tuple[bool, str, int]:
    found: list[tuple[bool, str, int]] = []

    def run() -> None:
        if nice is not None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        done = scheduling.be_prompt()
        said = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text() if sys.platform == "linux" else ""
        found.append((done, said, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(not Path("/proc/self/sched").exists(), reason="the kernel does not say how it schedules")
@pytest.mark.parametrize("nicer", [0, 3])
def test_the_slice_is_short_and_the_priority_as_it_was(nicer: int) -> None:
    before = min(19, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + nicer)
    done, said, nice = in_a_thread(before)
    assert nice == before
    fields = dict(line.replace(" ", "").split(":", 1) for line in said.splitlines() if ":" in line)
    assert fields["policy"] == "0"
    if done and "se.slice" in fields:
        assert int(fields["se.slice"]) == 100_000


@pytest.mark.parametrize(("machine", "system"), [("unknown", "linux"), ("x86_64", "darwin")])
def test_elsewhere_nothing_happens(machine: str, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    assert not scheduling.be_prompt()
