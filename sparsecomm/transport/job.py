"""The job of this process: its launcher, according to environment variables, and the nodes of its ranks.

A launcher passes each process its rank and the world size in environment variables. If MPI does not belong to the
launcher, or the program does not initialize `torch.distributed`, each process becomes a world of one rank.
`check_alone` detects this mistake.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparsecomm import config
from sparsecomm.errors import InvalidInputError

NODE_ID_BYTES = 8
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_TORCHRUN, _SLURM = "torchrun", "srun"  # other launchers set torchrun's variables, too
# The variables set by each launcher: the world size, then the rank, in order of preference.
_VARIABLES = {
    _TORCHRUN: ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "the mpirun of Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "a launcher of PMI (mpirun of MPICH or a derivative, or srun)": ("PMI_SIZE", "PMI_RANK"),
    "the mpirun of MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    _SLURM: ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # a batch script has SLURM_NTASKS, too
}
_OTHER_RANKS = ("PMIX_RANK", "SLURM_PROCID")  # set by launchers that do not set the world size


@dataclass(frozen=True)
class Launch:
    """How a launcher has started this process."""

    launcher: str
    size: int  # number of ranks started
    rank: int  # of this process; its local rank on its node if only that is known
    variables: str  # the environment variables and their values


def launches() -> list[Launch]:
    """Return the launchers of this process; several if one has started another.

    If there is another launcher, Slurm is omitted: it may have started that launcher, with another number of processes.
    """
    known = []
    for launcher, (size, *ranks) in _VARIABLES.items():
        name = next((name for name in ranks if _number(name) is not None), "")
        if (count := _number(size)) and (number := _number(name)) is not None:
            known.append(Launch(launcher, count, number, f"{size}={count}, {name}={number}"))
    return [launch for launch in known if launch.launcher != _SLURM] or known


def rank() -> int | None:
    """Return the rank of this process according to its launcher; None if unknown."""
    if known := launches():
        return known[0].rank
    return next((value for name in _OTHER_RANKS if (value := _number(name)) is not None), None)


def advice_for_restart() -> str:
    """Return advice about restarts by torchrun, to append to an error; "" if not needed."""
    # Restarted ranks reuse the agent's store, from which gloo may read addresses of dead ranks.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not _number("TORCHELASTIC_MAX_RESTARTS"):
        return ""
    return (
        " If the restart by torchrun fails with `Gloo connectFullMesh failed`, start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
    )


def check_alone(problem: str, advice: str) -> None:
    """Raise `InvalidInputError` if all launchers of this process started several ranks. SPARSECOMM_ALONE disables it.

    ``problem`` is a clause of the error, and ``advice`` a sentence.
    """
    known = launches()
    if config.alone() or not known or min(launch.size for launch in known) == 1:
        return
    launch = known[0]
    raise InvalidInputError(
        f"{launch.variables}: {launch.launcher} has started {launch.size} ranks, but {problem}. Each rank would run "
        f"alone. {advice} If this process should run alone, pass comm=MPI.COMM_SELF or set SPARSECOMM_ALONE=1"
    )


def check_alone_with_mpi(mpi: str, library: Path | None = None, libraries: Sequence[Path] = ()) -> None:
    """Call `check_alone` for a process whose MPI world has only one rank.

    ``library``: the file of the MPI called ``mpi``, if known. ``libraries``: those of all MPIs in this process.
    """
    launchers = [launch.launcher for launch in launches()]
    where = f" in {library}" if library else ""
    world = f"the world of MPI ({mpi}{where}) has one"
    if others := [str(file) for file in libraries if file != library]:
        world += f"; the process has also loaded another MPI ({', '.join(others)})"
    initialize = "Call torch.distributed.init_process_group() first"
    start = f"Start the program with the mpirun of that MPI{_mpirun_of(library)}"
    if _TORCHRUN in launchers:
        world = f"torch.distributed is not initialized, and {world}"
        advice = f"{initialize}. If ranks should use MPI instead: {start[0].lower()}{start[1:]}."
    elif _SLURM in launchers:
        advice = (
            f"{start}; or with `srun --mpi=TYPE`, with a type that this MPI supports (`srun --mpi=list`). "
            f"{initialize} if ranks should use a process group."
        )
    else:
        advice = f"{start}, or install mpi4py and sparsecomm for the MPI of this launcher."
    check_alone(world, advice)


def node_id() -> bytes:
    """Return a hash of this node's host name and boot id, `NODE_ID_BYTES` long."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot_id = ""
    return hashlib.sha256(f"{socket.gethostname()} {boot_id}".encode()).digest()[:NODE_ID_BYTES]


def number_nodes(node_ids: Sequence[bytes]) -> list[int]:
    """Number the nodes from 0 in the order of their first ranks; return the node number of each rank."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(node_ids))}
    return [numbers[node] for node in node_ids]


def ipv4_address(interface: str) -> str | None:
    """Return the first IPv4 address of a network interface, or ``None``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _mpirun_of(library: Path | None) -> str:
    """Return ", " and the path of the mpirun installed with a libmpi; "" if there is none."""
    if library is not None:
        for name in ("mpirun", "mpiexec"):
            program = library.parent.parent / "bin" / name
            if os.access(program, os.X_OK):
                return f", {program}"
    return ""
