"""Short forms of the attacks, as the command line makes them: with a fixed seed, and with a new one."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, LIMIT, ROOT, needs_mpirun, needs_survivors
from tests.stress.__main__ import ATTACKS, main
from tests.stress.calls import Calls
from tests.stress.sanitizers import COMPILER
from tests.thinning import exhaustive

needs_process_groups = pytest.mark.skipif(find_spec("torch") is None, reason="no PyTorch")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}")


def attack(command: str, seed: int | None) -> None:
    """Run an attack; fail with its report if it finds something. ``None`` is a seed that no run has had before."""
    words = ["-m", "tests.stress", *shlex.split(command), "--seed", str(secrets.randbits(31) if seed is None else seed)]
    print("repeat:", *words)
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize(
    ("command", "seed"),
    [
        ("calls --calls 150 --jobs 0", 1),
        exhaustive("calls --calls 200 --jobs 0", None),
        ("messages --messages 20000 --jobs 0", 1),
        exhaustive("messages --messages 50000 --jobs 1", None),
        ("peers --messages 400 --jobs 0", 1),
        ("peers --messages 1 --first 10066 --jobs 0", 23),  # `split` trusted how many sums reach a bound
        exhaustive("peers --messages 4000 --jobs 1", None),
        ("inputs --inputs 300 --jobs 0", 1),
        ("states --states 60 --jobs 0", 1),
        pytest.param("files --files 300 --jobs 0", None, marks=pytest.mark.exhaustive),
        pytest.param("kills --kills 30", None, marks=[pytest.mark.exhaustive, needs_process_groups]),
        ("signals --calls 400 --ranks 1 3 --over simulated", 1),
        pytest.param("threads --calls 1000 --forks 20 --pool-only", 1, marks=[needs_compiler, pytest.mark.exhaustive]),
    ],
)
def test_attack(command: str, seed: int | None) -> None:
    attack(command, seed)


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "command",
    [
        "states --states 40 --over mpi",
        "states --states 40 --over gloo",
        "signals --calls 200 --ranks 1 2 3 --over mpi",
        "signals --calls 200 --ranks 2 --over gloo",
        "interrupts --stride 0 --signals 30 --over mpi --scenes reducer local",
        "endurance --calls 4000 --communicators 100",
        "stopped --rounds 1",
        "strangers --connections 8000",
        "soak --minutes 0.4 --no-network --ranks 3 --timeout 2 --every 6 --long 2 --stall 0.5",
    ],
)
def test_attack_on_real_ranks(command: str) -> None:
    attack(command, None)


@pytest.mark.mpi
@needs_mpirun
@needs_survivors
# In calls, at the first call, and in steps. In the first call MPI duplicates the communicator, and Open MPI 5.0.11 now
# and then ends with a segmentation fault of its own (docs/how-to/lost-rank.md): not where every failure counts.
@pytest.mark.parametrize("seed", [1, exhaustive(2), 5])
def test_a_lost_rank(seed: int) -> None:
    attack("lost --runs 1 --seconds 60", seed)  # the machine may do much else


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
def test_messages_and_inputs_under_sanitizers(tmp_path: Path) -> None:
    for which, cases in (("messages", 3000), ("inputs", 60)):
        attack(f"{which} --{which} {cases} --sanitized {shlex.quote(str(tmp_path))}/build", 1)


def test_what_is_found_is_reported_with_its_command(tmp_path: Path) -> None:
    """A process that ends without a report is a failure, and its command repeats it."""
    found = Calls(Namespace(attack="no-such-attack", seed=5, first=0, calls=10, jobs=1, max_ranks=33, sanitized=""))
    found.run()
    ((what, repeat),) = found.report.failures
    assert repeat == "-m tests.stress no-such-attack --seed 5 --calls 10 --jobs 0"
    assert "status 2" in what
    found.report.write(tmp_path / "report.json")
    assert '"seed": 5' in (tmp_path / "report.json").read_text()
    assert repeat in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_says_what_its_options_mean(name: str) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
