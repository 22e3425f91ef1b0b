"""The job that a launcher has started, as the environment of this process describes it.

A launcher tells each process by environment variables how many ranks there are, and which of them it is. An MPI that is
not the launcher's does not know that, and neither does a program that has not initialised `torch.distributed`: every
process then has a world of its own, of one rank. `check_alone` tells that from a world of one rank that is meant.

Which ranks share a node they find out themselves: every rank sends the others an identifier of its node, and equal
identifiers are one node. ``MPI_Comm_split_type`` would find the same, but it is a blocking collective: a rank that
never makes the first call on a communicator would hang the others, where `sparsecomm.transport.transport_of` must raise
`TimeoutError`.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsecomm import config
from sparsecomm.errors import InvalidInputError

__all__ = [
    "NODE_ID_BYTES",
    "Launch",
    "advice_for_restart",
    "check_alone",
    "check_alone_with_mpi",
    "launches",
    "node_id",
    "number_nodes",
    "rank",
]

NODE_ID_BYTES = 8

_TORCHRUN, _SLURM = "torchrun", "srun"  # the first stands for all that do as it does
# The variables that launchers set: how many ranks there are, and which of them this one is, by the first that is there.
_VARIABLES = {
    _TORCHRUN: ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "the mpirun of Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "a launcher of PMI (mpirun of MPICH or of its kin, or srun)": ("PMI_SIZE", "PMI_RANK"),
    "the mpirun of MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    _SLURM: ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # SLURM_NTASKS is there in a batch script, too
}
_OTHER_RANKS = ("PMIX_RANK", "SLURM_PROCID")  # of launchers that do not say how many ranks there are


@dataclass(frozen=True)
class Launch:
    """A launcher's word on this process.

    Attributes:
        launcher: its name.
        size: ranks that it has started.
        rank: the number of this one, on its node if it says no more.
        said: the variables and their values.
    """

    launcher: str
    size: int
    rank: int
    said: str


def launches() -> list[Launch]:
    """Return what launchers say of this process; several, if one has started another.

    Slurm is left out if there are others: `mpirun` and `torchrun` may have been started by it, in other numbers.
    """
    found = []
    for launcher, (size, *ranks) in _VARIABLES.items():
        name = next((name for name in ranks if _number(name) is not None), "")
        if (count := _number(size)) and (number := _number(name)) is not None:
            found.append(Launch(launcher, count, number, f"{size}={count}, {name}={number}"))
    return [launch for launch in found if launch.launcher != _SLURM] or found


def rank() -> int | None:
    """Return the rank of this process as its launcher says; None if none does."""
    if found := launches():
        return found[0].rank
    return next((value for name in _OTHER_RANKS if (value := _number(name)) is not None), None)


def advice_for_restart() -> str:
    """Return, for a message, what lets torchrun restart the ranks; "" if it need not be said.

    The ranks of a restart share the agent's store with those before, and gloo may read the addresses of the dead there
    (PyTorch 2.13).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not _number("TORCHELASTIC_MAX_RESTARTS"):
        return ""
    return (
        " If the restart by torchrun fails with `Gloo connectFullMesh failed`, start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
    )


def check_alone(found: str, advice: str) -> None:
    """Check that a world of one rank is meant to have one.

    Args:
        found: what has one rank, for the message.
        advice: what to do, for the message.

    Raises:
        InvalidInputError: a launcher says that it has started several ranks, and none that it has started one; and
            ``SPARSECOMM_ALONE`` is not set.
    """
    said = launches()
    if config.alone() or not said or min(launch.size for launch in said) == 1:
        return
    launch = said[0]
    raise InvalidInputError(
        f"{launch.said}: {launch.launcher} has started {launch.size} ranks, but {found}. Each of them would go on "
        f"alone. {advice} If this process is to be alone, pass comm=MPI.COMM_SELF or set SPARSECOMM_ALONE=1"
    )


def check_alone_with_mpi(mpi: str, library: Path | None = None, libraries: Sequence[Path] = ()) -> None:
    """Check that MPI's world, of one rank, is meant to have one.

    Args:
        mpi: name and version of MPI.
        library: its file, if that is known.
        libraries: of all MPIs that this process has loaded.

    Raises:
        InvalidInputError: as `check_alone`.
    """
    launchers = [launch.launcher for launch in launches()]
    where = f" in {library}" if library else ""
    world = f"the world of MPI ({mpi}{where}) has one"
    if others := [str(file) for file in libraries if file != library]:
        world += f"; the process has loaded another MPI, too ({', '.join(others)})"
    initialise = "Call torch.distributed.init_process_group() first"
    start = f"Start the program with the mpirun of that MPI{_mpirun_of(library)}"
    if _TORCHRUN in launchers:
        world = f"torch.distributed is not initialised, and {world}"
        advice = f"{initialise}. {start} if ranks are to talk over MPI."
    elif _SLURM in launchers:
        advice = (
            f"{start}; or with `srun --mpi=TYPE`, of a type that this MPI knows (`srun --mpi=list`). "
            f"{initialise} if ranks are to talk over a process group."
        )
    else:
        advice = f"{start}, or install mpi4py and sparsecomm for the MPI of this one."
    check_alone(world, advice)


def node_id() -> bytes:
    """Return `NODE_ID_BYTES` that tell this node from others: a hash of its host name and of its kernel's boot id."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot_id = ""
    return hashlib.sha256(f"{socket.gethostname()} {boot_id}".encode()).digest()[:NODE_ID_BYTES]


def number_nodes(node_ids: Sequence[bytes]) -> list[int]:
    """Return, for each rank, the number of its node, counted from 0 in order of rank. ``node_ids``: by rank."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(node_ids))}
    return [numbers[node] for node in node_ids]


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _mpirun_of(library: Path | None) -> str:
    """Return, for a message, the mpirun that was installed with a libmpi."""
    if library is not None:
        for name in ("mpirun", "mpiexec"):
            program = library.parent.parent / "bin" / name
            if os.access(program, os.X_OK):
                return f", {program}"
    return ""
