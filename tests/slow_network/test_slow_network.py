"""The slow network: what it runs and passes on, what it leaves behind, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.slow_network import network
from bench.slow_network.__main__ import main

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "bench.slow_network"]


@functools.cache
def why_not() -> str:
    try:
        network.entry(2)
    except network.CannotError as error:
        return str(error)
    mpi = shutil.which("mpirun") and subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return "" if mpi and "(Open MPI) 5" in mpi else "needs Open MPI 5"


needs_network = pytest.mark.skipif(bool(why_not()), reason=f"no slow network here: {why_not()}")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def call(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,  # beside programs that take all cores
        stdin=subprocess.DEVNULL,
    )


def traces(mark: str) -> list[str]:
    """What a run with this text in its command has left: processes, links, mounts, folders."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):  # `Path.glob` ends early at one that it may not see
        with contextlib.suppress(OSError):
            if mark in (
                line := Path("/proc", process, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ):
                found.append(line)
    return found


@pytest.fixture(autouse=True)
def folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests see what their own runs leave, whatever else runs on the machine. Open MPI needs a short path."""
    with tempfile.TemporaryDirectory(prefix="sn", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("slow_network.*"))


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def wait_until(what: object, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def started(tmp_path: Path, program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run on two hosts whose ranks have begun."""
    mark = str(tmp_path / "begun")
    command = [sys.executable, "-c", f"import os; open({mark!r} + os.uname().nodename, 'w')\n{program}"]
    run = subprocess.Popen(
        [*PROGRAM, "run", "--ranks", "2", "--rate", "100mbit", "--no-measure", "--", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert wait_until(lambda: all(Path(mark + host).exists() for host in network.names(2)))
        yield run, mark
    finally:
        run.kill()
        run.communicate()


@needs_network
def test_hosts_need_not_ask_for_each_other() -> None:
    # Open MPI may wait for ever for programs that end at once, on hosts that have a daemon each.
    shown = ["sh", "-c", "ip neigh show nud permanent; sleep 0.5"]
    done = call("run", "--ranks", "3", "--rate", "1gbit", "--no-measure", "--", *shown)
    assert done.returncode == 0, done.stdout + done.stderr
    known = re.findall(r"^(\S+) dev eth0", done.stdout, re.MULTILINE)
    assert sorted(known) == sorted(2 * [f"10.77.0.{i}" for i in (1, 2, 3)] + 3 * ["10.77.0.254"])


@needs_network
def test_a_command_runs_on_hosts_of_their_own(tmp_path: Path) -> None:
    before, had = links(), folders()
    program = (
        "import json, os, numpy as np; from mpi4py import MPI\n"
        "import sparsecomm as sc\n"
        "c = MPI.COMM_WORLD\n"
        "r = sc.sparse_allreduce(np.arange(1, 101, dtype=np.float32), 2)\n"
        "link = json.load(open(os.environ['SLOW_NETWORK_LINK']))\n"
        "print('rank', c.rank, os.uname().nodename, os.environ['MINE'], os.environ['SPARSECOMM_THREADS'],"
        " os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'], link['asked'], r.values.tolist())"
    )
    path = tmp_path / "link.json"
    done = call(
        *["run", "--ranks", "2", "--rate", "100mbit", "--link-json", str(path), "--", sys.executable, "-c", program],
        MINE="mine",
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} sn{rank} mine 1 1 100000000.0 [198.0, 200.0]" in done.stdout
    assert "# slow network: 2 hosts" in done.stdout.splitlines()[0]
    link = json.loads(path.read_text())
    assert 0.5e8 < link["rate"] < 1.05e8
    assert 0.5e8 < link["rate_all"] < 1.05e8
    assert 0 < link["alpha"] < 0.1
    assert links() == before
    assert folders() <= had
    assert not traces("os.environ['MINE']")


@needs_network
def test_hosts_of_several_ranks() -> None:
    """And the library sees which ranks are on one machine."""
    program = (
        "import numpy as np, sparsecomm as sc\n"
        "from sparsecomm import transport\n"
        "t = transport.of(None)\n"
        "r = sc.sparse_allreduce(np.arange(1, 101, dtype=np.float32), 2, algorithm='hierarchical')\n"
        "print(f'{t.rank} {list(t.node_of_rank)} {t.num_nodes} {r.values.tolist()}')"
    )
    done = call(
        "run", "--ranks", "2", "--per-host", "2", "--rate", "1gbit", "--no-measure", "--", sys.executable, "-c", program
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"{rank} [0, 0, 1, 1] 2 [396.0, 400.0]" in done.stdout


@needs_network
def test_the_status_is_passed_on(tmp_path: Path) -> None:
    mark = tmp_path / "the command that fails"
    fails = ["sh", "-c", f": {mark}; sleep 0.5; exit 3"]
    done = call("run", "--ranks", "2", "--rate", "1gbit", "--no-measure", "--", *fails)
    assert done.returncode == 3, done.stderr
    assert not traces(str(mark))


@needs_network
@pytest.mark.parametrize("stubborn", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["", "stubborn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_and_removes_everything(tmp_path: Path, number: signal.Signals, stubborn: str) -> None:
    before, had = links(), folders()
    with started(tmp_path, f"import signal, time\n{stubborn}\ntime.sleep(100)") as (run, mark):
        run.send_signal(number)
        assert run.wait(15) == 128 + number
        assert not traces(mark)
        assert links() == before
        assert folders() <= had


@needs_network
def test_two_runs_live_side_by_side_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    before = links()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    forever = "import time; time.sleep(3600)"
    with (
        started(tmp_path / "a", forever) as (first, first_mark),
        started(tmp_path / "b", forever) as (other, other_mark),
    ):
        living = folders()
        first.kill()
        first.wait()
        assert wait_until(lambda: not traces(first_mark))  # the kernel ends the ranks
        assert links() == before
        done = call("clean")
        assert done.returncode == 0
        removed = {Path(line.removeprefix("removed ")) for line in done.stdout.splitlines()}
        assert len(removed & living) == 1
        assert not removed & folders()
        started_with = sys.executable + " -c "  # the second run lives
        assert wait_until(lambda: len([t for t in traces(other_mark) if t.startswith(started_with)]) == 2), other.poll()


@linux_only
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ranks", "0", "--rate", "1gbit", "--", "true"], "0 ranks: expected 1 to"),
        (["--ranks", "1000", "--rate", "1gbit", "--", "true"], "1000 ranks: expected 1 to"),
        (["--ranks", "2", "--rate", "fast", "--", "true"], "rate 'fast': expected a number and a unit"),
        (["--ranks", "2", "--rate", "1kbit", "--", "true"], "from 1mbit to 40gbit"),
        (["--ranks", "2", "--rate", "1gbit"], "no command"),
        (["--ranks", "2", "--rate", "1gbit", "--per-host", "0", "--", "true"], "0 ranks per host: expected at least 1"),
        (["--ranks", "2", "--rate", "1gbit", "--", "no-such-program"], "'no-such-program' is neither"),
        (["--ranks", "2", "--rate", "1gbit", "--no-measure", "--link-json", "x", "--", "true"], "--no-measure"),
    ],
)
def test_bad_arguments_are_refused(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slow_network", "run", *args])
    assert main() == 2
    assert says in capsys.readouterr().err


@needs_network
def test_a_path_that_cannot_be_written_is_refused_first() -> None:
    done = call("measure", "--ranks", "2", "--rate", "1gbit", "--link-json", "/no/such/folder/link.json")
    assert done.returncode == 2
    assert "/no/such/folder/link.json: No such file" in done.stderr


def test_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(network.CannotError, match="use a Linux machine"):
        network.entry(2)


@linux_only
def test_without_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_which", lambda tool: None if tool == "ip" else tool)
    with pytest.raises(network.CannotError, match="install iproute2"):
        network.entry(2)


@linux_only
def test_without_the_right_to_make_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "unshare"
    tool.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(network, "_which", lambda tool: tool)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(network.CannotError, match="Operation not permitted; run as root"):
        network.entry(2)


@linux_only
def test_a_kernel_without_tbf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "tc"
    tool.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(network.CannotError, match="the kernel needs bridge, veth and tbf"):
        network._batch("tc", [], ["qdisc add dev v0 root tbf"])
