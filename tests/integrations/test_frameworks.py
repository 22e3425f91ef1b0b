"""Training and checkpoints in each framework. All cases of a framework run in the same processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.forks import Run

IMPORTS = ("pytest", "lightning.pytorch", "transformers.trainer", "accelerate")
PROGRAM = "from tests.integrations.{}_cases import main; main()"

pytest.importorskip("torch.distributed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "accelerate", "trainer"])
def test_cases(name: str, tmp_path: Path, forks: Run) -> None:
    """On two ranks; then on three, which resume from checkpoints of two; then as if each rank were on its own node."""
    for package in {"trainer": ["transformers", "accelerate"]}.get(name, [name]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    runs = ((2, "", {}), (3, "another_number", {}), (2, "its_own_folder", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}))
    for ranks, some, variables in runs:
        status, said = forks("-c", PROGRAM.format(name), tmp_path, some, ranks=ranks, **variables)
        assert status == 0, said
        assert said.count(": passed ") % ranks == 0
