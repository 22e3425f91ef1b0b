"""The terminal of the user, and progress on it.

Under mpirun a rank's own standard output says nothing of where its lines end: it is a terminal that mpirun has made
(Open MPI), or a pipe (MPICH), also where mpirun's own output goes to a file. What counts is the output of mpirun.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

__all__ = ["Progress", "output_is_shown", "progress", "stream"]

# The processes that pass on what ranks write, as Linux names them: 15 characters at most.
_LAUNCHERS = frozenset(("mpirun", "mpiexec", "prterun", "orterun", "mpiexec.hydra", "mpiexec.gforker"))
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")

Progress = Callable[[str | None], None]


def stream() -> TextIO | None:
    """Return the stream to draw on, so that it reaches a terminal; ``None`` if there is none.

    It is standard error. Under mpirun it is standard output where both are that terminal: mpirun does not keep the
    order of two streams, and what is drawn would meet the lines of a table.
    """
    outputs = _outputs_of_mpirun()
    if outputs is None:
        return sys.stderr if sys.stderr.isatty() else None
    out, err = outputs
    if not err.startswith(_TERMINALS):
        return None
    return sys.stdout if out == err else sys.stderr


def output_is_shown() -> bool:
    """Return whether standard output reaches a terminal, which may take colours and progress."""
    outputs = _outputs_of_mpirun()
    return sys.stdout.isatty() if outputs is None else outputs[0].startswith(_TERMINALS)


def _outputs_of_mpirun() -> tuple[str, str] | None:
    """Return the names of the files that the mpirun above this process writes to; None if there is no mpirun."""
    process = os.getppid()
    while process > 1:
        folder = Path(f"/proc/{process}")
        try:
            name, parent = (
                (folder / "comm").read_text().strip(),
                re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.MULTILINE),
            )
            if name in _LAUNCHERS:
                return os.readlink(folder / "fd" / "1"), os.readlink(folder / "fd" / "2")
        except OSError:  # it has ended, it is another user's, or this is not Linux
            return None
        process = int(parent[1]) if parent else 0
    return None


@contextmanager
def progress(total: int, shown: bool = True) -> Iterator[Progress]:
    """Give a function that is told what comes next, of ``total`` in all, or None before a line is printed.

    It draws only on a terminal, and only when it is told something: a display that is renewed on time would disturb a
    measurement. A process for which ``shown`` is false draws nothing.
    """
    file = stream() if shown else None
    if file is None:
        yield lambda text: None
        return
    done = -1
    if importlib.util.find_spec("rich") is None:

        def plain(text: str | None) -> None:
            nonlocal done
            done += text is not None
            line = "" if text is None else f"{done}/{total} {text}"
            print(f"\r{line:<78}\r", end="", file=file, flush=True)

        yield plain
        plain(None)
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(file=file, force_terminal=True)
    columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Bar(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False)
    task = bar.add_task("", total=total)

    def drawn(text: str | None) -> None:
        nonlocal done
        if text is None:
            bar.stop()
            return
        done += 1
        bar.start()
        bar.update(task, completed=done, description=text, refresh=True)

    try:
        yield drawn
    finally:
        bar.stop()
