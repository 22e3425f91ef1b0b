"""`DistributedOptimizer`, between processes of this machine: see `training_optimizer.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from tests.thinning import exhaustive
from tests.torch import training_jobs


@pytest.mark.slow
@pytest.mark.parametrize("P", [exhaustive(1), 3])
def test_cases(P: int, tmp_path: Path) -> None:
    training_jobs.run(P, tmp_path, "training_optimizer", "training_lives")
