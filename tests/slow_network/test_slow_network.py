"""The slow network: running commands, cleaning up, and refusing bad options."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.slow_network import network
from bench.slow_network.__main__ import main
from tests.processes import LIMIT
from tests.slow_network.runs import PROGRAM, ROOT, call, folders, links, linux_only, needs_network, traces
from tests.thinning import exhaustive
from tests.waiting import SOON, until

TORCHRUN = ["--launcher", "torchrun"]
TWO = ["--ranks", "2", "--rate", "1gbit"]
RELAYED = ["--rtt", "1ms", *TORCHRUN]
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@contextlib.contextmanager
def started(tmp_path: Path, program: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a run on two hosts, and wait for its ranks."""
    mark = str(tmp_path / "begun")
    command = [sys.executable, "-c", f"import os; open({mark!r} + os.uname().nodename, 'w')\n{program}"]
    run = subprocess.Popen(
        [*PROGRAM, "run", "--ranks", "2", "--rate", "100mbit", *options, "--no-measure", "--", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        begun = [Path(mark + host) for host in network.names(2)]
        until(lambda: all(path.exists() for path in begun) or run.poll() is not None, seconds=LIMIT)
        assert run.poll() is None, run.stdout and run.stdout.read()
        yield run, mark
    finally:
        run.kill()
        run.wait()
        assert run.stdout
        run.stdout.close()


@needs_network
def test_a_command_runs_on_hosts_of_their_own_several_times_on_each(tmp_path: Path) -> None:
    """The library knows which ranks share a machine. Hosts do not need ARP."""
    before, had = links(), folders()
    program = (
        "import json, os, subprocess, numpy as np\n"
        "import sparsecomm as sc\n"
        "from sparsecomm import transport\n"
        "t = transport.transport_of(None)\n"
        "r = sc.sparse_allreduce(np.arange(1, 101, dtype=np.float32), 2, algorithm='hierarchical')\n"
        "link = json.load(open(os.environ['SLOW_NETWORK_LINK']))\n"
        "shown = subprocess.run(['ip', 'neigh', 'show', 'nud', 'permanent'], capture_output=True, text=True).stdout\n"
        "known = sorted(line.split()[0] for line in shown.splitlines())\n"
        "print('rank', t.rank, os.uname().nodename, os.environ['MINE'], os.environ['SPARSECOMM_THREADS'],"
        " os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'], list(t.node_of_rank), link['asked'], r.values.tolist(), known)"
    )
    path = tmp_path / "link.json"
    options = "run", "--ranks", "2", "--rate", "100mbit", "--link-json", str(path)
    done = call(*options, "--per-host", "2", "--", sys.executable, "-c", program, MINE="mine")
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        host, known = rank // 2, ["10.77.0.254", f"10.77.0.{2 - rank // 2}"]
        says = f"rank {rank} sn{host} mine 1 2 [0, 0, 1, 1] 100000000.0 [396.0, 400.0] {sorted(known)}"
        assert says in done.stdout
    assert "# slow network: 2 hosts" in done.stdout.splitlines()[0]
    # If another program holds up a measurement, measure again.
    until(lambda: is_right(json.loads(path.read_text())) or not call(*options, "--", "sleep", "0.5"), seconds=3 * SOON)
    assert links() == before
    assert folders() <= had
    assert not traces("os.environ['MINE']")


def is_right(link: dict[str, float]) -> bool:
    """Return whether the measurement of a link is about right for 100 Mb/s."""
    return all(0.5e8 < link[rate] < 1.05e8 for rate in ("rate", "rate_all")) and 0 < link["alpha"] < 0.1


@needs_network
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_the_status_is_passed_on(tmp_path: Path, launcher: str) -> None:
    mark = tmp_path / "the command that fails"
    # The first command that fails ends the others. Only torchrun sets RANK.
    fails = ["sh", "-c", f": '{mark}'; sleep 0.5; test ${{RANK:-1}} = 0 && sleep 1000; exit 3"]
    done = call("run", "--ranks", "2", "--rate", "1gbit", "--launcher", launcher, "--no-measure", "--", *fails)
    assert done.returncode == 3, done.stderr
    assert not traces(str(mark))


@needs_network
@pytest.mark.parametrize("launcher", ["mpirun", exhaustive("torchrun")])
def test_the_ranks_of_a_host_count_as_one(launcher: str) -> None:
    """By default, over MPI and process groups, a host of two ranks sends as much as a host of one rank."""
    program = (
        "import os, numpy as np\n"
        "if 'WORLD_SIZE' in os.environ:\n"
        "    import torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        "import sparsecomm as sc\n"
        "from sparsecomm.transport import transport_of\n"
        "t, w = transport_of(None), {'w': np.zeros(300_000, np.float32)}\n"
        "optimizer = sc.SparseAdamW(w, density=0.1)\n"
        "for step in range(5):\n"
        "    optimizer.step({'w': np.random.default_rng([step, t.rank]).standard_normal(300_000, np.float32)})\n"
        "counters = optimizer.reducer.counters\n"
        "text = f'rank {t.rank} {counters.bytes_sent} {counters.bytes_inside > 0} {hash(w[chr(119)].tobytes())}'\n"
        "os.write(1, f'{text}\\n'.encode())"
    )
    sent, nodes = {}, {}
    for per_host in (1, 2):
        done = call(
            *["run", "--ranks", "2", "--per-host", str(per_host), "--rate", "1gbit", "--launcher", launcher],
            *["--no-measure", "--", sys.executable, "-c", program],
            PYTHONHASHSEED="0",
        )
        assert done.returncode == 0, done.stderr
        said = [line.split() for line in done.stdout.splitlines() if line.startswith("rank ")]
        assert len(said) == 2 * per_host, done.stdout
        assert len({words[4] for words in said}) == 1
        sent[per_host], nodes[per_host] = sum(int(words[2]) for words in said), {words[3] for words in said}
    assert nodes == {1: {"False"}, 2: {"True"}}
    assert sent[2] < 1.1 * sent[1]


@needs_network
@pytest.mark.parametrize(
    ("number", "options", "stubborn"),
    [
        (signal.SIGINT, [], STUBBORN),
        exhaustive(signal.SIGINT, [], ""),
        (signal.SIGTERM, RELAYED, ""),
        exhaustive(signal.SIGTERM, RELAYED, STUBBORN),
    ],
    ids=["mpirun, stubborn", "mpirun", "relay", "relay, stubborn"],
)
def test_a_signal_ends_and_removes_everything(
    tmp_path: Path, number: signal.Signals, options: list[str], stubborn: str, cache: str
) -> None:
    before, had = links(), folders()
    with started(tmp_path, f"import signal, time\n{stubborn}\ntime.sleep(1000)", *options) as (run, mark):
        assert bool(traces(cache)) == ("--rtt" in options)
        run.send_signal(number)
        assert run.wait(SOON) == 128 + number
        assert not traces(mark)
        assert not traces(cache)
        assert links() == before
        assert folders() <= had


@linux_only
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ranks", "0", "--rate", "1gbit", "--", "true"], "0 ranks: expected 1 to"),
        (["--ranks", "2", "--rate", "fast", "--", "true"], "rate 'fast': expected a number and a unit"),
        (TWO, "no command"),
        ([*TWO, "--", "no-such-program"], "'no-such-program' is neither"),
        ([*TWO, "--loss", "0.001", "--", "true"], "loss '0.001': expected a percentage"),
        ([*TWO, "--rtt", "8ms", "--jitter", "5ms", "--", "true"], "at most half of the round trip, 8ms"),
    ],
)
def test_bad_arguments_are_refused(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slow_network", "run", *args])
    assert main() == 2
    assert says in capsys.readouterr().err
