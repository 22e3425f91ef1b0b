"""The terminal of the user, and progress on it.

Under mpirun a rank's own standard output says nothing of where its lines end: it is a terminal that mpirun has made
(Open MPI), or a pipe (MPICH), also where mpirun's own output goes to a file. What counts is the output of mpirun.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
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
def progress(total: int, shown: bool = True, ticking: bool = False) -> Iterator[Progress]:
    """Give a function that is told what comes next, of ``total`` in all, or None before a line is printed.

    It draws only on a terminal, and only when it is told something: a display that is renewed on time would disturb a
    measurement. Where nothing is measured it may be ``ticking``, so that the clock goes on. A process for which
    ``shown`` is false draws nothing.
    """
    file = stream() if shown else None
    if file is None:
        yield lambda text: None
        return
    line = _Line(file, total)
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.5):
            line.draw()

    ticker = threading.Thread(target=tick, daemon=True)
    if ticking:
        ticker.start()
    try:
        yield line.update
    finally:
        over.set()
        line.update(None)


class _Line:
    """A line that is drawn again and again: how many are done, the time, and what is being done.

    mpirun holds back what a rank prints until the line ends (Open MPI 5). So there the line does end, and the cursor
    goes back to it before anything else is printed.
    """

    def __init__(self, file: TextIO, total: int) -> None:
        self._file, self._total, self._done, self._text = file, total, -1, ""
        self._back, self._end = ("", "\r") if _outputs_of_mpirun() is None else ("\x1b[A", "\n")
        self._began = time.monotonic()
        self._drawn = False
        self._lock = threading.Lock()

    def update(self, text: str | None) -> None:
        """Draw what comes next, or clear the line."""
        with self._lock:
            self._done += text is not None
            self._text = text or ""
        self.draw()

    def draw(self) -> None:
        with self._lock:
            if not self._text and not self._drawn:
                return
            minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
            line = f"{self._done}/{self._total}  {minutes}:{seconds:02}  {self._text}"[:78] + self._end
            cleared = f"{self._back if self._drawn else ''}\r\x1b[K"
            self._drawn = bool(self._text)
            print(cleared + line * self._drawn, end="", file=self._file, flush=True)
