"""Detection of a rank of a larger job that finds itself alone, and of ranks on one node."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

import sparsecomm as sc
from sparsecomm.transport import job, transport_of

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
LIGHTNING = {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
BATCH_SCRIPT = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURM_NPROCS": "8"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"SPARSECOMM_ALONE", "PMIX_RANK", *TORCHRUN, *OPEN_MPI, *MPICH, *MVAPICH}
    for name in names | {name for name in os.environ if name.startswith("SLURM")}:
        monkeypatch.delenv(name, raising=False)


def set_to(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def alone() -> None:
    job.check_alone("the world has one", "Do something.")


def test_a_default_process_group_with_one_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    set_to(TORCHRUN, monkeypatch)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(sc.InvalidInputError, match=r"2 ranks, but the default process group .* has one"):
            transport_of(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (TORCHRUN, "WORLD_SIZE=2, RANK=1: torchrun has"),
        (LIGHTNING, "WORLD_SIZE=2, LOCAL_RANK=1: torchrun"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=1: the mpirun of Open MPI"),
        (MPICH, "PMI_SIZE=2, PMI_RANK=1: a launcher of PMI"),
        (MVAPICH, "MV2_COMM_WORLD_SIZE=2, MV2_COMM_WORLD_RANK=1: the mpirun of MVAPICH"),
        (STEP, "SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1: srun"),
        # an allocation with one task at a time: Open MPI's ranks are not srun's
        (OPEN_MPI | STEP | {"SLURM_STEP_NUM_TASKS": "1"}, "OMPI_COMM_WORLD_SIZE=2"),
    ],
)
def test_one_of_several_is_not_alone(variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone()
    set_to(variables, monkeypatch)
    assert job.rank() == 1
    with pytest.raises(sc.InvalidInputError, match=f"^{said}.*2 ranks, but the world has one.*Do something"):
        alone()
    monkeypatch.setenv("SPARSECOMM_ALONE", "1")
    alone()


@pytest.mark.parametrize(
    "variables",
    [
        BATCH_SCRIPT,
        {"WORLD_SIZE": "2"},  # not from a launcher: there is no rank
        dict.fromkeys(TORCHRUN, "1"),
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        # a launcher in a Slurm step, whose tasks may be the launcher's daemons, one per node
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"} | STEP,
        TORCHRUN | {"WORLD_SIZE": "1"} | STEP,
        # a single rank that was started by a rank of a larger job
        TORCHRUN | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        TORCHRUN | {"WORLD_SIZE": "1"} | MPICH,
    ],
)
def test_one_of_one_may_be_alone(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_to(variables, monkeypatch)
    alone()


@pytest.mark.parametrize(
    ("restarts", "shared", "needed"),
    [("1", "True", True), ("0", "True", False), ("1", "False", False), ("", "", False)],
)
def test_a_restart_by_torchrun_may_need_another_store(
    restarts: str, shared: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to({"TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": shared}, monkeypatch)
    process_group = pytest.importorskip("sparsecomm.transport.process_group.transport")
    lost = {1: (process_group.DISCONNECTED, "Connection reset")}
    survivor = SimpleNamespace(rank=0, number=7, _lost=lost, describe_call=lambda: "call 7")
    error = process_group.ProcessGroupTransport._lost_error(survivor, 1)
    assert isinstance(error, sc.RankFailedError)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(error)) is needed


def test_an_id_is_that_of_a_node_since_it_booted(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = job.node_id()
    assert mine == job.node_id()
    assert len(mine) == job.NODE_ID_BYTES

    def unreadable(path: Path) -> str:
        raise FileNotFoundError(path)

    ids = {mine}
    for text in (lambda path: "one start", lambda path: "another", unreadable):
        monkeypatch.setattr(Path, "read_text", text)
        for host in ("a", "b"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            ids.add(job.node_id())
    assert len(ids) == 7
