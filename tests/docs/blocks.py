"""Run what a page tells its readers to type, word for word.

    python -m tests.docs.blocks README.md                            in a new folder, with what is on PATH
    python -m tests.docs.blocks README.md --leave-out mpirun         where there is no MPI

A page's blocks are run in their order:

- ```` ```python ```` with a first line ``# NAME``, or ``# NAME: how to start it``, is written to the file NAME. So is
  any other block with such a line, such as a list of hosts; of a script in sh, the name has a suffix.
- ```` ```sh ```` is a script, whose exit status is 0. What it exports reaches later blocks.
- ```` ```console ```` has commands after ``$ `` and what they print on stdout. ``...`` stands for any text. In a line
  with a time, a number of bytes or another measurement, all numbers may differ: the page shows a real run. Commands
  with nothing below them may print what they like. ``node0$ `` says on which machine a command is typed; neighbours on
  different machines run at the same time.
- ```` ```text ````, or a block in no language, is only shown.

Only the standard library is needed, so that the Python of any environment can run this.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
FILE = re.compile(r"(?:#!.*\n)?# (?P<name>[\w-]+(?:\.\w+)?)(?::.*)?\n")
PROMPT = re.compile(r"(?P<host>[a-z]+\d+)?\$ (?P<text>.*)")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
# For each kind, the units that may be printed.
UNITS = r"(?:[num]?s|minutes)", r"[kMG]?B(?:/s)?", r"[kMG]?b/s", "%", "bytes", "nats"
MEASURED = re.compile(rf"{NUMBER} ?(?:{'|'.join(UNITS)})(?!\w)")
TOKEN = re.compile(rf"(\.\.\.| +|{MEASURED.pattern}|{NUMBER})")
SCRIPTS = ("sh", "bash")
SHOWN = ("", "text")
LIMIT = 600  # seconds


@dataclass(frozen=True)
class Command:
    """A command, its machine ("": this one), and its output (None: anything)."""

    text: str
    host: str = ""
    output: str | None = None


@dataclass(frozen=True)
class Block:
    """A fenced block. ``file``: the name that it is saved under. A block without file and commands is only shown."""

    place: str
    language: str
    text: str
    file: str = ""
    commands: tuple[Command, ...] = ()

    @property
    def shown(self) -> bool:
        return not self.file and not self.commands


class FailedError(Exception):
    """A block did not do what the page says."""


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page. Raise a FailedError if one can be neither shown, run nor saved."""
    text, fenced = page.read_text(), []
    for match in FENCE.finditer(text):
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)]
        line_number = text.count("\n", 0, match.start()) + 1
        fenced.append(_block(f"{page.name}:{line_number}", match["language"], "".join(lines)))
    return fenced


def _block(place: str, language: str, text: str) -> Block:
    if language == "console":
        return Block(place, language, text, commands=tuple(_session(place, text)))
    named = FILE.match(text)
    if named and (language not in SCRIPTS or "." in named["name"]):
        return Block(place, language, text, file=named["name"])
    if language in SCRIPTS:
        return Block(place, language, text, commands=(Command(text),))
    if language not in SHOWN:
        raise FailedError(f"{place}: a block of {language} begins with `# NAME`, the file that it is saved as")
    return Block(place, language, text)


def _session(place: str, text: str) -> list[Command]:
    typed: list[tuple[str, list[str], list[str]]] = []
    goes_on = False
    for line in text.splitlines():
        prompt = PROMPT.fullmatch(line)
        if prompt and not goes_on:
            typed.append((prompt["host"] or "", [prompt["text"]], []))
        elif not typed:
            raise FailedError(f"{place}: a console begins with a command after `$ `")
        else:
            typed[-1][1 if goes_on else 2].append(line)
        goes_on = not typed[-1][2] and typed[-1][1][-1].endswith("\\")
    return [Command("\n".join(lines), host, "\n".join(out) if out else None) for host, lines, out in typed]


@dataclass
class Runner:
    """Runs blocks in a folder, as one session. Variables that blocks export are added to ``environment``.

    A command that an earlier block has run with the same files, and whose output was compared, is not run again.

    Attributes:
        leave_out: patterns of commands that are not run here.
        enter: a command that runs its arguments on a machine: ``ENTER HOST COMMAND``. Without it, commands on other
            machines are left out.
        ran, left_out: commands, each with the place of its block.
    """

    folder: Path
    environment: dict[str, str]
    leave_out: Sequence[str] = ()
    enter: str = ""
    ran: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _done: dict[tuple[str, ...], set[str | None]] = field(default_factory=dict)

    def run_pages(self, *pages: Path) -> None:
        """Run all blocks of some pages, in their order."""
        for page in pages:
            for block in blocks(page):
                self.run(block)

    def run(self, block: Block) -> None:
        """Run a block, or write its file. Raise a FailedError if a command does not do what the page shows."""
        if block.file:
            (self.folder / block.file).write_text(block.text)
        commands = [command for command in block.commands if not self._left_out(block, command)]
        while commands:
            together = 1
            while together < len(commands) and _apart(commands[: together + 1]):
                together += 1
            with ThreadPoolExecutor(together) as threads:
                list(threads.map(self._run, [block.place] * together, commands[:together]))
            del commands[:together]

    def _left_out(self, block: Block, command: Command) -> bool:
        skip = (command.host and not self.enter) or any(re.search(p, command.text) for p in self.leave_out)
        if not skip:  # skip a command that another page has shown with the same files and output
            words = command.text.replace("\\\n", " ").split()
            named = [self.folder / word for word in words if (self.folder / word).is_file()]
            key = (*words, command.host, *(file.read_text() for file in named))
            shown = self._done.setdefault(key, set())
            skip = bool(named and shown) and (command.output is None or command.output in shown)
            shown.add(command.output)
        (self.left_out if skip else self.ran).append(f"{block.place}: {command.text.strip()}")
        return bool(skip)

    def _run(self, place: str, command: Command) -> None:
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "environment"
            script = f"set -e -o pipefail\n{command.text}\nenv -0 >{shlex.quote(str(state))}\n"
            start = [*([self.enter, command.host, "exec"] if command.host else []), "bash", "-c"]
            start.append(shlex.quote(script) if command.host else script)
            options = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL, "timeout": LIMIT}
            done = subprocess.run(start, capture_output=True, text=True, **options)
            if done.returncode == 0:
                pairs = (pair.partition("=") for pair in state.read_text().split("\0") if pair)
                self.environment.update({name: value for name, _, value in pairs if name not in ("_", "SHLVL")})
        what = f"{place}: {command.text.strip()}"
        if done.returncode:
            raise FailedError(f"{what}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
        if command.output is not None and not _matches(command.output, done.stdout):
            raise FailedError(f"{what}\nexpected:\n{command.output}\nprinted:\n{done.stdout}{done.stderr}")


def _apart(commands: list[Command]) -> bool:
    """Return whether commands are typed on machines that are all different."""
    hosts = [command.host for command in commands]
    return all(hosts) and len(set(hosts)) == len(hosts)


def _matches(expected: str, printed: str) -> bool:
    pattern = "\n".join(map(_pattern, expected.strip().splitlines()))
    return re.fullmatch(pattern, "\n".join(map(str.rstrip, printed.strip().splitlines())), re.DOTALL) is not None


def _pattern(line: str) -> str:
    """Return the regular expression of a line of output."""
    if not MEASURED.search(line):
        return ".*?".join(map(re.escape, line.split("...")))
    return "".join(map(_token, TOKEN.split(line)))


def _token(text: str) -> str:
    if text == "...":
        return ".*?"
    if re.fullmatch(" +", text):
        return " +"
    if MEASURED.fullmatch(text):
        unit = next(unit for unit in UNITS if re.fullmatch(f"{NUMBER} ?{unit}", text))
        return f"(?:-?{NUMBER} ?{unit}|-)"
    return f"(?:{NUMBER}|-)" if re.fullmatch(NUMBER, text) else re.escape(text)


NO_MPI = (r"\bmpirun\b", r"\bmpiexec\b", r"\bsrun\b")
NO_TORCH = (r"\btorchrun\b",)
INSTALLS = (r"\bpip install\b", r"\bmake \w", r"\bgit clone\b")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--leave-out", action="append", default=[], metavar="PATTERN", help="besides what installs")
    parser.add_argument("--enter", default="", metavar="COMMAND", help="runs `COMMAND HOST ...` on other machines")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="blocks-") as scratch:
        runner = Runner(Path(scratch), dict(os.environ), [*asked.leave_out, *INSTALLS], asked.enter)
        try:
            runner.run_pages(*asked.pages)
        except FailedError as error:
            print(error, file=sys.stderr)
            return 1
    for what, commands in (("ran", runner.ran), ("left out", runner.left_out)):
        for command in commands:
            print(f"{what}  {command}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
