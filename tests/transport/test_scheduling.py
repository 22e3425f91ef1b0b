"""A thread can request short time slices without changing its policy or niceness."""

from __future__ import annotations

import os
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparsecomm.transport import scheduling


@pytest.mark.skipif(not Path("/proc/self/sched").exists(), reason="the kernel does not say how it schedules")
@pytest.mark.parametrize("nicer", [0, 3])
def test_the_slice_is_short_and_the_priority_as_it_was(nicer: int) -> None:
    def check() -> None:
        thread = threading.get_native_id()
        nice = min(19, os.getpriority(os.PRIO_PROCESS, thread) + nicer)
        os.setpriority(os.PRIO_PROCESS, thread, nice)
        done = scheduling.be_prompt()
        assert os.getpriority(os.PRIO_PROCESS, thread) == nice
        said = Path(f"/proc/self/task/{thread}/sched").read_text().splitlines()
        fields = dict(line.replace(" ", "").split(":", 1) for line in said if ":" in line)
        assert fields["policy"] == "0"
        assert not done or int(fields.get("se.slice", 100_000)) == 100_000

    with ThreadPoolExecutor(1) as threads:
        threads.submit(check).result()


@pytest.mark.parametrize(("machine", "system"), [("unknown", "linux"), ("x86_64", "darwin")])
def test_elsewhere_nothing_happens(machine: str, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    assert not scheduling.be_prompt()
