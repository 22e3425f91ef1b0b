"""Run a command on a network of two machines, node0 and node1, each behind a link of 1 Gb/s.

    python -m tests.docs.two_machines COMMAND ...

The machines are network namespaces of this one (`bench.slow_network`). Their interface is eth0, their names resolve,
and `ssh` logs in to them. ``ENTER`` in the command is replaced by a program that runs ``ENTER HOST COMMAND`` there, in
the environment of its caller.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from bench.slow_network import network

__all__ = ["NAMES", "main"]

NAMES = ["node0", "node1"]
RATE = 1e9  # bits per second
_INSIDE = "--inside"


def main(arguments: list[str]) -> int:
    """Return the exit status of the command."""
    if arguments[0] == _INSIDE:
        return _inside(Path(arguments[1]), arguments[2:])
    with network.folder() as folder:
        start = [*network.entry(len(NAMES)), sys.executable, "-m", "tests.docs.two_machines", _INSIDE, str(folder)]
        return subprocess.run([*start, *arguments]).returncode


def _inside(folder: Path, command: list[str]) -> int:
    network.names = lambda hosts: NAMES[:hosts]
    network.build(len(NAMES), network.Links(RATE), folder)
    (folder / "bin").mkdir()
    agent, login = folder / "agent", folder / "bin" / "ssh"
    # A login by ssh gets a bare environment; a local shell has everything that is installed.
    login.write_text(f'#!/bin/sh\nexec env -i HOME="$HOME" PATH=/usr/bin:/bin {shlex.quote(str(agent))} "$@"\n')
    login.chmod(0o755)
    os.environ["PATH"] = f"{login.parent}:{os.environ['PATH']}"
    command = [str(agent) if word == "ENTER" else word for word in command]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
