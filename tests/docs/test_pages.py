"""Commands and files of the README, the first pages and the tutorials work word for word."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.slow_network import network
from tests.docs.blocks import INSTALLS, Block, Runner, blocks
from tests.packaging.environments import Environment
from tests.processes import MPIRUN, ROOT, needs_mpirun
from tests.thinning import exhaustive

README = ROOT / "README.md"
START = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "start").glob("*.md")), ROOT / "docs/concepts/index.md"]
LIMIT = 600

pytest.importorskip("torch")
pytest.importorskip("optax")


def environment(library: Path | None = ROOT) -> dict[str, str]:
    """Return the environment of a new reader; ``library``: the folder where Python finds sparsecomm."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_", "PMIX_"))}
    variables["PATH"] = f"{Path(MPIRUN or sys.executable).parent}:{Path(sys.executable).parent}:{variables['PATH']}"
    variables["SPARSECOMM_PROFILE"] = "none"  # costs that are the same on every machine
    if library is not None:
        variables["PYTHONPATH"] = str(library)
    return variables


def exports() -> Block:
    """Return the README's settings of the launcher, which the other pages build on."""
    return next(block for block in blocks(README) if block.text.startswith("export "))


@pytest.mark.parametrize("page", START[1:-1], ids=lambda page: page.stem)
def test_a_start_page_shows_a_picture_before_its_first_section(page: Path) -> None:
    assert "\n![" in page.read_text().partition("\n## ")[0]


INSTALL = re.compile(r"pip install[^`\n]*?(?<![\w./-])sparsecomm(?![\w./-])")


def test_no_page_installs_the_library_from_an_index() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if INSTALL.search(page.read_text())] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


def test_the_first_pages_lead_with_the_same_setting() -> None:
    """Both begin with the same optimizer and its default density."""
    pages = README, ROOT / "docs" / "start" / "pytorch.md"
    training = [next(b.text for b in blocks(page) if b.file == "train.py") for page in pages]
    optimizers = [re.findall(r"^optimizer = .*", text, re.MULTILINE) for text in training]
    assert optimizers[0] == optimizers[1] != []
    other = re.compile(r"(?:SparseAdamW|register|register_fsdp|Reducer)\([^)\n]*(?:density=)?0\.\d")
    assert [page.name for page in (README, *START) if other.search(page.read_text())] == []


@pytest.mark.parametrize("page", [README, *START], ids=lambda page: page.stem)
def test_every_block_can_be_run(page: Path) -> None:
    assert [block.place for block in blocks(page) if block.shown] == []


@pytest.mark.parametrize("page", [*START, ROOT / "docs" / "guides" / "launch.md"], ids=lambda page: page.stem)
def test_every_command_shows_what_it_prints(page: Path) -> None:
    commands = [command for block in blocks(page) if block.language == "console" for command in block.commands]
    silent = [command.text for command in commands if command.output is None and command.host != "node1"]
    assert silent == []


@needs_mpirun
@pytest.mark.slow
@pytest.mark.exhaustive
def test_first_pages_run_word_for_word(tmp_path: Path) -> None:
    """After the README's exports; the rest of the README runs in `test_the_readme_in_its_order`."""
    runner = Runner(tmp_path, environment(), [*INSTALLS, "selftest", "bench.slow_network"])
    runner.run(exports())
    runner.run_pages(*START)
    assert {line.split(":")[0] for line in runner.ran} == {page.name for page in [README, *START]}, runner.ran
    assert sum(line.startswith("index.md") for line in runner.ran) == 3, runner.ran


@needs_mpirun
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", ["trace", "compare-with-dense", "local-steps"])
def test_a_guide_runs_word_for_word(page: str, tmp_path: Path) -> None:
    runner = Runner(tmp_path, environment())
    runner.run(exports())
    runner.run_pages(ROOT / "docs" / "guides" / f"{page}.md")


def test_the_guide_to_testing_runs_word_for_word(tmp_path: Path) -> None:
    runner = Runner(tmp_path, environment())
    runner.run_pages(ROOT / "docs" / "guides" / "testing.md")
    assert len(runner.ran) == 1


EXTENDING = (ROOT / "docs" / "extending" / "index.md").read_text().split("\n## ")[1:]
IN_MAKE_TEST = [section if section.startswith("A framework") else exhaustive(section) for section in EXTENDING]


@pytest.mark.parametrize("section", IN_MAKE_TEST, ids=[section.partition("\n")[0] for section in EXTENDING])
def test_a_tutorial_runs_word_for_word_in_a_copy_of_the_sources(section: str, tmp_path: Path) -> None:
    for folder in ("sparsecomm", "tests", "bench"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    page = tmp_path / "section.md"
    page.write_text(section)
    runner = Runner(tmp_path, environment() | {"PYTHONPATH": ""})
    runner.run_pages(page)
    assert runner.ran
    assert not runner.left_out


@needs_mpirun
@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_machines() -> None:
    try:
        network.entry(2)
    except network.CannotError as error:
        pytest.skip(str(error))
    left = ("selftest", "-n 4", "nproc_per_node 2", "sparsecomm tune", "mpich")
    page = str(ROOT / "docs" / "guides" / "launch.md")
    command = [sys.executable, "-m", "tests.docs.two_machines", sys.executable, "-m", "tests.docs.blocks", page]
    command += ["--enter", "ENTER", *(f"--leave-out={pattern}" for pattern in left)]
    variables = environment()
    del variables["SPARSECOMM_PROFILE"]  # it would be set on one machine only
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran")]
    assert sum("hostfile" in line for line in ran) == 1, done.stdout
    assert sum("torchrun" in line for line in ran) == 2, done.stdout  # on both machines


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `git clone` makes it, with uncommitted changes and the compiled objects."""
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
    """Return the environment of a machine that has only Python and a compiler."""
    variables = environment(library=None)
    variables |= {
        "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin",
        "PIP_COMPILE": "0",
    }  # compiling torch takes a minute
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "SPARSECOMM_PROFILE"):
        variables.pop(name, None)
    return variables


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_readme_in_its_order(clone: Path) -> None:
    """All blocks run in order, in an environment that contains only the results of earlier blocks."""
    runner = Runner(clone, bare())
    for block in blocks(README):
        if "pip install torch" in block.text:  # installing it takes a minute
            Environment(clone / "venv", clone).link("torch")
        runner.run(block)
    assert not runner.left_out
    commands = "\n".join(runner.ran)
    for command in ("pip install -e", "selftest", "python first.py", "pip install torch", "torchrun --nproc_per_node"):
        assert command in commands, commands
