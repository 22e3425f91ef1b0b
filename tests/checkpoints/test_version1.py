"""Checkpoints in `tests/checkpoints/version1`, which an earlier revision of this library saved, must still load."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.ranks import run
from tests.stress.states import digest

SAVED = Path(__file__).parent / "version1"
MODULES = ["sparsecomm", "sparsecomm.torch"]
SHAPES = {"a": (5, 4), "b": (3,)}
# Fields of states that later versions write differently.
CHANGED = ["format", "order", "late", "unsent", "mixed", "units", "moments", "units_lag", "slices", "unsummed"]
VALUES = {"none": None, "list": [1, -2.5, "text", True, 2**64 - 1], 3: {"pair": (1, 2)}}


def zeros() -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def unchanged(state: Any) -> Any:
    """Return a state without the fields that have changed."""
    if isinstance(state, dict):
        return {key: unchanged(value) for key, value in state.items() if key not in CHANGED}
    return [*map(unchanged, state)] if isinstance(state, (list, tuple)) else state


def build(module: str, transport: simulated.SimulatedTransport) -> dict[str, Any]:
    """Return objects of each class that has a state, by name, as they were before the saved training."""
    if module == "sparsecomm":
        schedule: dict[str, Any] = {"sync_every": 3, "fragments": [["a"], ["b"]], "fragment_sync_delay": 1}
        return {
            "reducer": sc.Reducer(zeros(), 0.2, momentum=0.9, comm=transport),
            "local": sc.LocalSteps(zeros(), comm=transport, outer=sc.NesterovSGD(), **schedule),
            "adamw": sc.SparseAdamW(zeros(), comm=transport),
        }
    torch, sct = import_module("torch"), import_module("sparsecomm.torch")
    objects: dict[str, Any] = {}
    for name in ("SparseAdamW", "DistributedOptimizer", "DiLoCo"):
        objects[f"{name}'s model"] = model = torch.nn.Module()
        for key, values in zeros().items():
            model.register_parameter(key, torch.nn.Parameter(torch.from_numpy(values)))
        named = list(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        if name == "SparseAdamW":
            objects[name] = sct.SparseAdamW(named, lr=1e-2, comm=transport)
        elif name == "DistributedOptimizer":
            objects[name] = sct.DistributedOptimizer(optimizer, named, 0.2, comm=transport)
        else:
            objects[name] = sct.DiLoCo(model, optimizer, sync_every=3, comm=transport)
    return objects


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("P", [2, 3])
def test_checkpoints_of_version_1_load(module: str, P: int, tmp_path: Path) -> None:
    if module != "sparsecomm":
        pytest.importorskip("torch.distributed")
    shutil.copytree(SAVED, tmp_path / "copy")

    def program(transport: simulated.SimulatedTransport) -> None:
        objects = build(module, transport)
        names = {"values": None, "digests": None}
        checkpoint = import_module(module).load(tmp_path / "copy", {**objects, **names}, comm=transport)
        assert (checkpoint.step, checkpoint.ranks) == (5, 2)
        assert checkpoint.values["values"] == VALUES
        if checkpoint.ranks == P:
            owned = "adamw", "SparseAdamW"  # ranks now own parts of the moments
            expected = {name: value for name, value in checkpoint.values["digests"].items() if name not in owned}
            assert {name: digest(unchanged(objects[name].state_dict())) for name in expected} == expected
        if module != "sparsecomm":
            state = objects["SparseAdamW"].consolidate_state_dict(to=1)
            assert (transport.rank == 1) == (state is not None)
            for entry in state["state"].values() if state else ():
                assert entry["step"] == 5 >= entry["last_step"].max()
                assert ((entry["exp_avg_sq"] > 0) == (entry["last_step"] > 0)).all()

    run(P, program)
