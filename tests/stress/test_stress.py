"""Short runs of the attacks from the command line, with a fixed seed and with a new one."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, LIMIT, ROOT, needs_mpirun, needs_survivors
from tests.stress.sanitizers import COMPILER
from tests.thinning import exhaustive

needs_process_groups = pytest.mark.skipif(find_spec("torch") is None, reason="no PyTorch")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}")


def attack(command: str, seed: int | None = None) -> None:
    """Run an attack, by default with a new seed; show its report on a failure."""
    seed = secrets.randbits(31) if seed is None else seed
    words = ["-m", "tests.stress", *shlex.split(command)]
    words += [] if "--seed" in words else ["--seed", str(seed)]
    print("repeat:", *words)
    options = {"cwd": ROOT, "env": ENVIRONMENT, "timeout": LIMIT}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


FIXED = [
    "calls --calls 80 --jobs 0",
    "messages --messages 10000 --jobs 0",
    "peers --messages 150 --jobs 0",
    "peers --messages 1 --first 10066 --jobs 0 --seed 23",  # `split` trusted the number of sums that reach a bound
    "inputs --inputs 200 --jobs 0",
    "states --states 25 --jobs 0",
    pytest.param("lives --lives 20 --jobs 0", marks=needs_process_groups),
    pytest.param("threads --calls 1000 --forks 20 --pool-only", marks=[needs_compiler, pytest.mark.exhaustive]),
]
NEW = [
    "calls --calls 200 --jobs 0",
    "messages --messages 50000 --jobs 1",
    "peers --messages 4000 --jobs 1",
    "files --files 300 --jobs 0",
    pytest.param("kills --kills 30", marks=needs_process_groups),
    pytest.param("lives --lives 60 --jobs 1", marks=needs_process_groups),
]
ON_REAL_RANKS = [
    "states --states 40 --over mpi",
    "states --states 40 --over gloo",
    "interrupts --stride 0 --signals 20 --over mpi --scenes reducer local adamw load-Reducer torch-optimizer",
    "endurance --calls 4000 --communicators 100",
    "strangers --connections 8000",
    "soak --minutes 0.4 --no-network --ranks 3 --timeout 2 --every 6 --long 2 --stall 0.5",
]


@pytest.mark.parametrize("command", FIXED)
def test_attack_with_a_fixed_seed(command: str) -> None:
    attack(command, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", NEW)
def test_attack_with_a_new_seed(command: str) -> None:
    attack(command)


@needs_mpirun
@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ON_REAL_RANKS)
def test_attack_on_real_ranks(command: str) -> None:
    attack(command)


@needs_mpirun
@needs_survivors
# Kills in calls, in the first call, and in steps. In the first call MPI duplicates the communicator, where Open MPI
# 5.0.11 may crash by itself (docs/guides/lost-rank.md), so that seed runs only in exhaustive tests.
@pytest.mark.parametrize("seed", [exhaustive(1), exhaustive(2), 5])
def test_a_lost_rank(seed: int) -> None:
    attack("lost --runs 1 --seconds 60", seed)  # the machine may be busy


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
def test_messages_and_inputs_under_sanitizers(tmp_path: Path) -> None:
    for kind, cases in (("messages", 3000), ("inputs", 60)):
        attack(f"{kind} --{kind} {cases} --sanitized {shlex.quote(str(tmp_path))}/build", 1)
