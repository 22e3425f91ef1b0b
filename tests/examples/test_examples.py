"""The examples run and print their results."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Run
from tests.processes import ENVIRONMENT, LIMIT, MPIRUN, ROOT, free_port, mpirun, needs_mpirun, needs_survivors
from tests.waiting import until

SETTINGS = ENVIRONMENT | {"TERM": "dumb"}


def run(*command: str, ends_well: bool = True) -> str:
    ran = subprocess.run(command, env=SETTINGS, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0 or not ends_well, ran.stdout + ran.stderr
    return re.sub(r"\x1b\[[\d;?]*\w", "", ran.stdout)  # mpirun gives its ranks a terminal, so they print colours


@needs_mpirun
def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    plot = tmp_path / "digits.png"
    output = run(
        str(MPIRUN), "-n", "2", sys.executable, str(ROOT / "examples/digits.py"), "--epochs", "15", "--plot", str(plot)
    )
    pattern = r"^([\w-]+) +test accuracy ([\d.]+)%, sent per rank .* \(([\d.]+)% of dense\)"
    methods = re.findall(pattern, output, re.MULTILINE)
    assert [name for name, *_ in methods] == ["Dense", "Top-k", "gTop-k"]
    assert min(float(accuracy) for _, accuracy, _ in methods) > 85
    assert [float(fraction) < 5 for *_, fraction in methods] == [False, True, True]
    assert "sc.sparse_allreduce(gradient, 0.01" in output
    assert str(plot) in output
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.exhaustive
@needs_mpirun
def test_jax_optax() -> None:
    for package in ("sklearn", "jax", "optax"):
        pytest.importorskip(package)
    output = run(str(MPIRUN), "-n", "2", sys.executable, str(ROOT / "examples/jax_optax.py"))
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    sent = re.search(r"sent per step: ([\d.]+) kB; a dense allreduce would send ([\d.]+) kB", output)
    assert accuracy is not None, output
    assert sent is not None, output
    assert float(accuracy[1]) > 90
    assert float(sent[1]) < float(sent[2]) / 5


def test_patches(forks: Run) -> None:
    pytest.importorskip("torch")
    status, output = forks(ROOT / "examples/patches.py", "--steps", 10)
    assert status == 0, output
    assert re.search(r"^The PyTorch receiver has answered \d+ requests$", output, re.MULTILINE), output
    assert "Both receivers have the weights of step 10, bit for bit" in output
    fraction = re.search(r"patch: [\d,]+ bytes per step, 1/(\d+) of it", output)
    bits = re.search(r"^([\d.]+)% of the weights change per step, in ([\d.]+) bits each$", output, re.MULTILINE)
    assert fraction is not None, output
    assert bits is not None, output
    assert int(fraction[1]) > 50
    assert 0 < float(bits[1]) < 10
    assert 1 < float(bits[2]) < 12


@needs_mpirun
@needs_survivors
def test_lost_rank() -> None:
    """The exit status after a death depends on Open MPI's MPI_Finalize, and is not checked."""
    command = [str(MPIRUN), "--with-ft", "ulfm", "-n", "4", sys.executable, str(ROOT / "examples/lost_rank.py")]
    said = run(*command, ends_well=False)
    assert len(re.findall(r"^rank \d: .*rank 1 died", said, re.MULTILINE)) == 3, said
    assert len(re.findall(r"^now rank [012]: 3 ranks continue with step 71; lost: rank 1", said, re.MULTILINE)) == 3, (
        said
    )
    assert len(re.findall(r"^rank \d: 4 ranks continue with step 120; new: rank 3", said, re.MULTILINE)) == 4, said
    ends = re.findall(r"^rank (\d) of 4: 180 steps, accuracy ([\d.]+)%, weights (\w+)", said, re.MULTILINE)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1", "2", "3"], said
    assert len({weights for _, _, weights in ends}) == 1, said
    assert float(ends[0][1]) > 80, said


@pytest.mark.exhaustive
@needs_survivors
def test_lost_worker() -> None:
    """The exit status after a death depends on Open MPI's MPI_Finalize, and is not checked."""
    _, said = mpirun(4, str(ROOT / "examples/lost_worker.py"), "--lose", options=("--with-ft", "ulfm"))
    seconds = re.findall(r"^rank [012]: the survivors have lost nothing: .* comes ([\d.]+) s", said, re.MULTILINE)
    assert len(seconds) == 3, said
    assert max(map(float, seconds)) < 2, said
    assert len(re.findall(r"^rank \d: 3 ranks continue with round 9; lost: rank 1", said, re.MULTILINE)) == 3, said
    assert len(re.findall(r"^rank \d: 4 ranks continue with round 16; new: rank 3", said, re.MULTILINE)) == 4, said
    pattern = r"^rank \d: of 4: 24 rounds, accuracy ([\d.]+)%, global parameters (\w+); sent ([\d.]+) kB .* (\d+) kB"
    ends = re.findall(pattern, said, re.MULTILINE)
    assert len(ends) == 4, said
    assert len({parameters for _, parameters, *_ in ends}) == 1, said
    assert all(float(accuracy) > 90 and float(sent) * 50 < float(dense) for accuracy, _, sent, dense in ends), said


@pytest.fixture
def port() -> Iterator[int]:
    with free_port() as number:
        yield number


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def saved(folder: Path, *jobs: subprocess.Popen[bytes]) -> bool:
    """Return whether both ranks have saved step 20, or a job has ended."""
    return (folder / "saved/step20-rank1-of2.pt").exists() or any(job.poll() is not None for job in jobs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("local_steps", [0, 8])
def test_elastic(local_steps: int, tmp_path: Path, port: int) -> None:
    """One of two agents is killed with its worker; the other continues alone from the last complete checkpoint."""
    pytest.importorskip("torch")
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint=localhost:{port}"]
    options += ["--rdzv-conf=last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3"]
    script = [str(ROOT / "examples/elastic.py"), f"--folder={tmp_path / 'saved'}", "--steps=80", "--every=10"]
    script += [f"--local-steps={local_steps}"]
    settings = SETTINGS | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = []
    try:
        for number in range(2):
            with (tmp_path / f"agent{number}").open("w") as said:
                command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
                agents.append(subprocess.Popen(command, env=settings, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT))
            until(lambda: listens(port), "the store, which the first agent has", LIMIT)
        until(lambda: saved(tmp_path, *agents), "a checkpoint", LIMIT)
        [worker] = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        agents[1].kill()
        assert agents[0].wait(LIMIT) == 0, (tmp_path / "agent0").read_text()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    said = (tmp_path / "agent0").read_text()
    assert re.search(r"rank \d of 2: step 0, from the beginning", said), said
    assert re.search(r"rank 0 of 1: step [2-7]0, from a checkpoint of 2", said), said
    assert re.search(r"rank 0 of 1: done, loss 0\.\d+", said), said
