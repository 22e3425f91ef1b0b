"""Fresh environments like a user's: without the checkout on the path, and without a compiler."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.processes import MORE_RANKS_THAN_CORES

COMPILERS = re.compile(
    r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|c89|c99|cpp|ld|as|make)(-[\d.]+)?|mpi.*|ompi.*|prte.*|ort.*"
)
LIMIT = 300  # seconds


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the variables of its programs.

    Attributes:
        folder: the folder of the environment.
        system: a folder with links to programs, for PATH.
    """

    folder: Path
    system: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        """Make an environment in a new folder. PATH has this machine's programs except compilers and MPIs."""
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, folder / "env"], check=True)
        system = folder / "system"
        system.mkdir()
        for place in reversed(["/usr/local/bin", "/usr/bin", "/bin"]):
            for program in Path(place).glob("*"):
                if not COMPILERS.fullmatch(program.name):
                    (system / program.name).unlink(missing_ok=True)
                    (system / program.name).symlink_to(program)
        return cls(folder / "env", system)

    @property
    def variables(self) -> dict[str, str]:
        dropped = {"PYTHONPATH", "MPICC", "MPI4PY_LIBMPI", "MPI4PY_MPIABI", "LD_LIBRARY_PATH"}
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        path = f"{self.folder / 'bin'}{os.pathsep}{self.system}"
        return inherited | MORE_RANKS_THAN_CORES | {"PATH": path, "VIRTUAL_ENV": str(self.folder)}

    def install(self, *requirements: object, objects: Path | None = None) -> None:
        """Install with uv. Source packages are built only if ``objects``, a folder of compiled files, is passed."""
        uv = shutil.which("uv")
        assert uv is not None
        variables = self.variables
        if objects is not None:
            variables["PATH"] = f"{self.folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
            variables["SPARSECOMM_OBJECTS"] = str(objects)
        python = self.folder / "bin" / "python"
        command = [uv, "pip", "install", "--quiet", "--system-certs", "--python", python, *requirements]
        ran = subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-4000:]

    def link(self, *names: str) -> None:
        """Install distributions and their dependencies as links to the files of the current environment.

        This includes their bytecode, which takes seconds to compile.
        """
        (site,) = self.folder.glob("lib/python*/site-packages")
        for distribution in _with_requirements(names):
            for file in distribution.files or ():
                source = Path(str(file.locate())).resolve()
                if ".." not in file.parts:
                    _link(source, site / file)
                    if source.suffix == ".py":
                        compiled = Path(importlib.util.cache_from_source(source.name))
                        _link(source.parent / compiled, (site / file).parent / compiled)
                elif source.parent.name == "bin":
                    text = source.read_text().split("\n", 1)[1]
                    script = self.folder / "bin" / source.name
                    script.write_text(f"#!{self.folder / 'bin' / 'python'}\n{text}")
                    script.chmod(0o755)

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> tuple[int, str]:
        """Run a program of the environment in its folder; return its exit status and output."""
        program = shutil.which(command[0], path=self.variables["PATH"])
        assert program is not None, command
        ran = subprocess.run(
            [program, *command[1:]],
            cwd=cwd or self.folder,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        return ran.returncode, ran.stdout


def _with_requirements(names: Iterable[str]) -> Iterator[importlib.metadata.Distribution]:
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # requirement for another system
        yield distribution
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                todo += re.findall(r"^[\w.-]+", requirement)


def _link(source: Path, to: Path) -> None:
    if source.exists() and not to.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, to)
        except OSError:  # hard links do not cross file systems
            shutil.copy2(source, to)
