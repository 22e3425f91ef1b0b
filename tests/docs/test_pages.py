"""What the README and the first pages tell their readers to type works as it stands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.slow_network import network
from tests.docs.blocks import blocks
from tests.processes import MPIRUN, needs_mpirun

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONCEPTS = [ROOT / "docs" / "concepts" / name for name in ("index.md", "worked-example.md")]
START = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "start").glob("*.md")), *CONCEPTS]
LIMIT = 600

pytest.importorskip("torch")
pytest.importorskip("optax")


def environment(library: Path | None = ROOT) -> dict[str, str]:
    """Return that of a reader who has typed nothing yet; ``library`` is where Python finds sparsecomm."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_", "PMIX_"))}
    kept["PATH"] = f"{Path(MPIRUN or sys.executable).parent}:{Path(sys.executable).parent}:{kept['PATH']}"
    if library is not None:
        kept["PYTHONPATH"] = str(library)
    return kept


def run(*arguments: str, environment: dict[str, str], before: Sequence[str] = ()) -> str:
    command = [*before, sys.executable, "-m", "tests.docs.blocks", "--keep-pythonpath", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def leave_out(*patterns: str) -> list[str]:
    return [option for pattern in patterns for option in ("--leave-out", pattern)]


def ran(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith("ran")]


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [README, *START], ids=lambda page: page.stem)
def test_every_block_can_be_run(page: Path) -> None:
    assert [block.place for block in blocks(page) if block.shown] == []


@pytest.mark.parametrize("page", [*START, ROOT / "docs" / "how-to" / "two-machines.md"], ids=lambda page: page.stem)
def test_every_command_shows_what_it_prints(page: Path) -> None:
    commands = [command for block in blocks(page) if block.language == "console" for command in block.commands]
    silent = [command.text for command in commands if command.output is None and command.host != "node1"]
    assert silent == []


@needs_mpirun
@pytest.mark.slow
@pytest.mark.exhaustive
def test_first_pages_run_word_for_word() -> None:
    told = run(*map(str, [README, *START]), *leave_out("selftest", "bench.slow_network"), environment=environment())
    assert len({line.split(":")[0] for line in ran(told)}) == 1 + len(START), told


@needs_mpirun
@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_machines() -> None:
    try:
        network.entry(2)
    except network.CannotError as error:
        pytest.skip(str(error))
    left = leave_out("selftest", "-n 4", "nproc_per_node 2", "sparsecomm tune", "mpich")
    before = [sys.executable, "-m", "tests.docs.two_machines"]
    pages = [str(README), str(ROOT / "docs" / "how-to" / "two-machines.md")]
    told = run(*pages, "--enter", "ENTER", *left, environment=environment(), before=before)
    assert sum("hostfile" in line for line in ran(told)) == 2, told
    assert sum("torchrun" in line for line in ran(told)) == 4, told  # each page starts it on both machines


@needs_mpirun
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fresh_clone_runs_the_readme(tmp_path: Path) -> None:
    if shutil.which("uv") is None:
        pytest.skip("needs uv: pip install uv")
    clone, env = tmp_path / "sparsecomm", tmp_path / "env"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for file in filter(None, files):
        if (ROOT / file).exists():
            (clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, clone / file, follow_symlinks=False)
    own = environment(library=None)
    command = ["uv", "venv", "--quiet", "--seed", "--system-certs", "--python", sys.executable, str(env)]
    subprocess.run(command, check=True)
    own.pop("PYTHONPATH", None)
    # The released wheel is tried in tests/packaging, and what torchrun starts needs PyTorch.
    left = [*leave_out("pip install sparsecomm"), "--no-torch"]
    told = run(str(README), "--env", str(env), "--folder", str(clone), "--install", *left, environment=own)
    assert any("pip install -e" in line for line in ran(told)), told
    assert any("first.py" in line for line in ran(told)), told
