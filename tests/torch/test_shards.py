"""Sharded models, between processes of this machine: what they do is in `training_shards.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.tensor")

from tests.torch import training_jobs


@pytest.mark.slow
def test_cases(tmp_path: Path) -> None:
    training_jobs.run(4, tmp_path, "training_shards")
