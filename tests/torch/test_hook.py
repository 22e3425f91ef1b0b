"""The hook of DistributedDataParallel, between processes of this machine: what they do is in `training_hook.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from tests.thinning import whole
from tests.torch import training_jobs


@pytest.mark.slow
@pytest.mark.parametrize("P", [whole(1), 3])
def test_cases(P: int, tmp_path: Path) -> None:
    training_jobs.run(P, tmp_path, "training_hook", "training_amp")


def test_without_torch_it_is_said_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import sparsecomm.torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "sparsecomm.torch needs PyTorch" in done.stderr
    assert re.search(r"pip install .*\[torch\]'", done.stderr)
