"""Short forms of the attacks, as the command line makes them: with a fixed seed, and with a new one."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, LIMIT, ROOT, needs_mpirun, needs_survivors
from tests.stress.calls import Calls
from tests.stress.sanitizers import COMPILER
from tests.thinning import whole

SEED = 1
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r}")


def attack(*words: object, seed: int | None = SEED) -> None:
    """Run an attack; fail with its report if it finds something."""
    if seed is None:
        seed = secrets.randbits(31)
    command = [sys.executable, "-m", "tests.stress", *map(str, words), "--seed", str(seed)]
    print("repeat:", " ".join(command[1:]))
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


def test_calls() -> None:
    attack("calls", "--calls", 150, "--jobs", 0)


def test_messages() -> None:
    attack("messages", "--messages", 20_000, "--jobs", 0)


def test_profiles_states_and_capsules() -> None:
    attack("inputs", "--inputs", 300, "--jobs", 0)


def test_states() -> None:
    attack("states", "--states", 60, "--jobs", 0)


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.exhaustive
@pytest.mark.parametrize("over", ["mpi", "gloo"])
def test_states_on_real_ranks(over: str) -> None:
    attack("states", "--states", 40, "--over", over, seed=None)


@pytest.mark.exhaustive
def test_calls_that_no_run_has_made_before() -> None:
    attack("calls", "--calls", 200, "--jobs", 0, seed=None)


@pytest.mark.exhaustive
def test_messages_that_no_run_has_read_before() -> None:
    attack("messages", "--messages", 50_000, "--jobs", 1, seed=None)


def test_signals() -> None:
    attack("signals", "--calls", 400, "--ranks", 1, 3, "--over", "simulated", seed=None)


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.exhaustive
@pytest.mark.parametrize(("over", "ranks"), [("mpi", [1, 2, 3]), ("gloo", [2])], ids=["mpi", "gloo"])
def test_signals_on_real_ranks(over: str, ranks: list[int]) -> None:
    attack("signals", "--calls", 200, "--ranks", *ranks, "--over", over, seed=None)


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.exhaustive
@pytest.mark.parametrize("scene", ["reducer", "local"])
def test_steps_that_signals_interrupt(scene: str) -> None:
    attack("interrupts", "--stride", 0, "--signals", 30, "--over", "mpi", "--scenes", scene, seed=None)


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.exhaustive
def test_endurance() -> None:
    attack("endurance", "--calls", 4000, "--communicators", 100)


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.exhaustive
def test_a_stopped_rank() -> None:
    attack("stopped", "--rounds", 1, seed=None)


@pytest.mark.mpi
@needs_mpirun
@needs_survivors
# In calls, at the first call, and in steps. In the first call MPI duplicates the communicator, and Open MPI 5.0.11 now
# and then ends with a segmentation fault of its own (docs/how-to/lost-rank.md): not where every failure counts.
@pytest.mark.parametrize("seed", [1, whole(2), 5])
def test_a_lost_rank(seed: int) -> None:
    attack("lost", "--runs", 1, "--seconds", 30, seed=seed)  # the machine may do much else


@needs_compiler
@pytest.mark.exhaustive
def test_threads() -> None:
    attack("threads", "--calls", 1000, "--forks", 20, "--pool-only")


@needs_compiler
@pytest.mark.slow
@pytest.mark.whole
def test_messages_and_inputs_under_sanitizers(tmp_path: Path) -> None:
    for which, cases in (("messages", 3000), ("inputs", 60)):
        attack(which, f"--{which}", cases, "--sanitized", tmp_path / "build")


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
