"""Forks ranks from a process that has imported PyTorch once, and waits for them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.processes import free_port

EXITED_LATE = 10  # seconds that other ranks have to end after one has failed


def run_ranks(P: int, program: Callable[[int], None], seconds: float) -> tuple[list[int | None], list[str]]:
    """Run ``program(rank)`` in P processes, with the environment variables that torchrun sets.

    Returns:
        The exit status of each rank, ``None`` if it was still running and was killed; and the output of each.
    """
    with tempfile.TemporaryDirectory() as folder, free_port() as port:
        files = [Path(folder) / str(rank) for rank in range(P)]
        pids = [_fork(rank, P, port, program, files[rank]) for rank in range(P)]
        statuses: list[int | None] = [None] * P
        deadline = time.monotonic() + seconds
        while None in statuses and time.monotonic() < deadline:
            for rank, pid in enumerate(pids):
                if statuses[rank] is None:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        statuses[rank] = os.waitstatus_to_exitcode(status)
                        if statuses[rank]:
                            deadline = min(deadline, time.monotonic() + EXITED_LATE)
            time.sleep(0.01)
        for rank, pid in enumerate(pids):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # also the processes that a rank has started
            if statuses[rank] is None:
                os.waitpid(pid, 0)
        return statuses, [file.read_text(errors="replace") if file.exists() else "" for file in files]


def _fork(rank: int, P: int, port: int, program: Callable[[int], None], output: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(to, 1)
        os.dup2(to, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(P),
            LOCAL_WORLD_SIZE=str(P),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        program(rank)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
