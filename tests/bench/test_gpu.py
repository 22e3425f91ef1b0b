"""`bench.gpu_steps` without a GPU, and `bench/gpu_all.sh` with a stand-in for each part."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.clock import Clock
from sparsecomm.transport import simulated
from tests.processes import LIMIT, ROOT

SCRIPT = ROOT / "bench" / "gpu_all.sh"
# The stand-in for a part. Arguments: a folder, the name of the part, and its time limit in seconds.
PROGRAM = """
import pathlib, sys, time
folder, part, seconds = sys.argv[1:]
with open(f"{folder}/ran", "a") as ran:
    print(part, file=ran)
found = pathlib.Path(folder, part)
status = found.read_text() if found.exists() else "0"
try:
    print("output of", part, flush=True)
    if status == "sleep":
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
sys.exit(int(status))
"""


def start(folder: Path, *options: str) -> tuple[int, str, list[str]]:
    """Return the exit status, the output and the parts that ran."""
    (folder / "program.py").write_text(PROGRAM)
    run = f"'{sys.executable}' '{folder}/program.py' '{folder}'"
    command = ["bash", str(SCRIPT), "--results", str(folder / "results"), "--run", run, *options]
    variables = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=variables)
    ran = folder / "ran"
    parts = ran.read_text().split() if ran.exists() else []
    ran.unlink(missing_ok=True)
    assert done.stderr == ""
    return done.returncode, done.stdout, parts


def states(folder: Path) -> dict[str, str]:
    status, listed, ran = start(folder, "--list")
    assert (status, ran) == (0, [])
    return dict(re.findall(r"^(\S+) +at most +\d+ s +(.*)$", listed, re.MULTILINE))


def test_a_second_start_runs_the_missing_parts(tmp_path: Path) -> None:
    every = list(states(tmp_path))
    assert every[0] == "tests"
    assert {"step-124M", "selection-25.6M", "training-4"} < set(every)
    assert set(states(tmp_path).values()) == {"missing"}
    (tmp_path / "tests").write_text("1")
    (tmp_path / every[2]).write_text("3")
    status, said, ran = start(tmp_path)
    assert (status, ran) == (3, every)
    expected = dict.fromkeys(every, "complete")
    for part, code in (("tests", 1), (every[2], 3)):
        expected[part] = f"not complete: exit status {code}, 0 s"
    assert {part: re.sub(r"\d+ s$", "0 s", state) for part, state in states(tmp_path).items()} == expected
    result = (tmp_path / "results" / "gpu-tests.txt").read_text().splitlines()
    for line, word in zip(
        result, ("# 20", "# commit", "cores", "numpy", "program.py", "output of tests"), strict=False
    ):
        assert word in line
    (tmp_path / "results" / f"gpu-{every[-1]}.txt").unlink()
    (tmp_path / "tests").unlink()
    status, said, ran = start(tmp_path)
    assert (status, ran) == (3, [every[-1], "tests", every[2]])  # parts that have not run yet come first
    (tmp_path / every[2]).unlink()
    assert start(tmp_path)[::2] == (0, [every[2]])
    status, said, ran = start(tmp_path)
    assert (status, ran) == (0, [])
    assert "all parts are complete" in said


def test_an_interrupted_part_keeps_its_output(tmp_path: Path) -> None:
    """The script then runs no other parts. A part that exceeds its time limit is interrupted in the same way."""
    (tmp_path / "tests").write_text("sleep")
    (tmp_path / "program.py").write_text(PROGRAM)
    run = f"'{sys.executable}' '{tmp_path}/program.py' '{tmp_path}'"
    command = ["bash", str(SCRIPT), "--results", str(tmp_path / "results"), "--run", run]
    result = tmp_path / "results" / "gpu-tests.txt"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        while not (result.exists() and "output of tests" in result.read_text()):
            assert script.poll() is None
        script.terminate()
        said, _ = script.communicate(timeout=LIMIT)
    assert script.returncode == 3
    assert "no time left" in said
    assert "\ninterrupted\n" in result.read_text()
    assert (tmp_path / "ran").read_text() == "tests\n"
    assert result.read_text().splitlines()[-1].startswith("# exit status 1")


def test_steps_are_timed_on_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("greenlet")
    from bench import gpu_steps

    monkeypatch.setattr(gpu_steps, "ROUNDS", 4)
    assert sum(map(math.prod, gpu_steps.shapes_of("124M").values())) == 124_475_904
    shapes = {"weight": (300, 64), "bias": (64,)}
    for ranks in (0, 1, 3):
        times = gpu_steps.measured(shapes, ranks, "cpu")
        assert len(times.seconds) == len(times.host) == gpu_steps.ROUNDS
        assert min(times.seconds + times.host) > 0
        assert (max(times.messages) > 0) == (ranks > 1)
        assert (times.sent > 0) == (ranks > 1)
        assert times.sent < 0.1 * 8 * 300 * 64


def test_the_clock_leaves_out_messages() -> None:
    """The test's clock advances only when a rank works or sends a message, which takes 1000 seconds."""
    pytest.importorskip("greenlet")
    now, total = [0], []
    clock = Clock(lambda: now[0])

    def advance(seconds: int) -> None:
        now[0] += seconds

    def program(transport: simulated.SimulatedTransport) -> None:
        send = transport.isend
        transport.isend = lambda *arguments: (advance(1000), send(*arguments))[1]  # type: ignore[method-assign]
        clock.watch(transport)
        for step in range(3):
            transport.begin(f"step {step}".encode(), lambda other, rank: AssertionError())
            advance(1 + transport.rank)
            others = [rank for rank in range(3) if rank != transport.rank]
            requests = [transport.isend(np.zeros(8, np.uint8), to) for to in others]
            advance(10)
            for source in others:
                transport.receive(source)
                advance(100)
            for request in requests:
                request.wait()
            transport.end()
        total.append(now[0] - clock.messages)

    simulated.run(3, program)
    assert clock.messages == 3 * 3 * 2 * 1000
    assert total[-1] == 3 * (1 + 2 + 3) + 9 * 10 + 9 * 2 * 100
