"""Checkpoints in `tests/checkpoints/version1` were saved by an earlier revision of this library; they must still load.

Run this file as a script to save the files of a new version: ``python -m tests.checkpoints.test_version1 FOLDER``.
"""

from __future__ import annotations

import shutil
import sys
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
CHANGED = {"format", "order", "late", "unsent", "mixed"}  # fields of states that later versions write differently
VALUES = {"none": None, "list": [1, -2.5, "text", True, 2**64 - 1], 3: {"pair": (1, 2)}}


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def unchanged(state: Any) -> Any:
    """Return a state without the fields that have changed."""
    if isinstance(state, dict):
        return {key: unchanged(value) for key, value in state.items() if key not in CHANGED}
    return [*map(unchanged, state)] if isinstance(state, (list, tuple)) else state


def digests(objects: dict[str, Any]) -> dict[str, str]:
    return {name: digest(unchanged(each.state_dict())) for name, each in objects.items()}


def build(module: str, transport: simulated.SimulatedTransport, steps: int) -> dict[str, Any]:
    """Return objects of each class that has a state, by name, after ``steps`` steps."""
    if module == "sparsecomm":
        weights, parameters = gradients(99, 0), gradients(98, 0)
        outer = sc.NesterovSGD()
        schedule: dict[str, Any] = {"sync_every": 3, "fragments": [["a"], ["b"]], "fragment_sync_delay": 1}
        reducer = sc.Reducer(weights, 0.2, momentum=0.9, comm=transport)
        local = sc.LocalSteps(parameters, comm=transport, outer=outer, **schedule)
        adamw = sc.SparseAdamW(weights, comm=transport)
        for step in range(steps):
            mine = gradients(step, transport.rank)
            adamw.step(mine)
            for name, array in mine.items():
                parameters[name] -= 0.1 * array
            local.step(parameters)
            reducer.reduce(mine)
        return {"reducer": reducer, "local": local, "adamw": adamw}
    torch, sct = import_module("torch"), import_module("sparsecomm.torch")
    objects: dict[str, Any] = {}
    for name in ("SparseAdamW", "DistributedOptimizer", "DiLoCo"):
        model = torch.nn.Module()
        for key, values in gradients(97, 0).items():
            model.register_parameter(key, torch.nn.Parameter(torch.from_numpy(values)))
        named = list(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        if name == "SparseAdamW":
            objects[name] = optimizer = sct.SparseAdamW(named, lr=1e-2, comm=transport)
        elif name == "DistributedOptimizer":
            objects[name] = optimizer = sct.DistributedOptimizer(optimizer, named, 0.2, comm=transport)
        else:
            objects[name] = sct.DiLoCo(model, optimizer, sync_every=3, comm=transport)
        for step in range(steps):
            for key, p in named:
                p.grad = torch.from_numpy(gradients(step, transport.rank)[key])
            optimizer.step()
        objects[f"{name}'s model"] = model
    return objects


def save(module: str, folder: Path) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        objects = build(module, transport, 5)
        objects |= {"values": VALUES, "digests": digests(objects)}
        import_module(module).save(folder, 5, objects, comm=transport)

    run(2, program)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("P", [2, 3])
def test_checkpoints_of_version_1_load(module: str, P: int, tmp_path: Path) -> None:
    if module != "sparsecomm":
        pytest.importorskip("torch.distributed")
    shutil.copytree(SAVED, tmp_path / "copy")

    def program(transport: simulated.SimulatedTransport) -> None:
        objects = build(module, transport, 0)
        names = {"values": None, "digests": None}
        found = import_module(module).load(tmp_path / "copy", {**objects, **names}, comm=transport)
        assert (found.step, found.ranks) == (5, 2)
        assert found.values["values"] == VALUES
        if found.ranks == P:
            assert {name: digest(unchanged(each.state_dict())) for name, each in objects.items()} == found.values[
                "digests"
            ]

    run(P, program)


if __name__ == "__main__":
    for module in MODULES:
        save(module, Path(sys.argv[1]))
